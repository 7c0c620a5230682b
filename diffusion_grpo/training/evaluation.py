"""Held-out evaluation: the same prompts and seeds each time, no noise in the steps.

Rewards and diversity are measured, and the distance to the reference on the last rollout, with the averaged weights if
there are any. The main evaluation also leaves images (or videos, or sound) and a table in the run's folder. Validation
prompts are sampled in the same way and never scored.
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
from ..config.settings import DiffusionGRPOConfig
from ..data.prompts import UNNAMED
from ..distributed.collectives import gather_json, gather_means
from ..media.samples import count_bytes, find_sampling_rate, kind_of
from ..policy.base import Policy
from ..policy.rollout import rollout
from ..policy.trajectory import sample_seed
from ..report.run_folder import measure_mean, summarise_rollouts
from ..report.samples import write_files, write_inputs, write_table
from ..rewards import Reward
from ..rewards.contract import takes_only_latents
from ..rewards.executor import waits_for_all
from ..rollout.generate import RolloutGenerator, RolloutLoader
from ..rollout.passes import Passes
from ..rollout.runtime import Runtime
from ..rollout.score import (
    cosine_distance,
    embed_samples,
    find_embedders,
    make_thumbnails,
    measure_diversity,
    pixel_distance,
)
from .learner import Learner
from .preflight import RunRewards, load_watched_rewards

KEPT_BYTES = 2**30  # about the most that the samples of an evaluation take, in each process, until they are scored
LogMetric = Callable[[str, float], None]


@dataclasses.dataclass
class Share:
    """One process's share of the evaluation of one dataset, and what was measured so far.

    `samples` has None in place of those that are not among the `shown` first ones: they are dropped once they have
    been scored. `rewards` and `points` are tensors of the parts that were scored together; rewards are (samples,
    functions), the last of which are only watched.
    """

    rows: list[dict]
    positions: list[int]
    shown: int
    samples: list[Any] = dataclasses.field(default_factory=list)
    largest: int = 0  # bytes of a sample
    kind: str | None = None
    rewards: list[Tensor] = dataclasses.field(default_factory=list)
    points: dict[str, list[Tensor]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    extra: dict[str, list] = dataclasses.field(default_factory=dict)

    def add(self, samples: list[Any], rewards: Tensor, points: dict[str, Tensor], extra: dict[str, list]) -> None:
        first = len(self.samples)
        for name in self.extra | extra:  # a column may belong to some parts alone
            column = self.extra.setdefault(name, [None] * first)
            column += extra.get(name, [None] * len(samples))
        self.rewards.append(rewards)
        for name, values in points.items():
            self.points[name].append(values)
        self.largest = max(self.largest, *map(count_bytes, samples))
        self.samples += [
            sample if position < self.shown else None for position, sample in zip(self.positions[first:], samples)
        ]


@dataclasses.dataclass
class _Result:
    """What the evaluation of one dataset measured: `rewards` (samples, functions), `combined` (samples,)."""

    share: Share
    rewards: Tensor
    combined: Tensor
    watched: list[Reward]
    diversity: dict[str, float]


class Evaluator:
    """Evaluator that samples prompts without noise and scores the samples."""

    def __init__(
        self,
        args: DiffusionGRPOConfig,
        policy: Policy,
        rewards: RunRewards,
        learner: Learner,
        runtime: Runtime,
        *,
        generator: RolloutGenerator,
        loader: RolloutLoader,
        passes: Passes,
    ):
        self._args, self._policy, self._inputs, self._generator = args, policy, generator.inputs, generator
        self._rewards, self._weights = generator.scorer.rewards + rewards.evaluated, torch.tensor(rewards.weights)
        self._scorer, self._loader, self._passes, self._average = generator.scorer, loader, passes, learner.average
        # none in full training with beta=0, where it would need a second copy of the weights
        self._has_reference = learner.reference is not None and not policy.draws_tokens
        self._backend, self._monitor = runtime.backend, runtime.monitor
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
        logged: dict[str, list[float]] = defaultdict(list)  # by rewards; apart from what they log in training
        is_kept = is_kept and prefix == "eval" and self._backend.groups.is_first
        shown = math.ceil(self._args.num_completions_to_log / len(datasets)) if is_kept else 0  # of each dataset
        log_metric = lambda name, value: logged[name].append(value)  # noqa: E731
        with self._averaged_weights():
            distance = self._distance_to_reference() if prefix.startswith("eval") else {}
            start = time.perf_counter()
            results = {
                name: self._measure(data, pipeline_kwargs, log_metric, shown) for name, data in datasets.items()
            }
        metrics = self._metrics(prefix, list(results.values()))
        for name, result in results.items() if results.keys() != {UNNAMED} else ():
            metrics |= self._metrics(f"{prefix}_{name}", [result])
            metrics |= {f"{prefix}_{name}_{key}": value for key, value in result.diversity.items()}
        for key in dict.fromkeys(key for result in results.values() for key in result.diversity):
            measured = {name: result.diversity[key] for name, result in results.items() if key in result.diversity}
            prompts = [len(datasets[name]) for name in measured]
            metrics[f"{prefix}_{key}"] = statistics.fmean(measured.values(), prompts)
        means = gather_means(self._backend.accelerator, logged)
        metrics |= {f"{prefix}_{name}": value for name, value in means.items()}
        metrics[f"{prefix}_runtime"] = time.perf_counter() - start
        if prefix == "eval":
            metrics |= {f"eval_{name}": value for name, value in summarise_rollouts(history).items()}
            if is_kept:
                self._keep(results, step)
            self._backend.accelerator.wait_for_everyone()
        return metrics | {f"{prefix}_{name}": value for name, value in distance.items()}

    @torch.no_grad()
    def write_validation(self, prompts: list[str], pipeline_kwargs: dict[str, Any], step: int) -> Path:
        """Sample fixed prompts as evaluations do, and score nothing."""
        folder = Path(self._args.output_dir) / "validation" / f"step-{step:06d}"
        positions, own_count = self._share_positions(len(prompts))
        rows = [{"prompt": prompts[position]} for position in positions]
        with self._averaged_weights():
            self._generator.learn(rows)
            samples, _ = self._passes.run(self._sample, rows, positions, pipeline_kwargs)
        if self._backend.groups.is_first:
            stems = [folder / f"{position:04d}" for position in positions[:own_count]]
            write_files(samples[:own_count], stems, folder, self._inputs.fps, find_sampling_rate(self._policy.pipe))
        self._backend.accelerator.wait_for_everyone()
        return folder

    def _averaged_weights(self) -> contextlib.AbstractContextManager:
        """Replace the policy's weights by the moving average, if there is one, inside this context."""
        return contextlib.nullcontext() if self._average is None else self._average.place(is_shown=True)

    def _distance_to_reference(self) -> dict[str, float]:
        """Compare the policy with the reference at the trained steps of one micro-batch of the last rollout."""
        if self._loader.buffer is None or not self._has_reference:
            return {}
        divergences, metrics = self._passes.run(self._passes.compare, self._loader.buffer.micro_batch(0))
        distance = {"kl": divergences.mean().item(), **metrics}
        return gather_means(self._backend.accelerator, {name: [value] for name, value in distance.items()})

    # Sampling

    def _share_positions(self, total: int) -> tuple[list[int], int]:
        """Return the prompts that this process samples, and how many are its own; the rest keep processes in step."""
        groups = self._backend.groups
        positions = list(range(groups.index, total, groups.count))
        spare = math.ceil(total / groups.count) - len(positions) if self._backend.passes_together else 0
        return positions + [0] * spare, len(positions)

    def _sample(
        self, rows: list[dict], positions: list[int], pipeline_kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Tensor] | None]:
        """Return the sample of each row, and their latents if a reward takes them."""
        args, samples = self._args, [None] * len(rows)
        takes_latents = any(map(takes_only_latents, self._rewards + self._load_watched(None)))
        latents: list[Any] | None = [None] * len(rows) if takes_latents else None
        for indices, _ in self._backend.equalize(self._inputs.calls(rows, args.eval_batch_size)):
            self._policy.prompts.clear()  # prompts encoded in other batches differ in the last bits
            arguments = self._inputs([rows[index] for index in indices], **pipeline_kwargs)
            arguments = {k: v for k, v in arguments.items() if k not in self._inputs.spacing}  # of the rollouts' steps
            made_latents: list[Tensor] | None = [] if takes_latents else None
            made, _ = rollout(
                self._policy,
                arguments,
                seeds=[sample_seed(args.seed, "evaluation", positions[index]) for index in indices],
                num_inference_steps=args.eval_num_inference_steps or args.num_inference_steps,
                noise_level=0.0,
                latents=made_latents,
            )
            self._inputs.check_samples(made, len(indices), arguments)
            for number, index in enumerate(indices):
                samples[index] = made[number]
                if latents is not None:
                    latents[index] = made_latents[number]
        self._policy.prompts.clear()
        return samples, latents

    def _count_part(self, largest: int, total: int) -> int:
        """Return the number of samples that are made before they are scored; the same on all processes.

        All of them if a reward waits for all. Otherwise whole calls of the pipeline and of the rewards, as many as
        `KEPT_BYTES` allows: rewards that wait for servers answer many samples together, and each part may gather
        sharded weights.
        """
        if any(map(waits_for_all, self._rewards + self._load_watched(None))):
            return total  # those for one kind are cheap, and wait for nothing
        count = self._args.num_generations_eval
        least = math.lcm(self._args.eval_batch_size, max(self._scored_at_once // count, 1) * count)
        return least * max(KEPT_BYTES // largest // least, 1) if largest else least

    @property
    def _scored_at_once(self) -> int:
        """Number of samples in a call of a reward; rollouts also score whole groups per call."""
        return max(self._args.eval_batch_size, self._args.num_generations)

    # Scoring

    def _measure(
        self, dataset: Dataset, pipeline_kwargs: dict[str, Any], log_metric: LogMetric, shown: int
    ) -> _Result:
        """Sample a dataset and score the samples, part by part.

        Processes meet once all have scored their part. So no process waits in a collective for a reward that is slow
        or fails.
        """
        count, accelerator = self._args.num_generations_eval, self._backend.accelerator
        prompts, own_count = self._share_positions(len(dataset))
        positions = [prompt * count + turn for prompt in prompts for turn in range(count)]  # a prompt's in a row
        with self._monitor.barrier_after("reads rows for the evaluation"):
            self._load_watched(None)
            rows = self._inputs.rows(dataset, [position // count for position in positions])
        share = Share(rows[: own_count * count], positions[: own_count * count], shown)
        first, longest = 0, math.ceil(len(dataset) / self._backend.groups.count) * count
        while first < longest:
            largest = max(gather_json(accelerator, share.largest))
            end = min(first + self._count_part(largest, longest), longest)
            with self._monitor.barrier_after("samples for the evaluation"):
                if first == 0:
                    self._generator.learn(rows)
                # without a name for the samples, which would keep those of a part until the next one is made
                self._score(
                    share,
                    *self._passes.run(self._sample, rows[first:end], positions[first:end], pipeline_kwargs),
                    log_metric,
                )
            first = end
        kind, *_ = gather_json(accelerator, share.kind)  # the first process always has samples
        watched, total = self._load_watched(kind), len(dataset) * count
        local = torch.cat([torch.empty(0, len(self._rewards) + len(watched)), *share.rewards])
        rewards = self._gather(local, share.positions, total)
        return _Result(share, rewards, self._combine(rewards), watched, self._diversity(share, total))

    def _score(self, share: Share, samples: list[Any], latents: list[Tensor] | None, log_metric: LogMetric) -> None:
        """Score the next samples of a share by all rewards, and measure what their diversity is computed from."""
        first = len(share.samples)
        rows, count = share.rows[first : first + len(samples)], self._args.num_generations_eval
        if not rows:
            return
        samples, latents = samples[: len(rows)], latents and latents[: len(rows)]
        share.kind = share.kind or kind_of(samples)
        rewards, extra = self._scorer.score(
            self._rewards + self._load_watched(share.kind),
            samples,
            rows,
            [position // count for position in share.positions[first : first + len(rows)]],
            self._scored_at_once,
            log_metric,
            latents,
            first=first,
        )
        points = {}
        if count > 1 and share.kind is not None:
            points["diversity"] = make_thumbnails(samples).float()
            for reward in find_embedders(self._rewards):
                points[f"diversity/{reward.name}"] = embed_samples(reward, samples)
        share.add(samples, rewards, points, extra)

    def _load_watched(self, kind: str | None) -> list[Reward]:
        """Return the rewards to watch on samples of this kind; without a kind, those that are watched on any."""
        watched: dict[str, Reward] = {}
        for name in self._args.watch_rewards or []:
            key = name, kind if name == "auto" else None
            if key not in self._loaded:
                self._loaded[key] = load_watched_rewards([name], kind, self._rewards)
                for reward in self._loaded[key]:
                    reward.offload()
            watched |= {reward.name: reward for reward in self._loaded[key]}
        return list(watched.values())

    def _diversity(self, share: Share, total: int) -> dict[str, float]:
        """Return how much the samples of a prompt differ, whichever process made them."""
        groups, diversity = torch.arange(total) // self._args.num_generations_eval, {}
        local = {name: torch.cat(parts) for name, parts in share.points.items()}
        widths, *_ = gather_json(self._backend.accelerator, {name: part.shape[1] for name, part in local.items()})
        for name, width in widths.items():
            points = self._gather(local.get(name, torch.empty(0, width)), share.positions, total)
            distance = pixel_distance if name == "diversity" else cosine_distance
            diversity[name] = measure_diversity(points, groups, distance)
        return diversity

    def _gather(self, local: Tensor, positions: list[int], total: int) -> Tensor:
        """Gather `local` (positions, ...) from all processes and return (total, ...) in the order of the samples."""
        every, accelerator = torch.zeros(total, *local.shape[1:]), self._backend.accelerator
        if self._backend.groups.is_first:  # count each position once
            every[positions] = local
        return accelerator.reduce(every.to(accelerator.device), "sum").cpu()

    def _combine(self, rewards: Tensor) -> Tensor:
        """Return (samples,) combined trained rewards of a dataset; NaN where no reward scored the sample.

        What one reward left out counts in a sum as its mean over the dataset, so that the mean of the combined rewards
        does not depend on how many samples it left out.
        """
        together = torch.zeros(len(rewards), dtype=torch.long)
        trained = rewards[:, : len(self._weights)]
        return combine(trained, self._weights, self._args.multi_objective_aggregation, together)

    # Results

    def _metrics(self, prefix: str, results: list[_Result]) -> dict[str, float]:
        """Return means and standard errors of the rewards of all datasets, leaving out unscored samples."""
        count, rewards = self._args.num_generations_eval, torch.cat([result.rewards for result in results])
        metrics = _mean_and_error(f"{prefix}_reward", torch.cat([result.combined for result in results]), count)
        names = [f"rewards/{reward.name}" for reward in self._rewards]
        names += [f"watch/{reward.name}" for reward in results[0].watched]
        for name, column in zip(names, rewards.T, strict=True):
            metrics |= _mean_and_error(f"{prefix}_{name}", column, count, "/mean", "/std_error")
        return metrics

    def _keep(self, results: dict[str, _Result], step: int) -> None:
        """Write images of the first prompts of each dataset, and one table of all samples of this process."""
        args, root, name_of_step = self._args, Path(self._args.output_dir), f"step-{step:06d}"
        folder, rate = root / "evaluations", find_sampling_rate(self._policy.pipe)
        (folder / name_of_step).mkdir(parents=True, exist_ok=True)
        names = [reward.name for reward in self._rewards]
        logged = {name for result in results.values() for name in result.share.extra}
        for reward in next(iter(results.values())).watched:
            names.append(f"watch/{reward.name}" if reward.name in logged else reward.name)
        columns: dict[str, list] = defaultdict(list)
        for dataset, result in results.items():
            share, count = result.share, len(result.share.rows)
            start = f"{dataset}-" if len(results) > 1 else ""
            stems = [
                folder / name_of_step / f"{start}{position:04d}" if position < share.shown else None
                for position in share.positions
            ]
            files = write_files(share.samples, stems, root, self._inputs.fps, rate)
            stems = [stem and folder / "inputs" / stem.name for stem in stems]
            files |= write_inputs(map(self._inputs.find_images, share.rows), stems, root)
            table = {
                "step": [step] * count,
                "dataset": [dataset] * count,
                "row": [position // args.num_generations_eval for position in share.positions],
                "prompt": [row.get("prompt", "") for row in share.rows],
                "seed": [sample_seed(args.seed, "evaluation", position) for position in share.positions],
                **files,
                **dict(zip(names, result.rewards[share.positions].T.tolist(), strict=True)),
                "reward": result.combined[share.positions].tolist(),
            }
            done = len(columns["step"])
            for name, values in (share.extra | table).items():  # a column may belong to one dataset alone
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
    measured = measure_mean(values.double().tolist(), prompts) or (None, None)
    return {
        name: value
        for name, value in zip((f"{key}{mean}", f"{key}{error}"), measured, strict=True)
        if value is not None
    }
