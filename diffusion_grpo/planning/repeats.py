"""Measure a network of many equal blocks by running only a few of them.

Equal blocks in a row keep equally many bytes in a pass. So only the first few run, and the memory that one of them
leaves is counted as often as there are blocks like it.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .live_bytes import LiveBytes

KEPT = 5  # blocks per run: the first may have other inputs, two are compared, two more show what stays alive
PLAIN = (bool, int, float, str, type(None))


class BlocksDifferError(Exception):
    """Blocks that look equal keep different numbers of bytes."""


@dataclass
class Run:
    """Equal blocks in a row."""

    blocks: list[nn.Module]
    left_out: int
    passes: "list[Pass]" = field(default_factory=list)


@dataclass
class Pass:
    """One forward pass through equal blocks, and its backward pass."""

    times: int
    live: LiveBytes
    starts: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def enter(self, place: int) -> None:
        """Note that a block begins, if it is the next one.

        When the fourth block begins, the results of the second have been used; whatever is left of them stays alive.
        """
        if place != len(self.starts):
            return
        self.starts.append(self.live.made)
        if place == KEPT - 2:
            self.live.multiply(*self.starts[1:3], self.times)
        if place == KEPT - 1:
            self._compare(self.starts[1:3], self.starts[2:4])

    def turn(self, place: int) -> None:
        """Note that a block's backward pass begins, the last block's first.

        When it is the second block's, the blocks that were left out would have freed what they kept. What they would
        have made instead, such as gradients that wait for those of another pass, is counted by that of the fourth.
        """
        if place != KEPT - 1 - len(self.turns):
            return
        self.turns.append(self.live.made)
        if place == 1:
            self.live.multiply(*self.starts[1:3], 1)
            self.live.multiply(*self.turns[1:3], self.times)
        if place == 0:
            self._compare(self.turns[1:3], self.turns[2:4])

    def _compare(self, counted: list[int], single: list[int]) -> None:
        if self.live.count(*counted) != self.times * self.live.count(*single):
            raise BlocksDifferError


@contextlib.contextmanager
def shorten(networks: Iterable[nn.Module]) -> Iterator[list[Run]]:
    """Leave equal blocks out of networks; put them back on leaving."""
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        for network in networks:
            runs += _shorten_lists(network, stack)
        yield runs


def _shorten_lists(module: nn.Module, stack: contextlib.ExitStack) -> list[Run]:
    """Shorten the outermost lists of blocks in a module that have enough equal ones."""
    found: list[Run] = []
    for name, child in module.named_children():
        groups = _group_equal(child) if isinstance(child, nn.ModuleList) else []
        runs = [Run(group[:KEPT], len(group) - KEPT) for group in groups if len(group) > KEPT]
        if runs:
            stack.callback(setattr, module, name, child)
            setattr(module, name, nn.ModuleList(block for group in groups for block in group[:KEPT]))
        found += runs or _shorten_lists(child, stack)
    return found


def _group_equal(blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Group blocks that follow each other and are equal."""
    groups: list[list[nn.Module]] = []
    last = None
    for block in blocks:
        described = describe(block)
        if described != last:
            groups.append([])
        groups[-1].append(block)
        last = described
    return groups


def describe(block: nn.Module) -> list[Any]:
    """Return what equal blocks have in common: classes, plain attributes, and the shapes and dtypes of weights."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = sorted((key, value) for key, value in vars(module).items() if isinstance(value, PLAIN))
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        weights = [(key, x.shape, x.dtype, x.requires_grad) for key, x in tensors]
        found.append((name, type(module), plain, weights))
    return found


@contextlib.contextmanager
def count_repeats(runs: list[Run], live: LiveBytes) -> Iterator[None]:
    """Count the memory that the blocks that were left out would keep."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            for place, block in enumerate(run.blocks):
                enter, leave = functools.partial(_enter, run, place, live), functools.partial(_leave, run, place)
                stack.callback(block.register_forward_pre_hook(enter).remove)
                stack.callback(block.register_forward_hook(leave).remove)
            stack.callback(run.passes.clear)
        yield


def _enter(run: Run, place: int, live: LiveBytes, *_: Any) -> None:
    """Begin a pass at the first block; recomputation visits the blocks in another order."""
    if place == 0:
        run.passes.append(Pass(1 + run.left_out, live))
    if run.passes:
        run.passes[-1].enter(place)


def _leave(run: Run, place: int, block: nn.Module, args: Any, output: Any) -> None:
    """Watch for the backward pass of a block: it begins with the gradient of one of its outputs."""
    for tensor in pytree.tree_leaves(output):
        if run.passes and torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(functools.partial(_turn, run.passes[-1], place))


def _turn(watched: Pass, place: int, gradient: Any) -> None:
    watched.turn(place)
