"""Processes that wait for each other outside of collectives, and end together where one of them fails, inside or out.

In: what each process does by itself, for however long (a rollout, its rewards), and the error it ended in, if any.
Out: that error on every process. A module of its own because a collective in which one process is missing runs into a
time-out that names nobody; torch's key-value store, through which processes find each other, has no such limit.
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
from accelerate import Accelerator
from torch import distributed

logger = logging.getLogger(__name__)
NOTICE = 60.0  # seconds between two lines about those who are waited for
BEAT = 2.0  # seconds between two signs of life
REQUESTS = 200  # a second that all processes together make of the store while they wait: more of them ask less often
NAMED = 4  # processes whose signs of life are read, and told of, where many are waited for
FAREWELL = 30.0  # seconds that the process which may hold the store stays for those who still read errors from it
GRACE = 30.0  # seconds that a process has to end by itself after another one has failed
NUMBERS = itertools.count()  # of the runs of a process: each has its own part of the store


class RankError(RuntimeError):
    """Another process failed, or gave no sign of life for the time-out of the process group."""


class _OtherFailed(Exception):
    """What this process waits for does not come: another one has failed, and says so when they meet."""


Error = tuple[int, str, str]  # the process that failed, the kind of its error, and what it says


class Ranks:
    """The processes of a run.

    Args:
        accelerator: which this process is, and how many there are.
        timeout: seconds without a sign of life after which a process counts as dead (`ddp_timeout`).
        kinds: errors that are raised as what they are on the other processes too; of any other these get a
            `RankError` with its message.
    """

    def __init__(self, accelerator: Accelerator, timeout: float, kinds: tuple[type[Exception], ...]):
        self.accelerator, self.timeout = accelerator, timeout
        self.kinds = {kind.__name__: kind for kind in kinds}
        self._number, self._turn = next(NUMBERS), 0
        self._deferred: Exception | None = None
        self._known: Exception | None = None  # that this process ends with, where the others know of it
        self._news: Error | None = None  # that another process has left in the store, once it is read
        self._reading, self._watches, self._entry = threading.Lock(), 0, 0
        self._apart: str | None = None  # the turn of which this process is inside of `apart`
        self._task, self._since = "", time.monotonic()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.accelerator.num_processes == 1

    def announce(self, task: str) -> None:
        """Says what this process does now, for those who come to wait for it."""
        self._task, self._since = task, time.monotonic()
        if self._apart is not None:
            self._give_sign(self._apart)

    @contextlib.contextmanager
    def apart(self, task: str) -> Iterator[None]:
        """What is done inside may take each process another time; all leave together, or with the same error.

        Raises:
            Exception: this process' own.
            RankError: another one's, unless it is one of `kinds`; or another process died.
        """
        self.announce(task)
        if self.is_alone:
            yield
            return
        turn, stop = self._next_turn(), threading.Event()
        self._apart = turn
        life = threading.Thread(target=self._live, args=(turn, stop), daemon=True)
        life.start()
        try:
            try:
                yield
            finally:
                self._apart = None
                stop.set()
                life.join()
        except _OtherFailed:
            self._meet(turn, None)  # raises what that one failed with
            raise
        except Exception as error:
            if error is self._known or isinstance(error, RankError):  # from inside of `together`, or another is dead
                raise
            own = self.accelerator.process_index
            logger.error("Process %d failed, which %s; it waits for the others to end.", own, task, exc_info=error)
            self._meet(turn, error)
            raise
        self._meet(turn, None)

    def tell(self, key: str, value: str) -> None:
        """Leaves a word for another process, inside of `apart`."""
        self._store.set(f"{self._apart}/told/{key}", value)

    def told(self, process: int, key: str, is_waiting: bool) -> str | None:
        """What a process has left under `key` inside of `apart`, once; None where it is not there yet.

        Args:
            is_waiting: waits for it, for as long as the process gives signs of life and none has failed.

        Raises:
            RankError: the process gives no sign of life.
        """
        store, turn = self._store, self._apart
        name, watch, pause = f"{turn}/told/{key}", _Watch(self.timeout, time.monotonic()), 1e-3
        while not store.check([name]):
            if not is_waiting:
                return None
            if store.check([f"{turn}/failed"]):
                raise _OtherFailed
            self._heed()
            time.sleep(pause)
            pause = min(2 * pause, self._pause(0.2))
            if watch.is_due():
                watch.look([process], lambda process: _read(store, f"{turn}/life/{process}"))
        value = store.get(name).decode()
        store.delete_key(name)
        return value

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside meets the other processes in collectives, in which one that has failed is missing.

        It leaves its error in the store. The others end with its words as soon as their collective breaks; those
        whose does not (NCCL's may wait for the whole `ddp_timeout`) are ended `GRACE` seconds after they have read
        them, with exit code 1.

        Raises:
            Exception: this process' own.
            RankError: another one's, where this one's may be but a broken collective.
        """
        if self.is_alone:
            yield
            return
        stop = threading.Event()
        self._watches += 1
        if self._watches == 1:
            self._entry, self._news = self._entry + 1, None  # an error of an earlier one is over
            threading.Thread(target=self._watch, args=(stop,), daemon=True).start()
        try:
            yield
        except Exception as error:
            if error is not self._known:
                self._leave(error)
            raise
        finally:
            self._watches -= 1
            stop.set()

    def _leave(self, error: Exception) -> None:
        """Tells the others of an error, or finds that it comes of another process'."""
        self._known = error
        own, store = self.accelerator.process_index, self._store
        try:
            if store.add(f"failures/{self._entry}", 1) == 1:
                store.set(f"failure/{self._entry}", json.dumps([own, type(error).__name__, str(error)]))
                logger.error("Process %d failed; the others end too.", own, exc_info=error)
                self._stay(store, f"failure/{self._entry}/read", self.accelerator.num_processes - 1)
                return
            news = self._read_failure(store)
        except distributed.DistError:  # who holds the store has ended, perhaps after this process has read its error
            news = self._news
        # of a collective, or of a sample that was under way
        is_broken = type(error) in (RuntimeError, RankError) or isinstance(error, distributed.DistError)
        if news is not None and is_broken:
            self._known = RankError(self._said(news))
            raise self._known from error

    def _watch(self, stop: threading.Event) -> None:
        """Ends a process that waits in vain for another one, which has failed."""
        while not stop.wait(self._pause(1.0)):
            try:
                if not self._store.check([f"failure/{self._entry}"]):
                    continue
                news = self._read_failure(self._store)
            except distributed.DistError:  # who holds the store has ended, and this process' collectives with it
                return
            if news[0] == self.accelerator.process_index:
                return
            logger.error("%s; this process ends too.", self._said(news))
            if not stop.wait(GRACE):
                logging.shutdown()
                sys.stdout.flush()
                os._exit(1)

    def _read_failure(self, store: distributed.Store) -> Error:
        with self._reading:
            if self._news is None:
                self._news = tuple(json.loads(store.get(f"failure/{self._entry}")))
                store.add(f"failure/{self._entry}/read", int(self._news[0] != self.accelerator.process_index))
            return self._news

    def _heed(self) -> None:
        """Waits no longer where another process has left its error in the store."""
        if self._news is not None:
            self._known = RankError(self._said(self._news))
            raise self._known

    def _said(self, news: Error) -> str:
        process, kind, message = news
        return f"Process {process} of {self.accelerator.num_processes} failed with {kind}: {message}"

    def _pause(self, least: float) -> float:
        """Seconds between two requests of one process to the store, so that it bears those of all."""
        return max(least, self.accelerator.num_processes / REQUESTS)

    def _stay(self, store: distributed.Store, read: str, count: int) -> None:
        """The store may end with this process: it stays until so many have read an error from it."""
        latest = time.monotonic() + min(FAREWELL, self.timeout)
        while self.accelerator.process_index == 0 and store.add(read, 0) < count and time.monotonic() < latest:
            time.sleep(0.05)

    def agree(self, error: Exception | None) -> None:
        """Raises on all processes where one has an error: a collective that all of them come to.

        Raises:
            Exception: as `apart` does.
        """
        if not self.is_alone:
            failed = torch.tensor([int(error is not None)], device=self.accelerator.device)
            if self.accelerator.gather(failed).any():
                self._meet(self._next_turn(), error)
        if error is not None:
            self._known = error
            raise error

    def defer(self, check: Callable, *args: Any) -> Any:
        """Run a check that may fail on this process only, and return what it returns.

        Alone, a process fails at once. Several fail together, in `agree_on_deferred`, before their gradients meet: an
        error of one of `kinds` is kept until then.
        """
        try:
            return check(*args)
        except tuple(self.kinds.values()) as error:
            if self.is_alone:
                raise
            self._deferred = self._deferred or error
            return None

    def agree_on_deferred(self) -> None:
        """Raise what `defer` has kept, on all processes; a collective.

        Raises:
            Exception: as `agree` does.
        """
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
        """Signs of life, until the work is done."""
        while True:
            self._give_sign(turn)
            if stop.wait(self._pause(BEAT)):
                return

    def _give_sign(self, turn: str) -> None:
        state = {"task": self._task, "seconds": time.monotonic() - self._since}
        with contextlib.suppress(distributed.DistError):  # this process says so when it comes to meet the others
            self._store.set(f"{turn}/life/{self.accelerator.process_index}", json.dumps(state))

    def _meet(self, turn: str, error: Exception | None) -> None:
        """Waits for all, and raises what another one failed with where this one did not."""
        self._known = error
        try:
            failures = self._exchange(turn, error)
        except distributed.DistError as lost:
            if error is not None:  # its own is what there is to say
                raise error from lost
            self._known = RankError(
                f"The processes lost touch ({lost}); the one that holds their store has ended, and its output says "
                "why."
            )
            raise self._known from lost
        others = [failure for failure in failures if failure[0] != self.accelerator.process_index]
        kinds = {kind for _, kind, _ in failures}
        if others and (error is None or len(kinds) > 1):  # who is told of different ones ends with the same
            process, kind, message = others[0]
            self._known = RankError(self._said(others[0]))
            if kind in self.kinds and len(kinds) == 1:
                self._known = self.kinds[kind](
                    f"Process {process} of {self.accelerator.num_processes} failed: {message}"
                )
            raise self._known

    def _exchange(self, turn: str, error: Exception | None) -> list[Error]:
        """The errors of all processes."""
        store, own = self._store, self.accelerator.process_index
        if error is not None:
            store.append(f"{turn}/failed", json.dumps([own, type(error).__name__, str(error)]) + "\n")
        store.append(f"{turn}/who", f"{own} ")
        store.add(f"{turn}/arrived", 1)
        self._wait_for_all(store, turn)
        store.delete_key(f"{int(turn) - 1}/life/{own}")  # all have left the turn before
        for key in ("who", "arrived") if own == 0 else ():
            store.delete_key(f"{int(turn) - 1}/{key}")
        if not store.check([f"{turn}/failed"]):
            return []
        lines = store.get(f"{turn}/failed").decode().splitlines()
        store.add(f"{turn}/read", 1)
        self._stay(store, f"{turn}/read", self.accelerator.num_processes)
        return sorted(tuple(json.loads(line)) for line in lines)

    def _wait_for_all(self, store: distributed.Store, turn: str) -> None:
        """Asks one counter; only where that takes long, who is missing."""
        watch = _Watch(self.timeout, time.monotonic())
        pause = 1e-3
        while store.add(f"{turn}/arrived", 0) < self.accelerator.num_processes:
            self._heed()
            time.sleep(pause)
            pause = min(2 * pause, self._pause(0.2))
            if watch.is_due():
                here = {int(process) for process in store.get(f"{turn}/who").split()}
                missing = [process for process in range(self.accelerator.num_processes) if process not in here]
                watch.look(missing[:NAMED], lambda process: _read(store, f"{turn}/life/{process}"))


