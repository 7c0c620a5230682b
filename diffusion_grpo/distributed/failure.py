"""Failure propagation: when one process fails, all of them end soon and report its error.

A collective in which one process is missing may end only in a timeout that does not name the process. So processes
agree after each piece of work that they do by themselves (a rollout, its rewards), and exchange errors that happen
between collectives through torch's key-value store. Meanwhile a thread looks for such errors there, and ends the
process if it goes on waiting for one that has failed.
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
WATCH_INTERVAL = 2.0  # seconds between two looks for the error of another process
STORE_LINGER = 30.0  # seconds that the process with the store waits for others to read an error
GRACE_PERIOD = 30.0  # seconds that a process has to end by itself after another one has failed
RUN_NUMBERS = itertools.count()  # a process may make several runs; each has its own part of the store


class RankError(RuntimeError):
    """Another process failed."""


Error = tuple[int, str, str]  # the process that failed, the type of its error, its message


class ProcessGroupMonitor:
    """Watches over the processes of a run, so that an error of one reaches all."""

    def __init__(self, processes: PartialState, kinds: tuple[type[Exception], ...]):
        self.processes, self.is_alone = processes, processes.num_processes == 1
        self.kinds = {kind.__name__: kind for kind in kinds}
        self._number, self._turn = next(RUN_NUMBERS), 0
        self._deferred: Exception | None = None
        self._known: Exception | None = None  # the error that this process ends with, if the others know it
        self._news: Error | None = None  # error of another process, once read from the store
        self._reading, self._watches, self._entry = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def barrier_after(self, task: str) -> Iterator[None]:
        """Wait at the end for all processes; all leave, or all raise the error of one that failed."""
        try:
            yield
        except Exception as error:
            if self.is_alone or error is self._known:  # the others know: it is from inside `propagate_errors`
                raise
            rank = self.processes.process_index
            logger.error("Process %d failed, which %s; it waits for the others.", rank, task, exc_info=error)
            self.agree(error)
        else:
            self.agree()

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Enter around collectives, so that no process waits there for one that has failed."""
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
        rank, store = self.processes.process_index, self._store
        try:
            if store.add(f"failures/{self._entry}", 1) == 1:
                store.set(f"failure/{self._entry}", json.dumps([rank, type(error).__name__, str(error)]))
                logger.error("Process %d failed; the others end too.", rank, exc_info=error)
                self._linger(store, f"failure/{self._entry}/read")
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
        while not stop.wait(WATCH_INTERVAL):
            try:
                if not self._store.check([f"failure/{self._entry}"]):
                    continue
                news = self._read_failure(self._store)
            except distributed.DistError:  # the process with the store has ended, and so do the collectives
                return
            if news[0] == self.processes.process_index:
                return
            logger.error("%s; this process ends too.", self._describe_failure(news))
            if not stop.wait(GRACE_PERIOD):  # its collective did not break; NCCL may wait for all of `ddp_timeout`
                logging.shutdown()
                sys.stdout.flush()
                os._exit(1)

    def _read_failure(self, store: distributed.Store) -> Error:
        with self._reading:
            if self._news is None:
                self._news = tuple(json.loads(store.get(f"failure/{self._entry}")))
                store.add(f"failure/{self._entry}/read", int(self._news[0] != self.processes.process_index))
            return self._news

    def _describe_failure(self, news: Error) -> str:
        process, kind, message = news
        return f"Process {process} of {self.processes.num_processes} failed with {kind}: {message}"

    def _linger(self, store: distributed.Store, read: str) -> None:
        """Stay until all others have read this process's error, if the store ends with this process."""
        latest = time.monotonic() + STORE_LINGER
        others = self.processes.num_processes - 1
        while self.processes.process_index == 0 and store.add(read, 0) < others and time.monotonic() < latest:
            time.sleep(0.05)

    def agree(self, error: Exception | None = None) -> None:
        """Raise on all processes if one has an error, now or from `defer`; a collective."""
        error, self._deferred = error or self._deferred, None
        if not self.is_alone:
            self._turn += 1
            flags = gather(torch.tensor([int(error is not None)], device=self.processes.device)).tolist()
            if any(flags):
                self._known = error
                self._exchange([process for process, flag in enumerate(flags) if flag], error)
        if error is not None:
            self._known = error
            raise error

    def _exchange(self, failed: list[int], error: Exception | None) -> None:
        """Raise the error of another process if this one has none, or if their types differ; a collective."""
        store, rank = self._store, self.processes.process_index
        if error is not None:
            store.set(f"{self._turn}/{rank}", json.dumps([type(error).__name__, str(error)]))
        failures = [(process, *json.loads(store.get(f"{self._turn}/{process}"))) for process in failed]
        gather(torch.tensor([rank], device=self.processes.device))  # the store may end with the process that leaves
        others = [failure for failure in failures if failure[0] != rank]
        kinds = {kind for _, kind, _ in failures}
        if others and (error is None or len(kinds) > 1):  # if the types differ, all processes raise the same type
            self._known = RankError(self._describe_failure(others[0]))
            if len(kinds) == 1 and (kind := self.kinds.get(others[0][1])) is not None:
                self._known = kind(f"Process {others[0][0]} of {self.processes.num_processes} failed: {others[0][2]}")
            raise self._known

    def defer(self, check: Callable, *args: Any) -> Any:
        """Run a check that may fail on this process only; of several processes, errors of `kinds` are kept."""
        try:
            return check(*args)
        except tuple(self.kinds.values()) as error:
            if self.is_alone:
                raise
            self._deferred = self._deferred or error
            return None

    @property
    def _store(self) -> distributed.Store:
        return distributed.PrefixStore(
            f"diffusion_grpo/{self._number}", distributed.distributed_c10d._get_default_store()
        )
