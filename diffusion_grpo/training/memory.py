"""Memory sizes: count the bytes of tensors and of a run, and format them."""

from collections.abc import Iterable
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from ..rollout.generate import RolloutLoader


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors; repeated ones count once, and one that wraps others as what it wraps."""
    return sum({id(tensor): _count(tensor) for tensor in list(tensors)}.values())


def _count(tensor: Tensor) -> int:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    return sum(_count(getattr(tensor, name)) for name in flatten()[0])


def weigh_run(model: nn.Module, pipe: DiffusionPipeline, optimizer: Any, feed: RolloutLoader) -> dict[str, int]:
    """Return the bytes of a run on the model's device by kind, as in `diffusion-grpo plan`, the largest first."""
    device = next((p.device.type for p in model.parameters() if p.requires_grad), "cpu")
    known = {id(x) for x in list_weights(model)}
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    states = (getattr(optimizer, "state", None) or {}).values()
    samples = [] if feed.buffer is None else feed.buffer.samples
    groups = {
        "parameters": list_weights(model),
        "gradients": (p.grad for p in model.parameters()),
        "optimizer": (x for state in states for x in state.values() if torch.is_tensor(x)),
        "frozen parts": (x for part in parts for x in list_weights(part) if id(x) not in known),
        "trajectory": (tensor for sample in samples for tensor in sample.tensors().values()),
    }
    counts = {
        name: count_bytes(x for x in tensors if x is not None and x.device.type == device)
        for name, tensors in groups.items()
    }
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def list_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of a module, and its buffers, which take memory too."""
    return [*module.parameters(), *module.buffers()]


def format_size(count: int) -> str:
    """Format a number of bytes in a fitting unit, e.g. "1.5 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"
