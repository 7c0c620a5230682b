"""Compile the blocks of a network that repeat, for rollouts and updates alike."""

from typing import Any

import torch
from torch import nn

GRAPHS = 64  # that the blocks of one class may be compiled to


def compile_blocks(network: nn.Module, settings: dict[str, Any], is_hooked: bool = False) -> None:
    """Compile the blocks that repeat, which share their graphs; the network around them stays replaceable.

    A block class has one graph for each pair of circumstances: rollout or replay, first, middle or last block, LoRA on
    or off, the first shape or any. Beyond a limit, 8 by default, torch silently goes on uncompiled, so it is raised.

    Args:
        network: of diffusers or transformers.
        settings: of `torch.compile`: its backend and its mode.
        is_hooked: whether hooks that must not be compiled will be put around the blocks.

    Raises:
        ValueError: the network names no such blocks.
    """
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or []
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    if not blocks:
        raise ValueError(
            f"{type(network).__name__} does not declare repeated blocks to compile; set torch_compile=False."
        )
    dynamo = torch._dynamo.config
    dynamo.cache_size_limit = max(dynamo.cache_size_limit, GRAPHS)
    for block in blocks:
        if is_hooked:
            block.forward = torch.compile(block.forward, **settings)
        else:
            block.compile(**settings)
