"""Compute rewards while the next samples are rolled out.

A prompt's samples are scored as soon as the last of them is made, while the pipeline goes on: ordinary rewards in one
thread, async ones (a server's answers) in another. Each of the two threads lasts for the whole run, and all rewards
are called there, including those that wait for the rollout: a connection to a database, for example, works only in the
thread that opened it. The result is the same as when scoring afterwards, bit for bit: rewards are called with the same
samples, their answers are checked and logged in the same order, and nothing is overlapped that shares random numbers
or memory with the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .calls import SETTINGS, Scoring, restore_settings, score_here, warn_of_unscored
from .contract import Reward, is_marked
from .event_loop import run_in_loop

LOOK = 1.0  # seconds between checks of which reward the run is waiting for
logger = logging.getLogger(__name__)
Begin = Callable[[list[Reward], list[int], list[Any] | None, list[Tensor] | None], Scoring]
Part = tuple[list[int], list[int], Scoring]  # indices of samples, numbers of rewards, and their calls


class Overlap:
    """Decision whether rewards may be computed during the rollout; one object lasts for the whole run.

    The first samples are scored while the rollout waits: rewards then load what they need, and it becomes clear
    whether one draws from torch's global generator. Such a reward and the rollout would change each other's random
    numbers; so would a pipeline that draws from the global generator.
    """

    def __init__(
        self,
        is_wanted: bool,
        draws_globally: Callable[[], bool],
        waits_for_rollout: Callable[[], bool] = lambda: False,
    ):
        self.is_wanted, self._draws_globally, self._waits_for_rollout = is_wanted, draws_globally, waits_for_rollout
        self.is_tried, self.reason = False, None
        self._thread: _Thread | None = None

    def submit(self, scoring: Scoring) -> Future:
        """Queue a scoring in the thread of the rewards; return a future that is done once it has its answers."""
        if self._thread is None:
            self._thread = _Thread()
            weakref.finalize(self, self._thread.close)
        return self._thread.submit(scoring)

    def drop(self) -> None:
        """Drop the scorings that have not begun, and cancel those whose async rewards are being awaited."""
        if self._thread is not None:
            self._thread.drop()

    def score(self, scorings: list[Scoring], announce: Callable[[str | None], None] | None = None) -> None:
        """Call rewards and wait for them: in their thread, or in this one if rewards are never overlapped."""
        if not self.is_wanted:
            score_here(scorings, announce)
            return
        if announce is not None and scorings:  # before the call, which may end the process
            announce(scorings[0].doing)
        for scoring, done in [(scoring, self.submit(scoring)) for scoring in scorings]:
            wait_for(done, scoring, announce)

    @property
    def waits_for_rollout(self) -> bool:
        """Whether the first samples are scored after the first rollout."""
        return self._waits_for_rollout()

    @property
    def is_possible(self) -> bool:
        """Whether the next samples may be scored during the rollout."""
        if self.is_wanted and self.reason is None and self._draws_globally():
            self._give_up("the pipeline draws from torch's global generator, or a reward did during its call")
        return self.is_wanted and self.reason is None

    @property
    def is_first(self) -> bool:
        """Whether the next samples are the first of the run, whose scoring is watched."""
        return self.is_wanted and not self.is_tried

    @contextlib.contextmanager
    def watch_generator(self) -> Iterator[None]:
        """Detect whether the first scoring draws from torch's global generator."""
        before = _generator_states()
        yield
        self.is_tried = True
        after = _generator_states()[: len(before)]  # a reward may have been the first to use a GPU
        if not all(map(torch.equal, before, after)):
            self._give_up("a reward draws from torch's global generator")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        logger.warning("Rewards are computed after each rollout and not during it: %s.", reason)


def _generator_states() -> list[Tensor]:
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if has_gpu else [])]


