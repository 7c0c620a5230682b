"""Call the rewards, in rollouts and in evaluations, with everything that a reward may ask for.

Rollouts are scored while the next samples are made, evaluations after some prompts at a time. Rewards get the same
keywords in both.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from ..algorithms.batch import Rows
from ..data.prompts import get_prompts
from ..distributed.backend import DistributedBackend
from ..distributed.collectives import gather_bytes
from ..distributed.failure import ProcessGroupMonitor
from ..media.serialize import pack_columns, unpack_columns
from ..rewards import Reward
from ..rewards.answers import Batch
from ..rewards.calls import Scoring
from ..rewards.contract import is_marked
from ..rewards.overlap import Overlap, RolloutScoring, collect_values, waits_for_all
from ..rewards.reward_processes import Assignment, SampleChannel, SubsetScoring, exchange_samples
from ..run.records import check_extra_column
from .order import RolloutOrder

AnyScoring = RolloutScoring | SubsetScoring


def takes_only_latents(reward: Reward) -> bool:
    """Return whether a reward takes only latents and needs no pixels."""
    return is_marked(reward.function, "takes_latents")


class RewardScorer:
    """Caller of the rewards, on the processes that score samples.

    Args:
        rewards: the trained rewards.
        backend: distributed backend of the run.
        monitor: tells the other processes what this one is doing.
        reward_processes: number of processes that score; None if each process scores its own samples.
        channel: carries samples to these processes; None if each process scores its own.
        overlap: whether rewards may be computed while the next samples are made.
        fps: frames per second of videos.
        sampling_rate: sampling rate of sound in hertz; None if the pipeline makes no sound.
        state: returns the trainer's state, which is passed to rewards.
        failures: folder for samples on which a reward failed.
    """

    def __init__(
        self,
        rewards: list[Reward],
        *,
        backend: DistributedBackend,
        monitor: ProcessGroupMonitor,
        reward_processes: int | None,
        channel: SampleChannel | None,
        overlap: Overlap,
        fps: float,
        sampling_rate: int | None,
        state: Callable[[], TrainerState],
        failures: Path,
    ):
        self.rewards, self._backend, self._monitor = rewards, backend, monitor
        self._reward_processes, self.channel, self._overlap = reward_processes, channel, overlap
        self._fps, self._sampling_rate, self._state, self._failures = fps, sampling_rate, state, failures

    # Rollouts

    def begin_rollout(
        self, order: RolloutOrder, row_indices: list[int], rows: Rows, read_rows: Callable[[list[int]], Rows]
    ) -> AnyScoring:
        """Return the object that takes the samples of a rollout as they are made.

        Args:
            order: order of the samples of all processes.
            row_indices: index of the dataset row of each position.
            rows: rows of this process's samples.
            read_rows: returns decoded rows of the dataset by their indices.
        """
        size = order.sizes.num_generations
        if self.channel is None:
            return self._rollout_scoring(rows, (order.own() // size).tolist())
        processes = range(order.sizes.data_processes)
        assignment = self._assign([order.of_process(order.made, process).tolist() for process in processes], size)
        groups, own = (
            [position // size for position in positions] for positions in (assignment.taken, assignment.own)
        )
        rows = read_rows([row_indices[position] for position in assignment.taken])
        return SubsetScoring(assignment, self.channel, self._rollout_scoring(rows, groups), own)

    def finish_rollout(
        self,
        scoring: AnyScoring,
        log_metric: Callable[[str, float], None],
        extra: dict[str, list],
        watch: Callable[[int], None],
    ) -> Tensor:
        """Wait for the rewards that this process computes, (samples scored here, functions), with NaN for None.

        Args:
            scoring: scoring of the rollout, after all samples have been added.
            log_metric: called with the metrics that rewards log.
            extra: filled with the columns that rewards add, one value per sample.
            watch: called with the number of samples that have just been scored.
        """
        scoring.wait(watch)
        return self._values(scoring.result, log_metric, extra, scoring.count)

    def share_rollout(
        self, scoring: AnyScoring, local: Tensor, extra: dict[str, list], order: RolloutOrder
    ) -> tuple[Tensor, Tensor, dict[str, list]]:
        """Exchange the rewards of a rollout; a collective.

        Returns:
            the rewards of all samples by position, the rewards of the samples made here, and the columns that rewards
            added for the latter.
        """
        if self.channel is None:
            return gather_by_position(self._backend, local, order), local, extra
        self.channel.close()
        scored, own = scoring.assignment.taken, scoring.assignment.own
        rewards = self.gather_at(local, scored, len(order.made))
        return rewards, rewards[own], self.share_extra(extra, scored, own)

    def _rollout_scoring(self, rows: Rows, groups: list[int]) -> RolloutScoring:
        def begin(
            funcs: list[Reward], indices: list[int], samples: list[Any] | None, latents: list[Tensor] | None
        ) -> Scoring:
            own = [rows[index] for index in indices]
            return self._scoring(funcs, samples, own, [groups[index] for index in indices], latents, indices)

        return RolloutScoring(self.rewards, groups, begin, self._overlap, self._announce)

    # Evaluations

    def score(
        self,
        funcs: list[Reward],
        samples: list,
        rows: Rows,
        groups: list[int],
        batch_size: int,
        log_metric: Callable[[str, float], None],
        extra: dict[str, list],
        latents: list[Tensor] | None = None,
        first: int = 0,
    ) -> Tensor:
        """Score samples; return (samples, functions) float32 rewards, with NaN for None.

        As in a rollout, a reward is called for some groups at a time, so that its network needs no more memory than
        there. Rewards that compare all samples, and those whose network is moved for each call, are called once.

        Args:
            funcs: rewards to call.
            samples, rows, groups, latents: one value per sample; latents if a reward takes them.
            batch_size: number of samples per call; larger groups are not split.
            log_metric, extra: as in [`RewardScorer.finish_rollout`].
            first: number of samples that this process has scored before, for files and messages about a failed call.
        """
        whole = [number for number, reward in enumerate(funcs) if waits_for_all(reward)]
        split = [number for number in range(len(funcs)) if number not in whole]
        chosen = [(split, indices) for indices in batch_groups(groups, batch_size) if split]
        chosen += [(whole, list(range(len(samples))))] if whole else []
        parts = []
        for numbers, indices in chosen:
            own = ([part[index] for index in indices] for part in (samples, rows, groups))
            some = None if latents is None else [latents[index] for index in indices]
            places = [first + index for index in indices]
            scoring = self._scoring([funcs[number] for number in numbers], *own, some, places)
            parts.append((indices, numbers, scoring))
        self._overlap.score([scoring for *_, scoring in parts], self._announce)
        values = functools.partial(collect_values, parts, (len(samples), len(funcs)))
        return self._values(values, log_metric, extra, len(samples))

    def exchange(
        self, made: list[list[int]], group_size: int, samples: list, latents: list[Tensor] | None
    ) -> tuple[list[int], list, list[Tensor] | None]:
        """Send samples of an evaluation to the processes that score them.

        Called inside [`~diffusion_grpo.distributed.failure.ProcessGroupMonitor.barrier_after`].

        Args:
            made: positions of the samples made by each process.
            group_size: number of samples per prompt.
            samples, latents: samples and latents that this process made.

        Returns:
            positions, samples and latents of the samples that this process scores.
        """
        if self.channel is None:
            return made[self._backend.groups.index], samples, latents
        return exchange_samples(self._assign(made, group_size), self.channel, samples, latents)

    def gather_at(self, values: Tensor, positions: list[int], total: int) -> Tensor:
        """Return the values of all processes by position, (total, ...) float32 on the CPU; a collective.

        Args:
            values: (positions, ...) values of this process.
            positions: positions of these values; no other process has values for them.
            total: number of positions of all processes.
        """
        every = torch.zeros(total, *values.shape[1:])
        every[positions] = values.float()
        return self._backend.reduce_sum(every.to(self._backend.accelerator.device)).cpu()

    def share_extra(self, extra: dict[str, list], positions: list[int], own: list[int]) -> dict[str, list]:
        """Return the columns that rewards added for samples made here, whichever process scored them; a collective.

        Args:
            extra: columns that rewards added on this process, one value for each of `positions`.
            positions: positions of the samples scored here.
            own: positions of the samples made here.
        """
        found: dict[str, list] = {}
        for content in gather_bytes(self._backend.accelerator, pack_columns(extra, positions)):
            columns, others = unpack_columns(content)
            indices = {position: index for index, position in enumerate(others)}
            for name, column in columns.items():
                for number, position in enumerate(own):
                    if position in indices:
                        found.setdefault(name, [None] * len(own))[number] = column[indices[position]]
        return found

    # Both

    def _assign(self, made: list[list[int]], group_size: int) -> Assignment:
        """Assign each sample to the process that scores it."""
        groups = self._backend.groups
        return Assignment.of(made, group_size, self._reward_processes, groups.process, groups.size)

    def _scoring(
        self,
        funcs: list[Reward],
        samples: list | None,
        rows: Rows,
        groups: list[int],
        latents: list[Tensor] | None,
        indices: list[int] | None = None,
    ) -> Scoring:
        kinds = {} if samples is None else {"videos" if isinstance(samples[0], list) else "images": samples}
        batch = Batch(
            **kinds,
            latents=latents,
            prompts=get_prompts(rows),
            columns={name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
            groups=groups,
            fps=self._fps,
            sampling_rate=self._sampling_rate,
            trainer_state=self._state(),
            indices=indices,
        )
        return Scoring(funcs, batch)

    def _values(self, values: Callable, log_metric: Callable, extra: dict[str, list], count: int) -> Tensor:
        return values(
            self._failures,
            log_metric,
            lambda name, column: extra.update({name: check_extra_column(name, column, count)}),
        )

    def _announce(self, names: str | None) -> None:
        self._monitor.set_task("rolls out" if names is None else f"computes the reward {names}")


def gather_by_position(backend: DistributedBackend, local: Tensor | None, order: RolloutOrder) -> Tensor | None:
    """Return the values of all processes by position, on the CPU; a collective. None stays None."""
    if local is None:
        return None
    every = backend.gather(local.to(backend.accelerator.device))
    return every.cpu()[order.rank_of_position()]


def batch_groups(groups: list[int], batch_size: int) -> list[list[int]]:
    """Return batches of indices, each with whole groups: at most `batch_size` samples, or one group if it is larger.

    Examples:
        >>> batch_groups([0, 0, 1, 1, 2, 2], batch_size=5)
        [[0, 1, 2, 3], [4, 5]]
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    batches: list[list[int]] = []
    for own in members.values():
        if batches and len(batches[-1]) + len(own) <= batch_size:
            batches[-1] += own
        else:
            batches.append(list(own))
    return batches
