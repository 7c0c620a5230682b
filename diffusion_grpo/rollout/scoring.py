"""Call the rewards, in rollouts and in evaluations, with everything that a reward may ask for.

Rollouts are scored while the next samples are made, evaluations after some prompts at a time. Rewards get the same
keywords in both.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from ..algorithms.batch import Rows
from ..data.prompts import get_prompts
from ..distributed.backend import DistributedBackend
from ..distributed.failure import ProcessGroupMonitor
from ..rewards import Reward
from ..rewards.answers import Batch
from ..rewards.calls import Scoring
from ..rewards.contract import is_marked
from ..rewards.overlap import Overlap, RolloutScoring, collect_values, waits_for_all
from .order import RolloutOrder


def takes_only_latents(reward: Reward) -> bool:
    """Return whether a reward takes only latents and needs no pixels."""
    return is_marked(reward.function, "takes_latents")


class RewardScorer:
    """Caller of the rewards."""

    def __init__(
        self,
        rewards: list[Reward],
        *,
        backend: DistributedBackend,
        monitor: ProcessGroupMonitor,
        overlap: Overlap,
        fps: float,
        sampling_rate: int | None,
        state: Callable[[], TrainerState],
        failures: Path,
    ):
        self.rewards, self._backend, self._monitor = rewards, backend, monitor
        self._overlap, self._fps, self._sampling_rate, self._state, self._failures = (
            overlap,
            fps,
            sampling_rate,
            state,
            failures,
        )

    # Rollouts

    def begin_rollout(self, order: RolloutOrder, rows: Rows) -> RolloutScoring:
        """Return the object that takes the samples of a rollout as they are made."""
        groups = (order.own() // order.sizes.num_generations).tolist()

        def begin(
            funcs: list[Reward], indices: list[int], samples: list[Any] | None, latents: list[Tensor] | None
        ) -> Scoring:
            chosen = [rows[index] for index in indices]
            return self._scoring(funcs, samples, chosen, [groups[index] for index in indices], latents, indices)

        return RolloutScoring(self.rewards, groups, begin, self._overlap, self._announce)

    def finish_rollout(
        self,
        scoring: RolloutScoring,
        log_metric: Callable[[str, float], None],
        extra: dict[str, list],
        watch: Callable[[int], None],
    ) -> Tensor:
        """Wait for the rewards of this process's samples, (samples, functions), with NaN for None."""
        scoring.wait(watch)
        return self._values(scoring.result, log_metric, extra, scoring.count)

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

    def gather_at(self, values: Tensor, positions: list[int], total: int) -> Tensor:
        """Return the values of all processes by position, (total, ...) float32 on the CPU; a collective.

        Args:
            values: (positions, ...) values of this process.
        """
        every = torch.zeros(total, *values.shape[1:])
        every[positions] = values.float()
        accelerator = self._backend.accelerator
        return accelerator.reduce(every.to(accelerator.device), "sum").cpu()

    # Both

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


def check_extra_column(name: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return the values that a reward passed to `log_extra` as a list, one per sample."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != count:
        raise ValueError(
            f"log_extra({name!r}, ...) got {len(values)} values for {count} samples; give one per sample."
        )
    return values


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
