"""Score the samples of all processes on a few of them (`reward_processes`).

The processes form `reward_processes` equal blocks, and the first process of each block scores whole groups for it,
wherever they were made. Samples are sent while the next ones are rolled out, through their own process group (gloo,
from host memory), so that no collective of the run waits for them. Rewards are called with the same samples in the
same order, no matter which process is ahead.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from ..distributed.context_parallel import ContextGroups
from ..distributed.failure import ProcessGroupMonitor, RankError
from ..media.serialize import pack_samples, unpack_samples
from .overlap import Arrivals, RolloutScoring

Packet = tuple[list[int], list | None, list[Tensor] | None]  # positions, and the sample and latents at each


def scoring_process(process: int, processes: int, count: int) -> int:
    """Return the first process in the block of `process`, where `processes` form `count` equal blocks."""
    block = process * count // processes
    return -(-block * processes // count)


def is_scorer(groups: ContextGroups, reward_processes: int | None) -> bool:
    """Return whether this process computes rewards.

    Args:
        groups: the context-parallel groups of processes, which share their samples.
        reward_processes: the setting of the same name.
    """
    own = groups.index
    is_first = reward_processes is None or own == scoring_process(own, groups.count, reward_processes)
    return is_first and groups.is_first


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Assignment of samples to the processes that score them, as one process sees it. Positions number all samples.

    Attributes:
        own: positions of the samples that this process makes.
        scorers: the process that scores each of them; None if another process of the context-parallel group sends it.
        sources: positions that this process scores, by the process that makes them.
    """

    own: list[int]
    scorers: list[int | None]
    sources: dict[int, list[int]]

    @property
    def taken(self) -> list[int]:
        """All positions that this process scores."""
        return [position for positions in self.sources.values() for position in positions]

    def packets(
        self, indices: Iterable[int], samples: list | None, latents: list[Tensor] | None
    ) -> Iterator[tuple[int, Packet]]:
        """Yield each scoring process with its packet of the samples made here at `indices`.

        Args:
            indices: indices of the samples to send.
            samples, latents: samples and latents of this process, by index.
        """
        indices = [index for index in indices if self.scorers[index] is not None]
        for process in dict.fromkeys(self.scorers[index] for index in indices):
            chosen = [index for index in indices if self.scorers[index] == process]
            parts = (kept and [kept[index] for index in chosen] for kept in (samples, latents))
            yield process, ([self.own[index] for index in chosen], *parts)

    @classmethod
    def of(cls, made: list[list[int]], group_size: int, count: int, rank: int, copies: int) -> Assignment:
        """Assign each sample to the process that scores it.

        Args:
            made: positions that each process makes, or each context-parallel group of `copies` processes.
            group_size: positions per group; a group is scored in the first block in `made` that has a part of it.
            count: the setting `reward_processes`.
            rank: index of this process.
        """
        homes: dict[int, int] = {}
        for process, positions in enumerate(made):
            for position in positions:
                homes.setdefault(position // group_size, copies * scoring_process(process, len(made), count))
        sources = {
            copies * process: [position for position in positions if homes[position // group_size] == rank]
            for process, positions in enumerate(made)
        }
        own = made[rank // copies]
        scorers = [None if rank % copies else homes[position // group_size] for position in own]
        return cls(own, scorers, {source: positions for source, positions in sources.items() if positions})


class SampleChannel:
    """Channel that sends samples between processes inside `barrier_after`. Its constructor is a collective.

    Args:
        monitor: passes messages between the processes.
        device: device for tensors that were on the sender's accelerator.
        timeout: seconds within which a sent packet must arrive.
    """

    def __init__(self, monitor: ProcessGroupMonitor, device: torch.device, timeout: float):
        self.monitor, self.device = monitor, device
        self.group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self.own, self.turn = monitor.processes.process_index, 0
        self.under_way: list[distributed.Work] = []

    def open(self) -> None:
        """Begin a turn. Packets left over from an earlier turn are not mistaken for parts of this one."""
        self.turn += 1
        self.under_way, self.counts = [], collections.Counter()

    def close(self) -> None:
        """End a turn; called after `barrier_after`, when all packets have been received."""
        for work in self.under_way:
            work.wait()
        self.under_way = []

    def send(self, process: int, packet: Packet) -> None:
        """Send a packet without waiting, and notify the receiving process."""
        positions, samples, latents = packet
        content = pack_samples(samples, latents)
        self.under_way = [
            work for work in self.under_way if not work.is_completed()
        ]  # each keeps its packet in memory
        self.under_way.append(distributed.isend(content, process, group=self.group, tag=self.turn))
        self.monitor.send(self._next(self.own, process), json.dumps({"positions": positions, "bytes": len(content)}))

    def receive(self, process: int, is_waiting: bool) -> Packet | None:
        """Return the next packet of a process; None if it has not arrived yet and `is_waiting` is false.

        Raises:
            RankError: the process ended before the whole packet had arrived, or does not respond.
        """
        if is_waiting:
            self.monitor.set_task(f"waits for samples of process {process}")
        key = f"{process}/{self.own}/{self.counts[process, self.own]}"
        message = self.monitor.receive(process, key, is_waiting)
        if message is None:
            return None
        self._next(process, self.own)
        header = json.loads(message)
        content = torch.empty(header["bytes"], dtype=torch.uint8)
        try:
            distributed.recv(content, process, group=self.group, tag=self.turn)
        except RuntimeError as error:
            raise RankError(f"Process {process} broke off while sending its samples ({error}).") from error
        return header["positions"], *unpack_samples(content, self.device)

    def _next(self, source: int, target: int) -> str:
        number = self.counts[source, target]
        self.counts[source, target] += 1
        return f"{source}/{target}/{number}"


class SubsetScoring:
    """Counterpart of `RolloutScoring` when some processes score for all: the same calls, on another process.

    Packets are taken in turn, one from each process that has some left, so that rewards are called in the same order
    no matter which process is ahead. No process waits for a packet before its own samples are made.

    Args:
        assignment: assignment of this rollout's samples.
        channel: sends samples to other processes; opened on entry.
        scoring: scoring of the samples that are scored here, in the order of `assignment.taken`.
        groups: the group of each sample that is made here.
    """

    def __init__(self, assignment: Assignment, channel: SampleChannel, scoring: RolloutScoring, groups: list[int]):
        self.assignment, self.channel, self.scoring = assignment, channel, scoring
        self.arrivals = Arrivals(groups)
        self.kept: collections.deque[Packet] = collections.deque()  # packets of this process's own samples
        self.owed = {source: len(positions) for source, positions in assignment.sources.items()}
        self.turns = collections.deque(self.owed)
        self.index = {position: index for index, position in enumerate(assignment.taken)}

    def __enter__(self) -> SubsetScoring:
        self.channel.open()
        return self

    def __exit__(self, *error: Any) -> None:
        self.scoring.__exit__(*error)

    @property
    def samples(self) -> list[Any]:
        """The samples made here."""
        return self.arrivals.samples

    @property
    def count(self) -> int:
        """The number of samples scored here."""
        return len(self.assignment.taken)

    @property
    def waited(self) -> float:
        """Seconds for which the run's first scoring held up the rollout."""
        return self.scoring.waited

    def add(self, indices: list[int], samples: Any | None, latents: Tensor | None) -> None:
        """Add the samples that a pipeline call has made; send groups once all of their samples made here are there."""
        ready = self.arrivals.add(indices, samples, latents)
        kept = None if samples is None else self.arrivals.samples, None if latents is None else self.arrivals.latents
        for process, packet in self.assignment.packets(ready, *kept):
            if process == self.channel.own:
                self.kept.append(packet)
            else:
                self.channel.send(process, packet)
        self._take_in(is_waiting=False)

    def _take_in(self, is_waiting: bool) -> None:
        while self.turns:
            source = self.turns[0]
            if source != self.channel.own:
                packet = self.channel.receive(source, is_waiting)
            else:
                packet = self.kept.popleft() if self.kept else None
            if packet is None:
                return
            positions, samples, latents = packet
            self.scoring.add([self.index[position] for position in positions], samples, latents)
            self.turns.popleft()
            self.owed[source] -= len(positions)
            if self.owed[source]:
                self.turns.append(source)

    def wait(self, watch: Callable[[int], None] = lambda count: None) -> None:
        """Wait for all rewards that are computed here; see `RolloutScoring.wait`."""
        self._take_in(is_waiting=True)
        if self.assignment.taken:
            self.scoring.wait(watch)

    def result(self, failure_dir: Path | None, log_metric: Callable, log_extra: Callable) -> Tensor:
        """Return the rewards of the samples scored here, `(samples, functions)`, ordered as `assignment.taken`."""
        return self.scoring.result(failure_dir, log_metric, log_extra)


def exchange_samples(
    assignment: Assignment, channel: SampleChannel, samples: list, latents: list[Tensor] | None
) -> Packet:
    """Send all samples of this process, and return all those that it scores. Call it inside `barrier_after`.

    Args:
        assignment: the samples that each process scores.
        channel: sends the samples.
        samples, latents: samples and latents of this process, in the order of `assignment.own`.
    """
    channel.open()
    found: Packet = [], [], None if latents is None else []
    given = dict(assignment.packets(range(len(assignment.own)), samples, latents))
    for process, packet in given.items():
        if process != channel.own:
            channel.send(process, packet)
    for source in assignment.sources:
        packet = given[source] if source == channel.own else channel.receive(source, is_waiting=True)
        for whole, part in zip(found, packet, strict=True):
            if whole is not None:
                whole += part
    return found
