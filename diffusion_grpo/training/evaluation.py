"""Held-out evaluation: the same prompts and seeds each time, no noise in the steps.

The main evaluation also leaves images (or videos, or sound) and a table in the run's folder. Validation prompts are
sampled in the same way and never scored.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from ..algorithms.advantages import combine
from ..data.inputs import PipelineInputs
from ..data.prompts import UNNAMED
from ..distributed.collectives import gather_json, gather_means
from ..policy.base import Policy
from ..policy.trajectory import sample_seed
from ..report.run_folder import measure_mean, summarise_rollouts
from ..report.samples import write_files, write_inputs, write_table
from ..rewards import Reward
from ..rollout.generate import RolloutGenerator
from ..rollout.loader import RolloutLoader
from ..rollout.passes import Passes
from ..rollout.runtime import Runtime
from ..rollout.score import RewardScorer, cosine_distance, measure_diversity, pixel_distance, takes_only_latents
from .evaluation_samples import EvaluationSampler, EvaluationSettings, Share
from .learner import Learner
from .preflight import RunRewards, load_watched_rewards


@dataclasses.dataclass
class _Result:
    """What the evaluation of one dataset found: this process's samples, and the rewards of all.

    `samples` has None in place of those that are not shown and were dropped once they had been scored. `rewards`,
    (samples, functions), belong to this process's samples; `every` has those of all processes. Their last columns are
    the `watched` rewards. `combined`, (samples,), are the combined trained rewards of all processes.
    """

    samples: list[Any]
    rows: list[dict]
    positions: list[int]
    rewards: Tensor
    extra: dict[str, list]
    every: Tensor
    combined: Tensor
    watched: list[Reward]
    diversity: dict[str, float]


class Evaluator:
    """Evaluator that samples prompts without noise and scores the samples."""

    def __init__(
        self,
        policy: Policy,
        inputs: PipelineInputs,
        scorer: RewardScorer,
        learner: Learner,
        rewards: RunRewards,
        runtime: Runtime,
        *,
        generator: RolloutGenerator,
        loader: RolloutLoader,
        passes: Passes,
        settings: Callable[[], EvaluationSettings],
    ):
        self._inputs, self._scorer, self._generator = inputs, scorer, generator
        self._rewards, self._weights = scorer.rewards + rewards.evaluated, torch.tensor(rewards.weights)
        self._loader, self._passes, self._average = loader, passes, learner.average
        # none in full training with beta=0, where it would need a second copy of the weights
        self._has_reference = learner.reference is not None and not policy.draws_tokens
        self._backend, self._monitor, self._read_settings = runtime.backend, runtime.monitor, settings
        self._sampler = EvaluationSampler(
            policy=policy,
            inputs=inputs,
            backend=runtime.backend,
            scorer=scorer,
            rewards=self._rewards,
            load_watched=self._load_watched,
            settings=settings,
        )
        self._loaded: dict[tuple[str, str | None], list[Reward]] = {}  # watched rewards
        if any(map(takes_only_latents, self._load_watched(None))):
            policy.check_latents()

    @torch.no_grad()
    def evaluate(
        self,
        datasets: dict[str, Dataset],
        prefix: str,
        pipeline_kwargs: dict[str, Any],
        step: int,
        history: list[dict[str, Any]],
        is_kept: bool = True,
    ) -> dict[str, float]:
        """Measure each dataset, and all of them together, with the averaged weights if there are any."""
        with self._averaged_weights():
            distance = self._distance_to_reference() if prefix.startswith("eval") else {}
            metrics = self._evaluate(datasets, prefix, pipeline_kwargs, step, history, is_kept)
        return metrics | {f"{prefix}_{name}": value for name, value in distance.items()}

    def _evaluate(
        self,
        datasets: dict[str, Dataset],
        prefix: str,
        pipeline_kwargs: dict[str, Any],
        step: int,
        history: list[dict[str, Any]],
        is_kept: bool,
    ) -> dict[str, float]:
        start = time.perf_counter()
        own_metrics: dict[str, list[float]] = defaultdict(list)  # kept apart from those of training
        is_kept = is_kept and prefix == "eval" and self._backend.groups.is_first
        shown = math.ceil(self._settings.shown / len(datasets)) if is_kept else 0  # of each dataset
        log_metric = lambda name, value: own_metrics[name].append(value)  # noqa: E731
        results = {name: self._measure(data, pipeline_kwargs, log_metric, shown) for name, data in datasets.items()}
        watched = next(iter(results.values())).watched
        metrics = self._metrics(prefix, list(results.values()), watched)
        for name, result in results.items() if results.keys() != {UNNAMED} else ():
            metrics |= self._metrics(f"{prefix}_{name}", [result], watched)
            metrics |= {f"{prefix}_{name}_{key}": value for key, value in result.diversity.items()}
        for key in dict.fromkeys(key for result in results.values() for key in result.diversity):
            found = {name: result.diversity[key] for name, result in results.items() if key in result.diversity}
            prompts = [len(datasets[name]) for name in found]
            metrics[f"{prefix}_{key}"] = statistics.fmean(found.values(), prompts)
        own = gather_means(self._backend.accelerator, own_metrics)
        metrics |= {f"{prefix}_{name}": value for name, value in own.items()}
        metrics[f"{prefix}_runtime"] = time.perf_counter() - start
        if prefix == "eval":
            metrics |= {f"eval_{name}": value for name, value in summarise_rollouts(history).items()}
            if is_kept:
                self._keep(results, step, shown)
            self._backend.accelerator.wait_for_everyone()
        return metrics

    @torch.no_grad()
    def write_validation(self, prompts: list[str], pipeline_kwargs: dict[str, Any], step: int) -> Path:
        """Sample fixed prompts, from the same seeds each time and without noise in the steps; score nothing.

        The weights are those that evaluations use.
        """
        with self._averaged_weights():
            return self._write_validation(prompts, pipeline_kwargs, step)

    def _write_validation(self, prompts: list[str], pipeline_kwargs: dict[str, Any], step: int) -> Path:
        positions, own = self._share_positions(len(prompts))
        rows = [{"prompt": prompts[position]} for position in positions]
        self._generator.learn(rows)
        samples = self._passes.run(self._sampler.sample, rows, positions, pipeline_kwargs)
        number = own if self._backend.groups.is_first else 0
        folder = self._settings.folder / "validation" / f"step-{step:06d}"
        stems = [folder / f"{position:04d}" for position in positions[:number]]
        write_files(samples[:number], stems, folder, self._settings.fps, self._settings.sampling_rate)
        self._backend.accelerator.wait_for_everyone()
        return folder

    @property
    def _settings(self) -> EvaluationSettings:
        return self._read_settings()

    def _averaged_weights(self) -> contextlib.AbstractContextManager:
        """Replace the policy's weights by the moving average, if there is one, inside this context."""
        return contextlib.nullcontext() if self._average is None else self._average.place(is_shown=True)

    def _distance_to_reference(self) -> dict[str, float]:
        """Compare the policy with the reference at the trained steps of one micro-batch of the last rollout.

        This does not depend on beta. Nothing is measured before the first rollout.
        """
        if self._loader.buffer is None or not self._has_reference:
            return {}
        divergences, metrics = self._passes.run(self._passes.compare, self._loader.buffer.micro_batch(0))
        own = {"kl": divergences.mean().item(), **metrics}
        return gather_means(self._backend.accelerator, {name: [value] for name, value in own.items()})

    def _share_positions(self, total: int) -> tuple[list[int], int]:
        """Return the prompts that this process samples, and how many are its own; the rest keep processes in step."""
        groups = self._backend.groups
        own = list(range(groups.index, total, groups.count))
        spare = math.ceil(total / groups.count) - len(own) if self._backend.passes_together else 0
        return own + [0] * spare, len(own)

    def _measure(
        self, dataset: Dataset, pipeline_kwargs: dict, log_metric: Callable[[str, float], None], shown: int
    ) -> _Result:
        count, processes = self._settings.num_generations, self._backend.groups.count
        total = len(dataset) * count
        prompts, own = self._share_positions(len(dataset))
        mine = [prompt * count + turn for prompt in prompts for turn in range(count)]  # a prompt's samples in a row
        # a process that fails here does not reach the collectives over samples
        with self._monitor.barrier_after("reads rows for the evaluation"):
            self._load_watched(None)
            rows = self._inputs.rows(dataset, [position // count for position in mine])
        share = Share(rows, mine, own * count, shown, pipeline_kwargs, log_metric)
        self._sample_and_score(share, math.ceil(len(dataset) / processes) * count)
        rows, mine = rows[: share.own], mine[: share.own]
        if not self._sampler.scores_in_parts:
            with self._monitor.barrier_after("scores the evaluation"):
                latents = share.latents if self._sampler.takes_latents else None
                if mine:
                    self._sampler.score(share, share.samples, rows, mine, latents)
        kind, *_ = gather_json(self._backend.accelerator, share.kind)  # the first process always has samples
        watched = self._load_watched(kind)
        local = torch.cat([torch.empty(0, len(self._rewards) + len(watched)), *share.rewards])
        extra, positions = share.extra, share.scored
        every = self._gather(local, positions, total)
        found = self._diversity({name: torch.cat(own) for name, own in share.points.items()}, positions, total)
        return _Result(share.samples, rows, mine, every[mine], extra, every, self._combine(every), watched, found)

    def _sample_and_score(self, share: Share, longest: int) -> None:
        """Make the samples of a share, and score them on the way if the rewards allow it.

        Processes meet once all have scored their part. So no process waits in a collective for a reward that is slow
        or fails.
        """
        in_parts, first = self._sampler.scores_in_parts, 0
        while first < longest:
            largest = max(gather_json(self._backend.accelerator, share.largest))
            end = min(first + self._sampler.count_part(largest), longest) if in_parts else longest
            with self._monitor.barrier_after("samples for the evaluation"):
                if first == 0:
                    self._generator.learn(share.rows)
                self._passes.run(self._sampler.sample_part, share, first, end)
                if in_parts:
                    self._sampler.score_part(share, is_last=end == longest)
            first = end

    def _load_watched(self, kind: str | None) -> list[Reward]:
        """Return the rewards to watch on samples of this kind; without a kind, those that are watched on any.

        Each is loaded once, and its network stays in CPU memory except while it scores: training does not need it.
        """
        found: dict[str, Reward] = {}
        for name in self._settings.watched or []:
            key = name, kind if name == "auto" else None
            if key not in self._loaded:
                self._loaded[key] = load_watched_rewards([name], kind, self._rewards)
                for reward in self._loaded[key]:
                    reward.offload()
            found |= {reward.name: reward for reward in self._loaded[key]}
        return list(found.values())

    def _diversity(self, points: dict[str, Tensor], positions: list[int], total: int) -> dict[str, float]:
        """Return how much the samples of a prompt differ, whichever process made them."""
        groups, found = torch.arange(total) // self._settings.num_generations, {}
        widths, *_ = gather_json(self._backend.accelerator, {key: own.shape[1] for key, own in points.items()})
        for key, width in widths.items():
            every = self._gather(points.get(key, torch.empty(0, width)), positions, total)
            found[key] = measure_diversity(every, groups, pixel_distance if key == "diversity" else cosine_distance)
        return found

    def _metrics(self, prefix: str, results: list[_Result], watched: list[Reward]) -> dict[str, float]:
        """Return means and standard errors of the rewards of all datasets, leaving out unscored samples."""
        count, rewards = self._settings.num_generations, torch.cat([result.every for result in results])
        metrics = _mean_and_error(f"{prefix}_reward", torch.cat([result.combined for result in results]), count)
        names = [f"rewards/{reward.name}" for reward in self._rewards]
        names += [f"watch/{reward.name}" for reward in watched]
        for name, column in zip(names, rewards.T, strict=True):
            metrics |= _mean_and_error(f"{prefix}_{name}", column, count, "/mean", "/std_error")
        return metrics

    def _gather(self, local: Tensor, positions: list[int], total: int) -> Tensor:
        """Gather `local` (positions, ...) from all processes and return (total, ...) in the order of the samples."""
        if self._backend.groups.processes == 1:
            return local
        is_counted = self._backend.groups.is_first  # count each position once
        return self._scorer.gather_at(local if is_counted else local[:0], positions if is_counted else [], total)

    def _combine(self, rewards: Tensor) -> Tensor:
        """Return (samples,) combined trained rewards of a dataset; NaN where no reward scored the sample.

        What one reward left out counts in a sum as its mean over the dataset, so that the mean of the combined rewards
        does not depend on how many samples it left out.
        """
        together = torch.zeros(len(rewards), dtype=torch.long)
        return combine(rewards[:, : len(self._weights)], self._weights, self._settings.aggregation, together)

    def _keep(self, results: dict[str, _Result], step: int, shown: int) -> None:
        """Write images of the first prompts of each dataset, and one table of all samples of this process."""
        settings = self._settings
        folder, name_of_step = settings.folder / "evaluations", f"step-{step:06d}"
        (folder / name_of_step).mkdir(parents=True, exist_ok=True)
        names = [reward.name for reward in self._rewards]
        logged = {name for result in results.values() for name in result.extra}
        for reward in next(iter(results.values())).watched:
            names.append(f"watch/{reward.name}" if reward.name in logged else reward.name)
        columns: dict[str, list] = defaultdict(list)
        for dataset, result in results.items():
            stem, count = f"{dataset}-" if len(results) > 1 else "", len(result.rows)
            stems = [
                folder / name_of_step / f"{stem}{position:04d}" if position < shown else None
                for position in result.positions
            ]
            files = write_files(result.samples, stems, folder.parent, settings.fps, settings.sampling_rate)
            stems = [stem and folder / "inputs" / stem.name for stem in stems]
            files |= write_inputs(map(self._inputs.find_images, result.rows), stems, folder.parent)
            table = {
                "step": [step] * count,
                "dataset": [dataset] * count,
                "row": [position // settings.num_generations for position in result.positions],
                "prompt": [row.get("prompt", "") for row in result.rows],
                "seed": [sample_seed(settings.seed, "evaluation", position) for position in result.positions],
                **files,
                **dict(zip(names, result.rewards.T.tolist(), strict=True)),
                "reward": result.combined[result.positions].tolist(),
            }
            done = len(columns["step"])
            for name, values in (result.extra | table).items():  # a column may belong to one dataset alone
                columns[name] += [None] * (done - len(columns[name])) + values
        for values in columns.values():
            values += [None] * (len(columns["step"]) - len(values))
        groups = self._backend.groups
        rank = f"-rank{groups.index}" if groups.count > 1 else ""
        write_table(folder / f"{name_of_step}{rank}.parquet", dict(columns))


def _mean_and_error(
    key: str, values: Tensor, samples_per_prompt: int, mean: str = "", error: str = "_std_error"
) -> dict[str, float]:
    prompts = (torch.arange(len(values)) // samples_per_prompt).tolist()
    measured = measure_mean(values.double().tolist(), prompts)
    if measured is None:
        return {}
    found = {f"{key}{mean}": measured[0]}
    return found if measured[1] is None else found | {f"{key}{error}": measured[1]}
