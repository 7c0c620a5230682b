"""Where and when rewards are called: after the rollout, or group by group in a thread while samples are made.

`GroupScoring` takes samples as they are made, and scores the groups that are complete. During the rollout, one thread
of the run calls ordinary rewards in order, and the process's event loop awaits async ones. All rewards of the run are
then called there, because a connection to a database, for example, works only in the thread that opened it. The result
is that of scoring afterwards, bit for bit: rewards get the same samples, their answers are checked and logged in the
same order, and nothing is overlapped that shares random numbers or memory with the rollout.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call import Batch, Scoring, collect_values
from .contract import Reward, is_marked

logger = logging.getLogger(__name__)


class Executor:
    """The caller of rewards, one for the whole run; it decides what may be called during the rollout."""

    def __init__(self, has_thread: bool, draws_globally: Callable[[], bool]):
        self._has_thread, self._draws_globally = has_thread, draws_globally
        # The first samples are scored when all of them are made: rewards then load what they need, and it shows
        # whether one draws from torch's global generator; it and the rollout would change each other's random numbers.
        self._is_tried, self._is_refused = False, not has_thread
        self._queue: queue.SimpleQueue | None = None

    def run(self, scorings: list[Scoring]) -> None:
        """Call rewards: in their thread, without waiting for it, or in this one if rewards are never overlapped."""
        if not self._has_thread:
            for scoring in scorings:
                scoring.run()
                scoring.called.result()  # Ctrl-C ends the run, and not only the reward that it met
            return
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_run_queued, args=(self._queue,), name="rewards", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        for scoring in scorings:
            self._queue.put(scoring)

    @property
    def may_overlap(self) -> bool:
        """Whether the next samples may be scored while others are made."""
        if self._is_tried and not self._is_refused and self._draws_globally():
            self._refuse("the pipeline draws from torch's global generator, or a reward did during its call")
        return self._is_tried and not self._is_refused

    @contextlib.contextmanager
    def watch_generator(self) -> Iterator[None]:
        """Detect whether the first scoring draws from torch's global generator."""
        if self._is_tried:
            yield
            return
        before = _generator_states()
        yield
        after = _generator_states()[: len(before)]  # a reward may have been the first to use a GPU
        if not self._is_refused and not all(map(torch.equal, before, after)):
            self._refuse("a reward draws from torch's global generator")
        self._is_tried = True

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        logger.warning("Rewards are computed after each rollout and not during it: %s.", reason)


def _generator_states() -> list[Tensor]:
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if has_gpu else [])]


def _run_queued(scorings: queue.SimpleQueue) -> None:
    """Call rewards in the order of submission, until None is queued; Python exits without waiting for this thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # for ordinary rewards that run a coroutine themselves
    while (scoring := scorings.get()) is not None:
        scoring.run()
        del scoring  # otherwise the samples would be kept until the next ones arrive
    loop.close()


def waits_for_all(reward: Reward) -> bool:
    """Return whether a reward is called after the rollout: it compares all samples, or its network is offloaded."""
    return is_marked(reward.function, "is_batchwise") or bool(getattr(reward.function, "offload", False))


class GroupScoring:
    """Scores samples group by group; a context manager whose exit drops the calls that have not begun."""

    def __init__(
        self,
        rewards: list[Reward],
        groups: list[int],
        make_batch: Callable[[list[int], list[Any] | None, list[Tensor] | None], Batch],
        executor: Executor,
        failures: Path | None = None,
    ):
        self.rewards, self.groups, self.executor = rewards, groups, executor
        self.samples: list[Any] = [None] * len(groups)
        self._latents: list[Tensor | None] = [None] * len(groups)
        self._make_batch, self._failures = make_batch, failures
        self._missing = collections.Counter(groups)
        self._late = [number for number, reward in enumerate(rewards) if waits_for_all(reward)]
        self._early = [number for number in range(len(rewards)) if number not in self._late]
        self.scorings: list[Scoring] = []
        self.waiting: list[Scoring] = []  # those that are called at the end

    def __enter__(self) -> GroupScoring:
        return self

    def __exit__(self, *error: Any) -> None:
        for scoring in self.scorings:
            scoring.cancel()

    def add(self, indices: list[int], samples: list[Any] | None, latents: list[Tensor] | None) -> None:
        """Add samples, and score the groups that they complete."""
        for number, index in enumerate(indices):
            self.samples[index] = None if samples is None else samples[number]
            self._latents[index] = None if latents is None else latents[number]
            self._missing[self.groups[index]] -= 1
        complete = {self.groups[index] for index in indices if not self._missing[self.groups[index]]}
        ready = [index for index, group in enumerate(self.groups) if group in complete]
        if ready and self._early:
            self._prepare(self._early, ready)
            if self.executor.may_overlap:
                self.executor.run([self.waiting.pop()])

    def _prepare(self, numbers: list[int], indices: list[int]) -> None:
        samples, latents = ([values[index] for index in indices] for values in (self.samples, self._latents))
        batch = self._make_batch(
            indices, None if samples[0] is None else samples, None if latents[0] is None else latents
        )
        self.scorings.append(Scoring([self.rewards[number] for number in numbers], batch, numbers))
        self.waiting.append(self.scorings[-1])

    def finish(
        self, log_metric: Callable[[str, float], None], advance: Callable[[int], None] = lambda count: None
    ) -> tuple[Tensor, dict[str, list]]:
        """Wait for all rewards; return them, `(samples, functions)` float32, and the columns that functions logged."""
        if self._late:
            self._prepare(self._late, list(range(len(self.groups))))
        last = self._late or self._early
        with self.executor.watch_generator():
            self.executor.run(self.waiting)
            for scoring in self.scorings:
                scoring.wait()
                if scoring.numbers is last:
                    advance(len(scoring.batch.samples))
        return collect_values(self.scorings, (len(self.groups), len(self.rewards)), self._failures, log_metric)
