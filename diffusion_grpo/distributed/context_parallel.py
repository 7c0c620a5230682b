"""Context parallelism: the sequence of each sample is spread over a group of processes, for videos too long for one.

All other code sees a group as one process: its processes get the same samples, seeds and rewards.
"""

import dataclasses
import logging

import torch
from diffusers import ContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..policy.networks import replace_attribute

RING_BACKEND = "_native_cudnn"  # torch's own: returns the log-sum-exps that join the parts of a ring


@dataclasses.dataclass
class ContextGroups:
    """Groups of processes that share the sequence of each sample; by default, each has one process."""

    size: int = 1
    processes: int = 1
    process: int = 0
    is_ring: bool = False

    def __post_init__(self):
        self.count = self.processes // self.size  # of groups; each has samples of its own
        self.index = self.process // self.size  # of this process's group
        self.is_first = self.process % self.size == 0  # then this process writes the samples of its group


def spread_over_context(networks: list[nn.Module], groups: ContextGroups, device: torch.device) -> None:
    """Let each network's attention run over a group of processes; gradients are of a process's own tokens."""
    size, is_ring = groups.size, groups.is_ring
    parts = [network.values() if isinstance(network, nn.ModuleDict) else [network] for network in networks]
    networks = [network for part in parts for network in part]
    for network in networks:
        check_context(network, size, is_ring, device)
    shape = (groups.count, size, 1) if is_ring else (groups.count, 1, size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]
    for network in networks:
        # ring attention (https://huggingface.co/papers/2310.01889) passes keys and values on, Ulysses
        # (https://huggingface.co/papers/2309.14509) exchanges heads for tokens
        if is_ring:
            network.set_attention_backend(RING_BACKEND)
        config = ContextParallelConfig(ring_degree=shape[1], ulysses_degree=shape[2], mesh=mesh)
        # diffusers 0.42 divides by the number of accelerators, and warns for every network that this is experimental
        count = max(1, torch.accelerator.device_count())
        with (
            replace_attribute(torch.accelerator, "device_count", lambda count=count: count),
            replace_attribute(logging.getLogger("diffusers.models.modeling_utils"), "disabled", True),
        ):
            network.enable_parallelism(config=config)


def check_context(network: nn.Module, size: int, is_ring: bool, device: torch.device) -> None:
    """Refuse a network whose sequence cannot be spread."""
    name = type(network).__name__
    if getattr(network, "_cp_plan", None) is None:
        raise ValueError(
            f"context_parallel_size={size}: diffusers has no plan for splitting the sequence of {name}; leave the "
            "setting out, and shard the weights instead (DeepSpeed) or make shorter videos."
        )
    if is_ring and device.type != "cuda":
        raise ValueError("context_parallel_type='ring' needs cuDNN's attention and thus a CUDA device; use ulysses.")
    heads = getattr(network.config, "num_attention_heads", None)
    if not is_ring and heads is not None and heads % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {heads} attention heads of {name}, which Ulysses "
            "distributes over the processes; choose a divisor, or context_parallel_type='ring'."
        )
