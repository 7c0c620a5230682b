"""Held-out evaluation: the same prompts and seeds each time, no noise in the steps.

In: the trainer and a dataset. Out: metrics, and for the main evaluation pictures (or videos, or sound) and a table in
the run's folder. Fixed prompts that are only looked at go the same way without rewards.
"""

import dataclasses
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor

from .advantages import combine
from .context import one_a_group
from .inputs import check_count
from .media import sampling_rate
from .ranks import gathered_means
from .records import write_files, write_samples
from .rewards import reward_name
from .rollout import rollout, sample_seed

if TYPE_CHECKING:
    from .trainer import DiffusionGRPOTrainer


@dataclasses.dataclass
class _Part:
    """What one process made of one dataset: `rewards` (samples, functions) are its own, `every` those of all."""

    samples: list[Any]
    rows: list[dict]
    places: list[int]
    rewards: Tensor
    extra: dict[str, list]
    every: Tensor


@torch.no_grad()
def evaluate_policy(
    trainer: "DiffusionGRPOTrainer", datasets: dict[str, Dataset], prefix: str, pipeline_kwargs: dict[str, Any] | None
) -> dict[str, float]:
    """See [`DiffusionGRPOTrainer.evaluate`]; several datasets are measured each and together."""
    start = time.perf_counter()
    trainer.model.eval()
    own_metrics: dict[str, list[float]] = defaultdict(list)  # not among those of the training
    parts = {name: _part(trainer, dataset, pipeline_kwargs or {}, own_metrics) for name, dataset in datasets.items()}
    metrics = _metrics(trainer, prefix, torch.cat([part.every for part in parts.values()]))
    for name, part in parts.items() if len(parts) > 1 else ():
        metrics |= _metrics(trainer, f"{prefix}_{name}", part.every)
    own = gathered_means(trainer.accelerator, own_metrics)
    metrics |= {f"{prefix}_{name}": value for name, value in own.items()}
    metrics[f"{prefix}_runtime"] = time.perf_counter() - start
    if prefix == "eval":
        if trainer.args.writes_samples:
            _keep(trainer, parts)
        trainer.accelerator.wait_for_everyone()
    return metrics


