"""Calls that all processes make together: of collectives, and of networks whose weights they share.

accelerate's functions for objects use pickle; those for bytes, JSON and means here send only numbers.
"""

import contextlib
import json
import operator
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor
from torch.utils import _pytree as pytree

from ..policy.networks import CallHook

DONE, PLAIN, GRAPH = 0, 1, 2  # next action of a process: no more calls, a call without gradient, one with gradient


class EqualCalls(CallHook):
    """Keeps processes in step whose calls of a network gather its weights."""

    def __init__(self, exchange: Callable[[int], list[int]]):
        self._exchange = exchange  # a collective that returns the next action of each process
        self._last_calls: dict[int, Callable] = {}  # latest call of each network, also of earlier pipeline calls
        self._own_calls: dict[int, Callable] = {}  # the same, with the networks' own forwards only
        self._calls_own = True
        self._spare: list[Tensor] = []

    def begin(self, is_own: bool) -> None:
        self._calls_own, self._last_calls = is_own, dict(self._own_calls) if is_own else {}

    def before(self, number: int, call: Callable[[], Any]) -> None:
        self._last_calls[number] = call
        if self._calls_own:
            self._own_calls[number] = call
        self._repeat_until(number * GRAPH + (GRAPH if torch.is_grad_enabled() else PLAIN))

    def finish(self) -> None:
        self._repeat_until(DONE)

    def take_spare(self) -> Tensor | float:
        """Return zero, once, with the gradient of calls that were made only to stay in step."""
        spare, self._spare = self._spare, []
        return sum(spare, 0.0)

    def _repeat_until(self, action: int) -> None:
        """Repeat the calls that must come before the next action of this process."""
        # All processes make the same calls in the same order, for each network first those without gradient. How many
        # depends on the samples: on whether a step is guided, and on which output shapes are known already. A process
        # without a call of its own repeats its last one, so that it takes part in every backward pass.
        while (turn := min(filter(None, self._exchange(action)), default=DONE)) != action:
            number, kind = divmod(turn - 1, GRAPH)
            with torch.set_grad_enabled(kind + 1 == GRAPH):
                output = pytree.tree_leaves(self._last_calls[number]())
            if kind + 1 == GRAPH:
                self._spare.append(sum((leaf * 0.0).sum() for leaf in output if torch.is_tensor(leaf)))


def gather_bytes(accelerator: Accelerator, own: bytes) -> list[bytes]:
    """Return the bytes that each process has; a collective."""
    if accelerator.num_processes == 1:
        return [own]
    sizes = accelerator.gather(torch.tensor([len(own)], device=accelerator.device)).tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    every = accelerator.gather(padded.to(accelerator.device)).view(len(sizes), -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(every, sizes, strict=True)]


def broadcast_bytes(accelerator: Accelerator, own: torch.Tensor | None, process: int) -> torch.Tensor:
    """Return what `process` has, (bytes,) uint8 on the CPU, on all processes; a collective."""
    size = broadcast(torch.tensor([0 if own is None else len(own)], device=accelerator.device), process).item()
    content = torch.zeros(size, dtype=torch.uint8) if own is None else own
    return broadcast(content.to(accelerator.device), process).cpu()


def gather_json(accelerator: Accelerator, own: Any) -> list[Any]:
    """Return what each process has: numbers, strings, lists, and mappings from strings; a collective."""
    return [json.loads(content) for content in gather_bytes(accelerator, json.dumps(own).encode())]


def is_shared(accelerator: Accelerator, folder: Path) -> bool:
    """Return whether all processes see the same `folder`, which is created; a collective."""
    if accelerator.num_processes == 1:
        return True
    mark = folder / f"_{gather_json(accelerator, uuid.uuid4().hex)[0]}"  # no file system knows this name from before
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a full disk is reported when a run starts
        if accelerator.is_main_process:
            mark.touch()
    accelerator.wait_for_everyone()
    is_seen = all(gather_json(accelerator, mark.is_file()))
    if accelerator.is_main_process:
        mark.unlink(missing_ok=True)
    return is_seen


def gather_means(
    accelerator: Accelerator,
    metrics: dict[str, list[float]],
    largest: tuple[str, ...] = (),
    smallest: tuple[str, ...] = (),
    weights: Mapping[str, list[float]] | None = None,
) -> dict[str, float]:
    """Return means over the values of all processes, each of which may have measured something else; a collective."""
    weights = {name: [1.0] * len(values) for name, values in metrics.items()} | dict(weights or {})
    local = {
        name: (sum(map(operator.mul, v, weights[name])), sum(weights[name]), float(max(v)), float(min(v)))
        for name, v in metrics.items()
        if v
    }
    combined, every = {}, gather_json(accelerator, local)
    for name in sorted(set().union(*every)):
        parts = [each[name] for each in every if name in each]
        combined[name] = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        if name in largest:
            combined[name] = max(part[2] for part in parts)
        if name in smallest:
            combined[name] = min(part[3] for part in parts)
    return combined
