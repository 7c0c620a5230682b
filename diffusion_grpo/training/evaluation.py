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

from ..algorithms.advantages import combine
from ..data.inputs import check_count
from ..distributed.collectives import gathered_json, gathered_means
from ..distributed.deepspeed import in_step
from ..media.files import sampling_rate
from ..policy.rollout import rollout, sample_seed
from ..rewards import Reward
from ..run.records import write_files, write_samples
from ..run.watch import (
    cosine_distance,
    diversity,
    embedders,
    embeddings,
    kind_of,
    pixel_distance,
    since_evaluation,
    thumbnails,
    watched_rewards,
)

if TYPE_CHECKING:
    from ..trainer import DiffusionGRPOTrainer


@dataclasses.dataclass
class _Part:
    """What one process made of one dataset: `rewards` (samples, functions) are its own, `every` those of all.

    Their last columns are those of the `watched` rewards.
    """

    samples: list[Any]
    rows: list[dict]
    places: list[int]
    rewards: Tensor
    extra: dict[str, list]
    every: Tensor
    watched: list[Reward]
    diversity: dict[str, float]


@torch.no_grad()
def evaluate_policy(
    trainer: "DiffusionGRPOTrainer", datasets: dict[str, Dataset], prefix: str, pipeline_kwargs: dict[str, Any] | None
) -> dict[str, float]:
    """See [`DiffusionGRPOTrainer.evaluate`]; several datasets are measured each and together."""
    start = time.perf_counter()
    trainer.model.eval()
    own_metrics: dict[str, list[float]] = defaultdict(list)  # not among those of the training
    parts = {name: _part(trainer, dataset, pipeline_kwargs or {}, own_metrics) for name, dataset in datasets.items()}
    watched = next(iter(parts.values())).watched
    metrics = _metrics(trainer, prefix, torch.cat([part.every for part in parts.values()]), watched)
    for name, part in parts.items() if len(parts) > 1 else ():
        metrics |= _metrics(trainer, f"{prefix}_{name}", part.every, watched)
    for key in dict.fromkeys(key for part in parts.values() for key in part.diversity):
        found = [part.diversity[key] for part in parts.values() if key in part.diversity]
        metrics[f"{prefix}_{key}"] = sum(found) / len(found)
    own = gathered_means(trainer.accelerator, own_metrics)
    metrics |= {f"{prefix}_{name}": value for name, value in own.items()}
    metrics[f"{prefix}_runtime"] = time.perf_counter() - start
    if prefix == "eval":
        metrics |= {f"eval_{name}": value for name, value in since_evaluation(trainer.state.log_history).items()}
        if trainer.args.writes_samples:
            _keep(trainer, parts)
        trainer.accelerator.wait_for_everyone()
    return metrics


