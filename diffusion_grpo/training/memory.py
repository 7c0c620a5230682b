"""Bytes: those of tensors, how a number of them is written, and the most that this process has used so far."""

import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors, each tensor once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in list(tensors)}.values())


def format_size(count: int) -> str:
    """Write a number of bytes in the largest unit of which there is at least one, e.g. "1.5 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


def measure_peak_memory(device: torch.device | str) -> float:
    """Return the peak of tensors on the GPU in GiB, or without a GPU of the whole process in main memory."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        import psutil  # of accelerate's requirements

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
