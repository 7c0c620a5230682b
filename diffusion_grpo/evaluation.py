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

from .advantages import combine
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
    count = args.num_generations_eval
    prompts = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    mine = [prompt * count + turn for prompt in prompts for turn in range(count)]  # a prompt's samples side by side
    rows = [dataset[place // args.num_generations_eval] for place in mine]
    samples = _sample(trainer, rows, mine, pipeline_kwargs or {})
    funcs = trainer.reward_funcs + trainer.eval_reward_funcs
    own_metrics: dict[str, list[float]] = defaultdict(list)  # not among those of the training
    groups = [place // count for place in mine]
    local = trainer._score(funcs, samples, rows, own_metrics, groups) if rows else torch.empty(0, len(funcs))
    rewards = _gathered(trainer, local, total)
    reward = _combined(trainer, rewards)
    metrics = _mean_and_error(f"{prefix}_reward", reward[~reward.isnan()])
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
    count, each = trainer.accelerator.num_processes, trainer.args.num_generations_eval
    if count == 1:
        return local
    padded = torch.full((math.ceil(total / each / count) * each, local.shape[1]), float("nan"))
    padded[: len(local)] = local
    every = trainer.accelerator.gather(padded.to(trainer.args.device)).cpu()
    every = every.reshape(count, -1, each, local.shape[1]).transpose(0, 1)  # (processes, prompts, samples, functions)
    return every.reshape(-1, local.shape[1])[:total]


def _combined(trainer: "DiffusionGRPOTrainer", rewards: Tensor) -> Tensor:
    """(samples,) the one number of the trained rewards, as in training; NaN where none scored the sample."""
    trained = rewards[:, : len(trainer.reward_weights)]
    return combine(trained, torch.tensor(trainer.reward_weights), trainer.args.multi_objective_aggregation)


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
            _save_sample(sample, folder / step / f"{place:04d}.png", trainer.args.fps).relative_to(folder.parent)
            if shown
            else None
        )
    names = [reward_name(func) for func in trainer.reward_funcs + trainer.eval_reward_funcs]
    columns = {
        "step": [trainer.state.global_step] * len(rows),
        "prompt": [row["prompt"] for row in rows],
        "seed": [sample_seed(trainer.args.seed, "evaluation", place) for place in places],
        "image": [str(path) if path else None for path in paths],
        **dict(zip(names, rewards.T.tolist(), strict=True)),
        **(trainer._extras if rows else {}),
        "reward": _combined(trainer, rewards).tolist(),
    }
    rank = f"-rank{trainer.accelerator.process_index}" if trainer.accelerator.num_processes > 1 else ""
    write_samples(folder / f"{step}{rank}.parquet", columns)


def _save_sample(sample: Image.Image | list[Image.Image], path: Path, fps: float) -> Path:
    """A picture as PNG; of a video the first frame, and beside it all frames as an animation."""
    if isinstance(sample, list):
        duration = round(1000 / fps)  # milliseconds a frame
        sample[0].save(path.with_suffix(".webp"), save_all=True, append_images=sample[1:], duration=duration, loop=0)
        sample = sample[0]
    sample.save(path)
    return path
