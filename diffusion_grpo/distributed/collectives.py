"""Collectives for bytes, JSON and means: every process gets what each process has.

accelerate's functions for objects use pickle; these send only numbers.
"""

import contextlib
import json
import operator
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast


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
    own = {
        name: (sum(map(operator.mul, v, weights[name])), sum(weights[name]), float(max(v)), float(min(v)))
        for name, v in metrics.items()
        if v
    }
    found, every = {}, gather_json(accelerator, own)
    for name in sorted(set().union(*every)):
        parts = [each[name] for each in every if name in each]
        found[name] = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        if name in largest:
            found[name] = max(part[2] for part in parts)
        if name in smallest:
            found[name] = min(part[3] for part in parts)
    return found
