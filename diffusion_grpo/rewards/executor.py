"""Where rewards are called: in the main thread after the rollout, or beside it while the next samples are made.

Beside it, one thread of the run calls ordinary rewards in order, and the process's event loop awaits async ones. All
rewards of the run are then called there, because a connection to a database, for example, works only in the thread
that opened it. The result is that of scoring afterwards, bit for bit: rewards get the same samples, their answers are
checked and logged in the same order, and nothing is overlapped that shares random numbers or memory with the rollout.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call import Scoring, run_in_loop, score_here, warn_of_unscored
from .contract import Reward, is_marked

logger = logging.getLogger(__name__)
Begin = Callable[[list[Reward], list[int], list[Any] | None, list[Tensor] | None], Scoring]
Part = tuple[list[int], list[int], Scoring]  # indices of samples, numbers of rewards, and their calls


class Executor:
    """The caller of rewards; one object lasts for the whole run and decides what may be called during the rollout.

    The first samples are scored while the rollout waits: rewards then load what they need, and it becomes clear
    whether one draws from torch's global generator. Such a reward and the rollout would change each other's random
    numbers; so would a pipeline that draws from the global generator.
    """

    def __init__(
        self,
        overlaps: bool,
        draws_globally: Callable[[], bool],
        waits_for_rollout: Callable[[], bool] = lambda: False,
    ):
        self.overlaps, self._draws_globally, self.waits_for_rollout = overlaps, draws_globally, waits_for_rollout
        self.is_tried, self.reason = False, None
        self._queue: queue.SimpleQueue | None = None

    def submit(self, scoring: Scoring) -> Future:
        """Queue a scoring; return the future of its ordinary calls, whose result is that of its async ones or None."""
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_call_queued, args=(self._queue,), name="rewards", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        called: Future = Future()
        self._queue.put((scoring, called))
        return called

    def score(self, scorings: list[Scoring]) -> None:
        """Call rewards and wait for them: in their thread, or in this one if rewards are never overlapped."""
        if self.overlaps:
            for called in [self.submit(scoring) for scoring in scorings]:
                wait_for(called)
        else:
            score_here(scorings)

    @property
    def is_possible(self) -> bool:
        """Whether the next samples may be scored during the rollout."""
        if self.overlaps and self.reason is None and self._draws_globally():
            self._give_up("the pipeline draws from torch's global generator, or a reward did during its call")
        return self.overlaps and self.reason is None

    @property
    def is_first(self) -> bool:
        """Whether the next samples are the first of the run, whose scoring is watched."""
        return self.overlaps and not self.is_tried

    @contextlib.contextmanager
    def watch_generator(self) -> Iterator[None]:
        """Detect whether the first scoring draws from torch's global generator."""
        is_first, before = self.is_first, _generator_states()
        yield
        after = _generator_states()[: len(before)]  # a reward may have been the first to use a GPU
        if is_first and not all(map(torch.equal, before, after)):
            self._give_up("a reward draws from torch's global generator")
        self.is_tried = True

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        logger.warning("Rewards are computed after each rollout and not during it: %s.", reason)


def _generator_states() -> list[Tensor]:
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if has_gpu else [])]


