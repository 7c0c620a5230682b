"""Compile the repeated blocks of a network, for rollouts and updates alike."""

from typing import Any

import torch
from torch import nn

GRAPHS = 64  # largest number of graphs for the blocks of one class


def compile_blocks(network: nn.Module, settings: dict[str, Any], is_hooked: bool = False) -> None:
    """Compile the repeated blocks, which share their graphs; the network around them is not compiled.

    A block class gets one graph for each combination of rollout or replay; first, middle or last block; LoRA on or
    off; first or any shape. Beyond a limit, 8 by default, torch silently stops compiling, so the limit is raised.
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