def _part(
    trainer: "DiffusionGRPOTrainer", dataset: Dataset, pipeline_kwargs: dict, own_metrics: dict[str, list[float]]
) -> _Part:
    count = trainer.args.num_generations_eval
    total = len(dataset) * count
    prompts, own = _places(trainer, len(dataset))
    mine = [prompt * count + turn for prompt in prompts for turn in range(count)]  # a prompt's samples side by side
    groups = [place // count for place in mine]
    funcs, extra = trainer.reward_funcs + trainer.eval_reward_funcs, {}
    with trainer.ranks.apart("samples for the evaluation"):
        rows = trainer.inputs.rows(dataset, groups)
        samples = trainer.with_weights(_sample, trainer, rows, mine, pipeline_kwargs)
        samples, rows, mine, groups = (part[: own * count] for part in (samples, rows, mine, groups))
        local = torch.empty(0, len(funcs))
        if rows:
            local = trainer._score(funcs, samples, rows, own_metrics, groups, extra)
    return _Part(samples, rows, mine, local, extra, _gathered(trainer, local, total))


@torch.no_grad()
def write_validation(trainer: "DiffusionGRPOTrainer") -> Path:
    """Samples `validation_prompts`, from the same seeds each time and without noise in the steps; scores nothing.

    Returns:
        the folder with a picture, video or sound a prompt.
    """
    args, accelerator = trainer.args, trainer.accelerator
    trainer.model.eval()
    places, own = _places(trainer, len(args.validation_prompts))
    rows = [{"prompt": args.validation_prompts[place]} for place in places]
    with trainer.averaged_weights():
        samples = trainer.with_weights(_sample, trainer, rows, places, {})
    samples, places = (part[: own if args.writes_samples else 0] for part in (samples, places))
    folder = Path(args.output_dir) / "validation" / f"step-{trainer.state.global_step:06d}"
    write_files(samples, [folder / f"{place:04d}" for place in places], folder, args.fps, sampling_rate(trainer.pipe))
    accelerator.wait_for_everyone()
    return folder


def _places(trainer: "DiffusionGRPOTrainer", total: int) -> tuple[list[int], int]:
    """Which of all prompts this process samples, and how many of them are its own: the others only keep step."""
    processes = trainer.args.data_processes
    own = list(range(trainer.args.data_process, total, processes))
    spare = math.ceil(total / processes) - len(own) if trainer.passes_together else 0
    return own + [0] * spare, len(own)


def _metrics(trainer: "DiffusionGRPOTrainer", prefix: str, rewards: Tensor) -> dict[str, float]:
    """Means and standard errors of (samples, functions) rewards; what no function scored is left out."""
    metrics = _mean_and_error(f"{prefix}_reward", _combined(trainer, rewards))
    for func, column in zip(trainer.reward_funcs + trainer.eval_reward_funcs, rewards.T, strict=True):
        metrics |= _mean_and_error(f"{prefix}_rewards/{reward_name(func)}", column, "/mean", "/std_error")
    return metrics


def _sample(trainer: "DiffusionGRPOTrainer", rows: list[dict], places: list[int], pipeline_kwargs: dict) -> list[Any]:
    args, samples = trainer.args, [None] * len(rows)
    trainer.inputs.learn(trainer.policy, rows, trainer.noise_level)
    for first in range(0, len(rows), args.per_device_eval_batch_size):
        trainer.policy.prompts.clear()
        for part in trainer.inputs.parts(rows[first : first + args.per_device_eval_batch_size]):
            chosen = [first + number for number in part]
            images, _ = rollout(
                trainer.policy,
                trainer.inputs([rows[row] for row in chosen], **pipeline_kwargs),
                seeds=[sample_seed(args.seed, "evaluation", places[row]) for row in chosen],
                num_inference_steps=args.eval_num_inference_steps or args.num_inference_steps,
                noise_level=0.0,
            )
            check_count(images, len(chosen), trainer.pipe)
            for row, image in zip(chosen, images, strict=True):
                samples[row] = image
    trainer.policy.prompts.clear()  # what was encoded beside other prompts differs in the last bits
    return samples


def _gathered(trainer: "DiffusionGRPOTrainer", local: Tensor, total: int) -> Tensor:
    """(total, functions) rewards of all processes, in the order of the samples."""
    count, each = trainer.args.data_processes, trainer.args.num_generations_eval
    if count == 1:
        return local
    padded = torch.full((math.ceil(total / each / count) * each, local.shape[1]), float("nan"))
    padded[: len(local)] = local
    every = one_a_group(trainer.accelerator.gather(padded.to(trainer.args.device)), trainer.args).cpu()
    every = every.reshape(count, -1, each, local.shape[1]).transpose(0, 1)  # (processes, prompts, samples, functions)
    return every.reshape(-1, local.shape[1])[:total]


def _combined(trainer: "DiffusionGRPOTrainer", rewards: Tensor) -> Tensor:
    """(samples,) the one number of the trained rewards, as in training; NaN where none scored the sample."""
    trained = rewards[:, : len(trainer.reward_weights)]
    return combine(trained, torch.tensor(trainer.reward_weights), trainer.args.multi_objective_aggregation)


def _mean_and_error(key: str, values: Tensor, mean: str = "", error: str = "_std_error") -> dict[str, float]:
    values = values[~values.isnan()]
    if len(values) == 0:
        return {}
    spread = values.double().std().item() / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {f"{key}{mean}": values.double().mean().item(), f"{key}{error}": spread}


def _keep(trainer: "DiffusionGRPOTrainer", parts: dict[str, _Part]) -> None:
    """Pictures of the first prompts of each dataset, and one table of all samples of this process."""
    folder = Path(trainer.args.output_dir) / "evaluations"
    step = f"step-{trainer.state.global_step:06d}"
    (folder / step).mkdir(parents=True, exist_ok=True)
    names = [reward_name(func) for func in trainer.reward_funcs + trainer.eval_reward_funcs]
    shown = math.ceil(trainer.args.num_completions_to_log / len(parts))
    columns: dict[str, list] = defaultdict(list)
    for dataset, part in parts.items():
        stem, count = f"{dataset}-" if len(parts) > 1 else "", len(part.rows)
        stems = [folder / step / f"{stem}{place:04d}" if place < shown else None for place in part.places]
        files = write_files(part.samples, stems, folder.parent, trainer.args.fps, sampling_rate(trainer.pipe))
        table = {
            "step": [trainer.state.global_step] * count,
            "dataset": [dataset] * count,
            "prompt": [row["prompt"] for row in part.rows],
            "seed": [sample_seed(trainer.args.seed, "evaluation", place) for place in part.places],
            **files,
            **dict(zip(names, part.rewards.T.tolist(), strict=True)),
            "reward": _combined(trainer, part.rewards).tolist(),
        }
        done = len(columns["step"])
        for name, values in (part.extra | table).items():  # a column may be one dataset's alone
            columns[name] += [None] * (done - len(columns[name])) + values
    for values in columns.values():
        values += [None] * (len(columns["step"]) - len(values))
    rank = f"-rank{trainer.args.data_process}" if trainer.args.data_processes > 1 else ""
    write_samples(folder / f"{step}{rank}.parquet", dict(columns))