class Arrivals:
    """Collection of samples as they are made, which tells which groups are complete."""

    def __init__(self, groups: list[int]):
        self.groups = groups
        self.samples: list[Any] = [None] * len(groups)
        self.latents: list[Tensor | None] = [None] * len(groups)
        self.is_there, self.is_given = [False] * len(groups), [False] * len(groups)
        self.watch: Callable[[int], None] = lambda count: None

    def add(self, indices: list[int], samples: Any | None, latents: Any | None) -> list[int]:
        """Add the samples made at these indices; return the indices of all samples in groups that are now complete."""
        for number, index in enumerate(indices):
            self.samples[index] = None if samples is None else samples[number]
            self.latents[index] = None if latents is None else latents[number]
            self.is_there[index] = True
        unfinished = {group for group, is_there in zip(self.groups, self.is_there, strict=True) if not is_there}
        ready = [p for p, group in enumerate(self.groups) if group not in unfinished and not self.is_given[p]]
        for index in ready:
            self.is_given[index] = True
        self.watch(len(indices))
        return ready

    def get(self, indices: list[int]) -> tuple[list | None, list[Tensor] | None]:
        """Return samples and latents at these indices; None for those that were not made."""
        samples, latents = ([kept[index] for index in indices] for kept in (self.samples, self.latents))
        return None if samples[0] is None else samples, None if latents[0] is None else latents


class RolloutScoring:
    """Scoring of one process's rollout. A context manager, which on exit drops calls that have not begun."""

    def __init__(
        self,
        rewards: list[Reward],
        groups: list[int],
        begin: Begin,
        overlap: Overlap,
        announce: Callable[[str | None], None] | None = None,
    ):
        self.announce = announce
        self.rewards, self.groups, self.begin, self.overlap = rewards, groups, begin, overlap
        self.arrivals = Arrivals(groups)
        self.early = [number for number, reward in enumerate(rewards) if not waits_for_all(reward)]
        self.parts: list[Part] = []
        self.done: list[tuple[Part, Future]] = []
        self.waited = 0.0

    def __enter__(self) -> RolloutScoring:
        return self

    def __exit__(self, *error: Any) -> None:
        self.overlap.drop()

    @property
    def samples(self) -> list[Any]:
        """The samples added so far, by their indices."""
        return self.arrivals.samples

    @property
    def count(self) -> int:
        """The number of samples in the whole rollout."""
        return len(self.groups)

    def add(self, indices: list[int], samples: Any | None, latents: Any | None) -> None:
        """Add the samples that a pipeline call has made, and score the groups that they complete."""
        ready = self.arrivals.add(indices, samples, latents)
        if ready and self.early:
            self._hand_over(self.early, ready)

    def _hand_over(self, numbers: list[int], indices: list[int]) -> None:
        scoring = self.begin([self.rewards[number] for number in numbers], indices, *self.arrivals.get(indices))
        scoring.taken |= {reward.name for reward in self.rewards}  # including those that are called later
        self.parts.append((indices, numbers, scoring))
        if self.overlap.is_first and self.overlap.waits_for_rollout:
            return
        if self.overlap.is_first:
            start = time.perf_counter()
            with self.overlap.watch_generator():
                self.overlap.score([scoring], self.announce)
            if self.announce is not None:
                self.announce(None)
            self.waited += time.perf_counter() - start
        elif self.overlap.is_possible and numbers is self.early:
            self.done.append((self.parts[-1], self.overlap.submit(scoring)))

    def wait(self, watch: Callable[[int], None] = lambda count: None) -> None:
        """Wait for all rewards; call `watch` with the number of samples that have just received all theirs."""
        late = [number for number in range(len(self.rewards)) if number not in self.early]
        reported = 0
        for (indices, _, scoring), done in self.done:
            wait_for(done, scoring, self.announce)
            if not late:
                reported += len(indices)
                watch(len(indices))
        if late:
            self._hand_over(late, list(range(len(self.groups))))
        with self.overlap.watch_generator() if self.overlap.is_first else contextlib.nullcontext():
            self.overlap.score([scoring for _, _, scoring in self.parts if not scoring.calls], self.announce)
        watch(self.count - reported)

    def result(self, failure_dir: Path | None, log_metric: Callable, log_extra: Callable) -> Tensor:
        """Return the rewards, `(samples, functions)` float32, after `wait`; see `score`."""
        return collect_values(self.parts, (len(self.groups), len(self.rewards)), failure_dir, log_metric, log_extra)