class _Watch:
    """Those who are waited for: says who they are, and when one is taken for dead."""

    def __init__(self, timeout: float, now: float):
        self.timeout, self.start, self.looked, self.told = timeout, now, now, now
        self.signs: dict[int, tuple[str | None, float]] = {}

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self.looked >= min(NOTICE, self.timeout) / 4

    def look(self, missing: list[int], sign_of: Callable[[int], str | None]) -> None:
        """Raises `RankError` for the first without a new sign of life."""
        now = self.looked = time.monotonic()
        is_telling = now - self.told >= NOTICE
        self.told = now if is_telling else self.told
        for process in missing:
            sign = sign_of(process)
            before, since = self.signs.setdefault(process, (sign, self.start))
            if sign != before:
                since = now
                self.signs[process] = (sign, now)
            doing = _described(sign)
            if now - since > self.timeout:
                raise RankError(
                    f"Process {process} gave no sign of life for {now - since:.0f} s (ddp_timeout={self.timeout:g}); "
                    f"it {doing} last, and has been killed or hangs."
                )
            if is_telling:
                logger.warning("Waiting for process %d, which %s.", process, doing)


def _described(sign: str | None) -> str:
    if sign is None:
        return "has not begun"
    state: dict[str, Any] = json.loads(sign)
    return f"{state['task']} since {state['seconds']:.0f} s"


def _read(store: distributed.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