def _part(
    trainer: "DiffusionGRPOTrainer", dataset: Dataset, pipeline_kwargs: dict, own_metrics: dict[str, list[float]]
) -> _Part:
    count, processes = trainer.args.num_generations_eval, trainer.args.data_processes
    total = len(dataset) * count
    prompts, own = _places(trainer, len(dataset))
    mine = [prompt * count + turn for prompt in prompts for turn in range(count)]  # a prompt's samples side by side
    made = [
        [prompt * count + turn for prompt in range(process, len(dataset), processes) for turn in range(count)]
        for process in range(processes)
    ]
    funcs, extra = trainer.reward_funcs + trainer.eval_reward_funcs, {}
    kind, points, local = None, {}, None
    with trainer.ranks.apart("reads rows for the evaluation"):  # who fails at it comes to no collective of the samples
        rows = trainer.inputs.rows(dataset, [place // count for place in mine])
    with trainer.ranks.apart("samples for the evaluation"):
        latents = [None] * len(rows) if trainer._takes_latents(funcs) else None
        samples = trainer.with_weights(_sample, trainer, rows, mine, pipeline_kwargs, latents)
        samples, rows, mine = (part[: own * count] for part in (samples, rows, mine))
        latents = latents and latents[: own * count]
        places, scored, latents = trainer._to_score(made, count, samples, latents)
        if places:
            kind, groups = kind_of(scored), [place // count for place in places]
            looked_at = funcs + watched_rewards(trainer.args.watch_rewards, kind, funcs)
            scored_rows = rows if places == mine else trainer.inputs.rows(dataset, groups)
            local = trainer._score(looked_at, scored, scored_rows, own_metrics, groups, extra, latents)
            points = _points(funcs, scored) if count > 1 and kind is not None else {}
    kind, *_ = gathered_json(trainer.accelerator, kind)  # the first process has samples
    watched = watched_rewards(trainer.args.watch_rewards, kind, funcs)
    local = torch.empty(0, len(funcs) + len(watched)) if local is None else local
    if trainer.post is not None:
        trainer.post.close()
        extra = trainer._extra_of(extra, places, mine)
    every = _gathered(trainer, local, places, total)
    found = _diversity(trainer, points, places, total)
    return _Part(samples, rows, mine, every[mine], extra, every, watched, found)


def _points(funcs: list[Reward], samples: list[Any]) -> dict[str, Tensor]:
    """Of samples, what their distances are taken between: to the eye, and to rewards that embed them."""
    embedded = {f"diversity/{reward.name}": embeddings(reward, samples) for reward in embedders(funcs)}
    return {"diversity": thumbnails(samples).float()} | embedded


def _diversity(
    trainer: "DiffusionGRPOTrainer", points: dict[str, Tensor], places: list[int], total: int
) -> dict[str, float]:
    """How different the samples of a prompt are, wherever they were made."""
    groups, found = torch.arange(total) // trainer.args.num_generations_eval, {}
    widths, *_ = gathered_json(trainer.accelerator, {key: own.shape[1] for key, own in points.items()})
    for key, width in widths.items():
        every = _gathered(trainer, points.get(key, torch.empty(0, width)), places, total)
        found[key] = diversity(every, groups, pixel_distance if key == "diversity" else cosine_distance)
    return found


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


def _metrics(trainer: "DiffusionGRPOTrainer", prefix: str, rewards: Tensor, watched: list[Reward]) -> dict[str, float]:
    """Means and standard errors of (samples, functions) rewards; what no function scored is left out."""
    metrics = _mean_and_error(f"{prefix}_reward", _combined(trainer, rewards))
    names = [f"rewards/{reward.name}" for reward in trainer.reward_funcs + trainer.eval_reward_funcs]
    names += [f"watch/{reward.name}" for reward in watched]
    for name, column in zip(names, rewards.T, strict=True):
        metrics |= _mean_and_error(f"{prefix}_{name}", column, "/mean", "/std_error")
    return metrics


def _sample(
    trainer: "DiffusionGRPOTrainer",
    rows: list[dict],
    places: list[int],
    pipeline_kwargs: dict,
    latents: list[Tensor | None] | None = None,
) -> list[Any]:
    """What the pipeline makes of each row; and into `latents`, where given, the latents it is made from."""
    args, samples = trainer.args, [None] * len(rows)
    trainer._learn(rows)
    for first in range(0, len(rows), args.per_device_eval_batch_size):
        trainer.policy.prompts.clear()
        parts = trainer.inputs.parts(rows[first : first + args.per_device_eval_batch_size])
        for part, _ in in_step(parts, trainer.accelerator, trainer.passes_together):  # twice the same samples
            chosen = [first + number for number in part]
            own = None if latents is None else []
            images, _ = rollout(
                trainer.policy,
                trainer.inputs([rows[row] for row in chosen], **pipeline_kwargs),
                seeds=[sample_seed(args.seed, "evaluation", places[row]) for row in chosen],
                num_inference_steps=args.eval_num_inference_steps or args.num_inference_steps,
                noise_level=0.0,
                latents=own,
            )
            check_count(images, len(chosen), trainer.pipe)
            for number, row in enumerate(chosen):
                samples[row] = images[number]
                if latents is not None:
                    latents[row] = own[number]
    trainer.policy.prompts.clear()  # what was encoded beside other prompts differs in the last bits
    return samples


def _gathered(trainer: "DiffusionGRPOTrainer", local: Tensor, places: list[int], total: int) -> Tensor:
    """(total, ...) of all processes in the order of the samples; `local` (places, ...) is this one's."""
    args = trainer.args
    if args.world_size == 1:
        return local
    is_counted = trainer.post is not None or args.writes_samples  # each place once
    return trainer._of_all(local if is_counted else local[:0], places if is_counted else [], total)


def _combined(trainer: "DiffusionGRPOTrainer", rewards: Tensor) -> Tensor:
    """(samples,) the one number of the trained rewards, as in training; NaN where none scored the sample."""
    trained = rewards[:, : len(trainer.reward_weights)]
    return combine(trained, torch.tensor(trainer.reward_weights), trainer.args.multi_objective_aggregation)


def _mean_and_error(key: str, values: Tensor, mean: str = "", error: str = "_std_error") -> dict[str, float]:
    values = values[~values.isnan()]
    if len(values) == 0:
        return {}
    found = {f"{key}{mean}": values.double().mean().item()}
    if len(values) > 1:  # one value says nothing about its noise
        found[f"{key}{error}"] = values.double().std().item() / math.sqrt(len(values))
    return found


def _keep(trainer: "DiffusionGRPOTrainer", parts: dict[str, _Part]) -> None:
    """Pictures of the first prompts of each dataset, and one table of all samples of this process."""
    folder = Path(trainer.args.output_dir) / "evaluations"
    step = f"step-{trainer.state.global_step:06d}"
    (folder / step).mkdir(parents=True, exist_ok=True)
    names = [reward.name for reward in trainer.reward_funcs + trainer.eval_reward_funcs]
    names += [reward.name for reward in next(iter(parts.values())).watched]
    shown = math.ceil(trainer.args.num_completions_to_log / len(parts))
    columns: dict[str, list] = defaultdict(list)
    for dataset, part in parts.items():
        stem, count = f"{dataset}-" if len(parts) > 1 else "", len(part.rows)
        stems = [folder / step / f"{stem}{place:04d}" if place < shown else None for place in part.places]
        files = write_files(part.samples, stems, folder.parent, trainer.args.fps, sampling_rate(trainer.pipe))
        table = {
            "step": [trainer.state.global_step] * count,
            "dataset": [dataset] * count,
            "prompt": [row.get("prompt", "") for row in part.rows],
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