def collect_values(
    parts: list[Part], shape: tuple[int, int], failure_dir: Path | None, log_metric: Callable, log_extra: Callable
) -> Tensor:
    """Return the rewards of all parts, `(samples, functions)` float32, once they have their answers; see `score`."""
    values, extras = torch.full(shape, float("nan"), dtype=torch.float32), {}
    for indices, numbers, scoring in parts:

        def add_extra(name: str, column: list, indices: list[int] = indices) -> None:
            whole = extras.setdefault(name, [None] * len(values))
            for index, value in zip(indices, column, strict=True):
                whole[index] = value

        values[torch.tensor(indices)[:, None], torch.tensor(numbers)] = scoring.values(
            failure_dir, log_metric, add_extra
        )
    for name, column in extras.items():
        log_extra(name, column)
    warn_of_unscored(values)
    return values


def wait_for(done: Future, scoring: Scoring, announce: Callable[[str | None], None] | None = None) -> None:
    """Wait for a submitted scoring, and announce which reward it is calling; raise errors of its thread."""
    announced = None
    while not done.done():
        if announce is not None and scoring.doing != announced:
            announced = scoring.doing
            announce(announced)
        wait([done], timeout=LOOK)
    if announce is not None and done.exception() is not None:
        announce(scoring.doing)
    done.result()


def waits_for_all(reward: Reward) -> bool:
    """Return whether a reward is called after the rollout: it compares all samples, or its network is offloaded."""
    return is_marked(reward.function, "is_batchwise") or bool(getattr(reward.function, "offload", False))


class _Thread:
    """A thread that calls rewards in the order of submission. Async ones wait in the event loop.

    It lasts until `close`. Python exits without waiting for it.
    """

    def __init__(self):
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.waiting: list[Future] = []
        self.settings = [read() for read, _ in SETTINGS]
        # each thread has its own current device, initially device 0
        self.device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        threading.Thread(target=self._call, name="rewards", daemon=True).start()

    def submit(self, scoring: Scoring) -> Future:
        """Queue a scoring; return a future that is done once it has its answers."""
        done: Future = Future()
        self.queue.put((scoring, done))
        return done

    def drop(self) -> None:
        """Drop queued scorings, and cancel those that are being awaited."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.queue.get_nowait()
        for future in self.waiting:
            future.cancel()

    def close(self) -> None:
        """End the thread once it has finished its current call."""
        self.drop()
        self.queue.put(None)

    def _call(self) -> None:
        if self.device is not None:
            torch.accelerator.set_device_index(self.device)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # for ordinary rewards that run a coroutine themselves
        while (entry := self.queue.get()) is not None:
            self._answer(*entry)
            del entry  # otherwise the samples would be kept until the next ones arrive
        loop.close()

    def _answer(self, scoring: Scoring, done: Future) -> None:
        try:
            scoring.answer()
        except BaseException as error:  # a reward that calls sys.exit must end the run, not just this thread
            done.set_exception(error)
            return
        if not scoring.is_waiting:
            done.set_result(None)
            return
        future = run_in_loop(self._wait(scoring))
        future.add_done_callback(functools.partial(_pass_on, done))
        self.waiting = [other for other in self.waiting if not other.done()] + [future]

    async def _wait(self, scoring: Scoring) -> None:
        try:
            await scoring.wait()
        finally:  # an async reward may have changed these settings
            torch.set_grad_enabled(False)
            restore_settings(self.settings)


def _pass_on(done: Future, waited: Future) -> None:
    error = CancelledError() if waited.cancelled() else waited.exception()
    done.set_result(None) if error is None else done.set_exception(error)
