"""Failure propagation: when one process fails, all of them end soon and report its error.

A collective in which one process is missing ends in a timeout that does not name the process. So processes exchange
errors and heartbeats through torch's key-value store, which has no such limit, and wait for each other there while
each works by itself for any length of time (a rollout, its rewards).
"""

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch import distributed

logger = logging.getLogger(__name__)
NOTICE_INTERVAL = 60.0  # seconds between two log lines about processes that are waited for
HEARTBEAT = 2.0  # seconds between two heartbeats
REQUESTS_PER_SECOND = 200  # to the store, by all waiting processes together
MAX_NAMED = 4  # at most this many missing processes are named
STORE_LINGER = 30.0  # seconds that the process with the store waits for others to read an error
GRACE_PERIOD = 30.0  # seconds that a process has to end by itself after another one has failed
RUN_NUMBERS = itertools.count()  # a process may make several runs; each has its own part of the store


class RankError(RuntimeError):
    """Another process failed, or sent no heartbeat within the timeout of the process group."""


Error = tuple[int, str, str]  # the process that failed, the type of its error, its message


class ProcessGroupMonitor:
    """Watches over the processes of a run: barriers that outlast slow work, and errors that reach every process."""

    def __init__(self, processes: PartialState, timeout: float, kinds: tuple[type[Exception], ...]):
        self.processes, self.timeout = processes, timeout
        self.kinds = {kind.__name__: kind for kind in kinds}
        self._number, self._turn = next(RUN_NUMBERS), 0
        self._deferred: Exception | None = None
        self._known: Exception | None = None  # the error that this process ends with, if the others know it
        self._news: Error | None = None  # error of another process, once read from the store
        self._reading, self._watches, self._entry = threading.Lock(), 0, 0
        self._current_turn: str | None = None  # the barrier that this process works towards
        self._task, self._since = "", time.monotonic()
        self._signing = threading.Lock()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.processes.num_processes == 1

    def set_task(self, task: str) -> None:
        """Set the current task of this process, for the messages of processes that wait for it."""
        with self._signing:
            self._task, self._since = task, time.monotonic()
        if self._current_turn is not None:
            self._give_sign(self._current_turn)

    @contextlib.contextmanager
    def barrier_after(self, task: str) -> Iterator[None]:
        """Wait at the end for all processes, however long they take; all leave, or all raise the same error."""
        self.set_task(task)
        if self.is_alone:
            yield
            return
        turn, stop = self._next_turn(), threading.Event()
        self._current_turn = turn
        life = threading.Thread(target=self._live, args=(turn, stop), daemon=True)
        life.start()
        try:
            try:
                yield
            finally:
                self._current_turn = None
                stop.set()
                life.join()
        except Exception as error:
            if error is self._known or isinstance(
                error, RankError
            ):  # from inside `propagate_errors`, or another process is dead
                raise
            own = self.processes.process_index
            logger.error("Process %d failed, which %s; it waits for the others to end.", own, task, exc_info=error)
            self._meet(turn, error)
            raise
        self._meet(turn, None)

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Enter around collectives, so that no process waits there for one that has failed.

        A process that fails leaves its error in the store. The others end with its message as soon as their
        collective breaks. If it does not break (NCCL may wait for the whole `ddp_timeout`), they are ended with exit
        code 1, `GRACE_PERIOD` seconds after they have read the error.
        """
        if self.is_alone:
            yield
            return
        stop = threading.Event()
        self._watches += 1
        if self._watches == 1:
            self._entry, self._news = self._entry + 1, None  # forget an error that was caught earlier
            threading.Thread(target=self._watch, args=(stop,), daemon=True).start()
        try:
            yield
        except Exception as error:
            if error is not self._known:
                self._publish_error(error)
            raise
        finally:
            self._watches -= 1
            stop.set()

    def _publish_error(self, error: Exception) -> None:
        """Leave an error for the other processes, unless it only follows from the error of another process."""
        self._known = error
        own, store = self.processes.process_index, self._store
        try:
            if store.add(f"failures/{self._entry}", 1) == 1:
                store.set(f"failure/{self._entry}", json.dumps([own, type(error).__name__, str(error)]))
                logger.error("Process %d failed; the others end too.", own, exc_info=error)
                self._linger(store, f"failure/{self._entry}/read", self.processes.num_processes - 1)
                return
            news = self._read_failure(store)
        except distributed.DistError:  # the process with the store has ended; its error may have been read
            news = self._news
        # a collective broke, or the transfer of a sample
        is_broken = type(error) in (RuntimeError, RankError) or isinstance(error, distributed.DistError)
        if news is not None and is_broken:
            self._known = RankError(self._describe_failure(news))
            raise self._known from error

    def _watch(self, stop: threading.Event) -> None:
        """End this process if it waits in vain for another one that has failed."""
        while not stop.wait(self.request_interval(1.0)):
            try:
                if not self._store.check([f"failure/{self._entry}"]):
                    continue
                news = self._read_failure(self._store)
            except distributed.DistError:  # the process with the store has ended, and so do the collectives
                return
            if news[0] == self.processes.process_index:
                return
            logger.error("%s; this process ends too.", self._describe_failure(news))
            if not stop.wait(GRACE_PERIOD):
                logging.shutdown()
                sys.stdout.flush()
                os._exit(1)

    def _read_failure(self, store: distributed.Store) -> Error:
        with self._reading:
            if self._news is None:
                self._news = tuple(json.loads(store.get(f"failure/{self._entry}")))
                store.add(f"failure/{self._entry}/read", int(self._news[0] != self.processes.process_index))
            return self._news

    def _raise_known_failure(self) -> None:
        """Raise an error that another process has left in the store, instead of waiting on."""
        if self._news is not None:
            self._known = RankError(self._describe_failure(self._news))
            raise self._known

    def _describe_failure(self, news: Error) -> str:
        process, kind, message = news
        return f"Process {process} of {self.processes.num_processes} failed with {kind}: {message}"

    def request_interval(self, least: float) -> float:
        """Return the seconds between two requests of a process, so that all processes do not overload the store."""
        return max(least, self.processes.num_processes / REQUESTS_PER_SECOND)

    def _linger(self, store: distributed.Store, read: str, count: int) -> None:
        """Stay until `count` processes have read an error, if the store ends with this process."""
        latest = time.monotonic() + min(STORE_LINGER, self.timeout)
        while self.processes.process_index == 0 and store.add(read, 0) < count and time.monotonic() < latest:
            time.sleep(0.05)

    def agree(self, error: Exception | None) -> None:
        """Raise on all processes if one has an error; a collective."""
        if not self.is_alone:
            failed = torch.tensor([int(error is not None)], device=self.processes.device)
            if gather(failed).any():
                self._meet(self._next_turn(), error)
        if error is not None:
            self._known = error
            raise error

    def defer(self, check: Callable, *args: Any) -> Any:
        """Run a check that may fail on this process only, and return what it returns.

        A single process fails at once. Several processes fail together in `agree_on_deferred`, before their gradients
        are reduced: errors of `kinds` are kept until then.
        """
        try:
            return check(*args)
        except tuple(self.kinds.values()) as error:
            if self.is_alone:
                raise
            self._deferred = self._deferred or error
            return None

    def agree_on_deferred(self) -> None:
        """Raise on all processes the error that `defer` has kept; a collective."""
        error, self._deferred = self._deferred, None
        self.agree(error)

    def _next_turn(self) -> str:
        self._turn += 1
        return str(self._turn)

    @property
    def _store(self) -> distributed.Store:
        return distributed.PrefixStore(
            f"diffusion_grpo/{self._number}", distributed.distributed_c10d._get_default_store()
        )

    def _live(self, turn: str, stop: threading.Event) -> None:
        """Send heartbeats until the work is done."""
        while True:
            self._give_sign(turn)
            if stop.wait(self.request_interval(HEARTBEAT)):
                return

    def _give_sign(self, turn: str) -> None:
        with self._signing, contextlib.suppress(distributed.DistError):  # reported at the barrier
            # Under the lock, so that the heartbeat thread cannot overwrite a task with the one before it.
            state = {"task": self._task, "seconds": time.monotonic() - self._since}
            self._store.set(f"{turn}/life/{self.processes.process_index}", json.dumps(state))

    def _meet(self, turn: str, error: Exception | None) -> None:
        """Wait for all processes, and raise the error of another one if this process has none."""
        self._known = error
        try:
            failures = self._exchange(turn, error)
        except distributed.DistError as lost:
            if error is not None:  # report its own error
                raise error from lost
            self._known = RankError(
                f"The processes lost contact ({lost}); the one that holds their store has ended, and its output says "
                "why."
            )
            raise self._known from lost
        others = [failure for failure in failures if failure[0] != self.processes.process_index]
        kinds = {kind for _, kind, _ in failures}
        if others and (error is None or len(kinds) > 1):  # if the types differ, all processes raise the same error
            process, kind, message = others[0]
            self._known = RankError(self._describe_failure(others[0]))
            if kind in self.kinds and len(kinds) == 1:
                self._known = self.kinds[kind](
                    f"Process {process} of {self.processes.num_processes} failed: {message}"
                )
            raise self._known

    def _exchange(self, turn: str, error: Exception | None) -> list[Error]:
        """Return the errors of all processes."""
        store, own = self._store, self.processes.process_index
        if error is not None:
            store.append(f"{turn}/failed", json.dumps([own, type(error).__name__, str(error)]) + "\n")
        store.append(f"{turn}/who", f"{own} ")
        store.add(f"{turn}/arrived", 1)
        self.wait_for_all(store, turn)
        store.delete_key(f"{int(turn) - 1}/life/{own}")  # every process has left the previous barrier
        for key in ("who", "arrived") if own == 0 else ():
            store.delete_key(f"{int(turn) - 1}/{key}")
        if not store.check([f"{turn}/failed"]):
            return []
        lines = store.get(f"{turn}/failed").decode().splitlines()
        store.add(f"{turn}/read", 1)
        self._linger(store, f"{turn}/read", self.processes.num_processes)
        return sorted(tuple(json.loads(line)) for line in lines)

    def wait_for_all(self, store: distributed.Store, turn: str) -> None:
        """Wait for all processes at a barrier: poll their number, and ask who is missing only if that takes long."""
        watch = SilenceWatch(self.timeout, time.monotonic())
        pause = 1e-3
        while store.add(f"{turn}/arrived", 0) < self.processes.num_processes:
            self._raise_known_failure()
            time.sleep(pause)
            pause = min(2 * pause, self.request_interval(0.2))
            if watch.is_due():
                here = {int(process) for process in store.get(f"{turn}/who").split()}
                missing = [process for process in range(self.processes.num_processes) if process not in here]
                watch.look(missing[:MAX_NAMED], lambda process: _read(store, f"{turn}/life/{process}"))


class SilenceWatch:
    """Names the processes that are waited for, and raises when one has been silent for too long."""

    def __init__(self, timeout: float, now: float):
        self.timeout, self.start, self.last_look, self.last_notice = timeout, now, now, now
        self.signs: dict[int, tuple[str | None, float]] = {}

    def is_due(self) -> bool:
        """Return whether it is time to look again."""
        return time.monotonic() - self.last_look >= min(NOTICE_INTERVAL, self.timeout) / 4

    def look(self, missing: list[int], sign_of: Callable[[int], str | None]) -> None:
        """Look for new heartbeats."""
        now = self.last_look = time.monotonic()
        is_notice_due = now - self.last_notice >= NOTICE_INTERVAL
        self.last_notice = now if is_notice_due else self.last_notice
        for process in missing:
            sign = sign_of(process)
            before, since = self.signs.setdefault(process, (sign, self.start))
            if sign != before:
                since = now
                self.signs[process] = (sign, now)
            doing = _describe_sign(sign)
            if now - since > self.timeout:
                raise RankError(
                    f"Process {process} gave no sign of life for {now - since:.0f} s (ddp_timeout={self.timeout:g}), "
                    f"so it has been killed or hangs; when last heard of, it {doing}."
                )
            if is_notice_due:
                logger.warning("Waiting for process %d, which %s.", process, doing)


def _describe_sign(sign: str | None) -> str:
    if sign is None:
        return "has not begun"
    state: dict[str, Any] = json.loads(sign)
    return f"{state['task']} ({state['seconds']:.0f} s so far)"


def _read(store: distributed.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
