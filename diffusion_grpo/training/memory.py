"""Memory sizes: count the bytes of tensors, format them, and measure the peak of this process."""

import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors; repeated ones count once, and one that wraps others as what it wraps."""
    return sum({id(tensor): _count(tensor) for tensor in list(tensors)}.values())


def _count(tensor: Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    return sum(_count(getattr(tensor, name)) for name in flatten()[0])


def format_size(count: int) -> str:
    """Format a number of bytes in a fitting unit, e.g. "1.5 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


def measure_peak_memory(device: torch.device | str) -> float:
    """Return the peak memory in GiB: of tensors on the GPU or, without a GPU, of the whole process in main memory."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        import psutil  # a requirement of accelerate

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
