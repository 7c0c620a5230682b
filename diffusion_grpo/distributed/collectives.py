"""What each process has, on all of them: bytes, JSON and means enter on each, and leave as those of all.

All functions are collectives of numbers alone. A module of its own because accelerate's functions for objects pickle
them.
"""

import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast


def gathered_bytes(accelerator: Accelerator, own: bytes) -> list[bytes]:
    """What each process has, on all of them: a collective, of numbers alone."""
    if accelerator.num_processes == 1:
        return [own]
    sizes = accelerator.gather(torch.tensor([len(own)], device=accelerator.device)).tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    every = accelerator.gather(padded.to(accelerator.device)).view(len(sizes), -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(every, sizes, strict=True)]


def broadcast_bytes(accelerator: Accelerator, own: torch.Tensor | None, process: int) -> torch.Tensor:
    """(bytes,) uint8 on the CPU: what `process` has, on all; a collective, of numbers alone."""
    size = broadcast(torch.tensor([0 if own is None else len(own)], device=accelerator.device), process).item()
    content = torch.zeros(size, dtype=torch.uint8) if own is None else own
    return broadcast(content.to(accelerator.device), process).cpu()


def gathered_json(accelerator: Accelerator, own: Any) -> list[Any]:
    """What each process has, of numbers, texts, lists and mappings from texts, on all of them: a collective."""
    return [json.loads(content) for content in gathered_bytes(accelerator, json.dumps(own).encode())]


def gathered_means(
    accelerator: Accelerator,
    metrics: dict[str, list[float]],
    largest: tuple[str, ...] = (),
    smallest: tuple[str, ...] = (),
) -> dict[str, float]:
    """Means over the values of all processes, each of which may have measured something else.

    Args:
        accelerator: a collective of all its processes.
        metrics: values by name.
        largest, smallest: names of which the largest, or the smallest, value is given instead.
    """
    own = {name: (float(sum(v)), len(v), float(max(v)), float(min(v))) for name, v in metrics.items() if v}
    found, every = {}, gathered_json(accelerator, own)
    for name in sorted(set().union(*every)):
        parts = [each[name] for each in every if name in each]
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
        found[name] = total / count
        if name in largest:
            found[name] = max(part[2] for part in parts)
        if name in smallest:
            found[name] = min(part[3] for part in parts)
    return found
