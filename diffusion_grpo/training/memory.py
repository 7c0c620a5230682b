"""The most memory that this process has used so far."""

import sys

import torch


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
