"""
Pictures of a pipeline for a dataset of prompts, and what the rewards say of them; files in a folder leave.

A module of its own because it is the ordinary use of a pipeline: its own scheduler, no trajectory, no training.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset

from . import records
from .data import pipeline_inputs
from .rewards import reward_name, score

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image


def write_samples(
    pipe: "DiffusionPipeline",
    dataset: Dataset,
    reward_funcs: list[Callable],
    output_dir: Path,
    batch_size: int = 16,
    seed: int = 0,
    **options: Any,
) -> dict[str, float]:
    """
    Makes one picture a row, row i with seed `seed + i`, and writes `0000.png`, ... and `samples.parquet`.

    Args:
        options: further arguments of the pipeline's call, the same for every picture.

    Returns:
        Mean of each reward over the pictures it scored, by name.

    Raises:
        ValueError: the pipeline returns no pictures.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    images = make_images(pipe, dataset, batch_size, seed, options)
    files = [f"{index:04d}.png" for index in range(len(images))]
    for file, image in zip(files, images):
        image.save(output_dir / file)
    columns = dataset.to_dict()
    table = {**columns, "seed": [seed + index for index in range(len(images))], "image": files}
    means = {}
    if reward_funcs:
        others = {name: values for name, values in columns.items() if name != "prompt"}
        scores = score(reward_funcs, images=images, prompts=columns["prompt"], columns=others, failure_dir=output_dir)
        for func, values in zip(reward_funcs, scores.T):
            table[reward_name(func)] = values.tolist()
            means[reward_name(func)] = values.nanmean().item()
    records.write_samples(output_dir / "samples.parquet", table)
    return means


def make_images(
    pipe: "DiffusionPipeline", dataset: Dataset, batch_size: int, seed: int, options: dict[str, Any]
) -> "list[Image]":
    """One picture a row of `dataset`; the seeds belong to the rows, so the batch size changes nothing visible."""
    accepted = set(inspect.signature(pipe.__call__).parameters) - set(options)
    images: list[Image] = []
    for start in range(0, len(dataset), batch_size):
        rows = dataset.select(range(start, min(start + batch_size, len(dataset)))).to_list()
        generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(rows))]
        output = pipe(**pipeline_inputs(rows, accepted), **options, generator=generators)
        if "images" not in output:
            raise ValueError(f"{type(pipe).__name__} returns {', '.join(output)}; `sample` writes pictures only.")
        images += output.images
    return images
