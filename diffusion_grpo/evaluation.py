"""Held-out evaluation: the same prompts and seeds each time, no noise in the steps.

In: the trainer and a dataset. Out: metrics, and for the main evaluation pictures and a table in the run's folder.
"""

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from PIL import Image
from torch import Tensor

from .records import write_samples
from .rewards import reward_name
from .rollout import rollout, sample_seed

if TYPE_CHECKING:
    from .trainer import DiffusionGRPOTrainer


@torch.no_grad()
def evaluate_policy(
    trainer: "DiffusionGRPOTrainer", dataset: Dataset, prefix: str, pipeline_kwargs: dict[str, Any] | None
) -> dict[str, float]:
    """See [`DiffusionGRPOTrainer.evaluate`]."""
    start, args, accelerator = time.perf_counter(), trainer.args, trainer.accelerator
    trainer.model.eval()
    total = len(dataset) * args.num_generations_eval
    mine = list(range(accelerator.process_index, total, accelerator.num_processes))
    rows = [dataset[place // args.num_generations_eval] for place in mine]
    samples = _sample(trainer, rows, mine, pipeline_kwargs or {})
    funcs = trainer.reward_funcs + trainer.eval_reward_funcs
    own_metrics: dict[str, list[float]] = defaultdict(list)  # not among those of the training
    local = trainer._score(funcs, samples, rows, own_metrics) if rows else torch.empty(0, len(funcs))
    rewards = _gathered(trainer, local, total)
    weights = torch.tensor(trainer.reward_weights)
    reward = (rewards[:, : len(weights)].nan_to_num() * weights).sum(1)
    metrics = _mean_and_error(f"{prefix}_reward", reward)
    for func, column in zip(funcs, rewards.T, strict=True):
        metrics |= _mean_and_error(
            f"{prefix}_rewards/{reward_name(func)}", column[~column.isnan()], "/mean", "/std_error"
        )
    metrics |= {f"{prefix}_{name}": sum(values) / len(values) for name, values in own_metrics.items()}
    metrics[f"{prefix}_runtime"] = time.perf_counter() - start
    if prefix == "eval":
        _keep(trainer, samples, rows, mine, local)
        accelerator.wait_for_everyone()
    return metrics


def _sample(trainer: "DiffusionGRPOTrainer", rows: list[dict], places: list[int], pipeline_kwargs: dict) -> list[Any]:
    args, samples = trainer.args, []
    for first in range(0, len(rows), args.per_device_eval_batch_size):
        trainer.policy.prompts.clear()
        chunk = slice(first, first + args.per_device_eval_batch_size)
        images, _ = rollout(
            trainer.policy,
            trainer.inputs(rows[chunk], **pipeline_kwargs),
            seeds=[sample_seed(args.seed, "evaluation", place) for place in places[chunk]],
            num_inference_steps=args.eval_num_inference_steps or args.num_inference_steps,
            noise_level=0.0,
        )
        samples += list(images)
    return samples


def _gathered(trainer: "DiffusionGRPOTrainer", local: Tensor, total: int) -> Tensor:
    """(total, functions) rewards of all processes, in the order of the samples."""
    count = trainer.accelerator.num_processes
    if count == 1:
        return local
    padded = torch.full((math.ceil(total / count), local.shape[1]), float("nan"))
    padded[: len(local)] = local
    every = trainer.accelerator.gather(padded.to(trainer.args.device)).cpu()
    return every.reshape(count, -1, local.shape[1]).transpose(0, 1).reshape(-1, local.shape[1])[:total]


def _mean_and_error(key: str, values: Tensor, mean: str = "", error: str = "_std_error") -> dict[str, float]:
    if len(values) == 0:
        return {}
    spread = values.double().std().item() / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {f"{key}{mean}": values.double().mean().item(), f"{key}{error}": spread}


def _keep(
    trainer: "DiffusionGRPOTrainer", samples: list[Any], rows: list[dict], places: list[int], rewards: Tensor
) -> None:
    """Pictures of the first prompts, and the table of all samples of this process."""
    folder = Path(trainer.args.output_dir) / "evaluations"
    step = f"step-{trainer.state.global_step:06d}"
    (folder / step).mkdir(parents=True, exist_ok=True)
    paths = []
    for sample, place in zip(samples, places, strict=True):
        shown = place < trainer.args.num_completions_to_log
        paths.append(
            _save_sample(sample, folder / step / f"{place:04d}.png").relative_to(folder.parent) if shown else None
        )
    names = [reward_name(func) for func in trainer.reward_funcs + trainer.eval_reward_funcs]
    weights = torch.tensor(trainer.reward_weights)
    columns = {
        "step": [trainer.state.global_step] * len(rows),
        "prompt": [row["prompt"] for row in rows],
        "seed": [sample_seed(trainer.args.seed, "evaluation", place) for place in places],
        "image": [str(path) if path else None for path in paths],
        **dict(zip(names, rewards.T.tolist(), strict=True)),
        "reward": (rewards[:, : len(weights)].nan_to_num() * weights).sum(1).tolist(),
    }
    rank = f"-rank{trainer.accelerator.process_index}" if trainer.accelerator.num_processes > 1 else ""
    write_samples(folder / f"{step}{rank}.parquet", columns)


def _save_sample(sample: Image.Image | list[Image.Image], path: Path) -> Path:
    """A picture as PNG; of a video the first frame, and beside it all frames as an animation."""
    if isinstance(sample, list):
        sample[0].save(path.with_suffix(".webp"), save_all=True, append_images=sample[1:], duration=1000 // 8, loop=0)
        sample = sample[0]
    sample.save(path)
    return path