def _call_queued(entries: queue.SimpleQueue) -> None:
    """Call rewards in the order of submission, until None is queued; Python exits without waiting for this thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # for ordinary rewards that run a coroutine themselves
    while (entry := entries.get()) is not None:
        scoring, called = entry
        if called.set_running_or_notify_cancel():
            try:
                scoring.answer()
                called.set_result(run_in_loop(scoring.wait()) if scoring.awaited else None)
            except BaseException as error:  # a reward that calls sys.exit must end the run, not just this thread
                called.set_exception(error)
        del entry, scoring, called  # otherwise the samples would be kept until the next ones arrive
    loop.close()


def wait_for(called: Future) -> None:
    """Wait for a submitted scoring; raise errors of its thread."""
    awaited = called.result()
    if awaited is not None:
        awaited.result()


def _cancel(called: Future) -> None:
    """Drop a scoring that has not begun, or cancel its async calls."""
    if not called.cancel() and called.done() and called.exception() is None and called.result() is not None:
        called.result().cancel()


def waits_for_all(reward: Reward) -> bool:
    """Return whether a reward is called after the rollout: it compares all samples, or its network is offloaded."""
    return is_marked(reward.function, "is_batchwise") or bool(getattr(reward.function, "offload", False))


class RolloutScoring:
    """Scoring of one process's rollout, group by group. A context manager, which on exit drops what has not begun."""

    def __init__(
        self,
        rewards: list[Reward],
        groups: list[int],
        begin: Begin,
        executor: Executor,
    ):
        self.rewards, self.groups, self.begin, self.executor = rewards, groups, begin, executor
        self.samples: list[Any] = [None] * len(groups)
        self.latents: list[Tensor | None] = [None] * len(groups)
        self.missing = collections.Counter(groups)
        self.early = [number for number, reward in enumerate(rewards) if not waits_for_all(reward)]
        self.parts: list[Part] = []
        self.done: list[tuple[Part, Future]] = []
        self.waited = 0.0

    def __enter__(self) -> RolloutScoring:
        return self

    def __exit__(self, *error: Any) -> None:
        for _, called in self.done:
            _cancel(called)

    @property
    def count(self) -> int:
        """The number of samples in the whole rollout."""
        return len(self.groups)

    def add(self, indices: list[int], samples: Any | None, latents: Any | None) -> None:
        """Add the samples that a pipeline call has made, and score the groups that they complete."""
        for number, index in enumerate(indices):
            self.samples[index] = None if samples is None else samples[number]
            self.latents[index] = None if latents is None else latents[number]
            self.missing[self.groups[index]] -= 1
        complete = {self.groups[index] for index in indices if not self.missing[self.groups[index]]}
        ready = [index for index, group in enumerate(self.groups) if group in complete]
        if ready and self.early:
            self._hand_over(self.early, ready)

    def _hand_over(self, numbers: list[int], indices: list[int]) -> None:
        samples, latents = ([values[index] for index in indices] for values in (self.samples, self.latents))
        scoring = self.begin(
            [self.rewards[number] for number in numbers],
            indices,
            None if samples[0] is None else samples,
            None if latents[0] is None else latents,
        )
        scoring.taken |= {reward.name for reward in self.rewards}  # including those that are called later
        self.parts.append((indices, numbers, scoring))
        if self.executor.is_first:
            if not self.executor.waits_for_rollout():
                start = time.perf_counter()
                with self.executor.watch_generator():
                    self.executor.score([scoring])
                self.waited += time.perf_counter() - start
        elif self.executor.is_possible and numbers is self.early:
            self.done.append((self.parts[-1], self.executor.submit(scoring)))

    def wait(self, watch: Callable[[int], None] = lambda count: None) -> None:
        """Wait for all rewards; call `watch` with the number of samples that have just received all theirs."""
        late = [number for number in range(len(self.rewards)) if number not in self.early]
        reported = 0
        for (indices, *_), called in self.done:
            wait_for(called)
            if not late:
                reported += len(indices)
                watch(len(indices))
        if late:
            self._hand_over(late, list(range(self.count)))
        with self.executor.watch_generator():
            self.executor.score([scoring for _, _, scoring in self.parts if not scoring.calls])
        watch(self.count - reported)

    def result(self, failure_dir: Path | None, log_metric: Callable, log_extra: Callable) -> Tensor:
        """Return the rewards, `(samples, functions)` float32, after `wait`; see `score`."""
        return collect_values(self.parts, (self.count, len(self.rewards)), failure_dir, log_metric, log_extra)


def collect_values(
    parts: list[Part], shape: tuple[int, int], failure_dir: Path | None, log_metric: Callable, log_extra: Callable
) -> Tensor:
    """Return the rewards of all parts, `(samples, functions)` float32, once they have their answers; see `score`."""
    values, extras = torch.full(shape, float("nan"), dtype=torch.float32), {}
    for indices, numbers, scoring in parts:
        own, columns = scoring.values(failure_dir, log_metric)
        values[torch.tensor(indices)[:, None], torch.tensor(numbers)] = own
        for name, column in columns.items():
            whole = extras.setdefault(name, [None] * len(values))
            for index, value in zip(indices, column, strict=True):
                whole[index] = value
    for name, column in extras.items():
        log_extra(name, column)
    warn_of_unscored(values)
    return values
