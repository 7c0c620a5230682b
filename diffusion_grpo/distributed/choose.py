"""Choose the backend of a run: the only place that makes one."""

import os

import torch

from ..config.settings import DiffusionGRPOConfig
from .backend import DistributedBackend
from .context_parallel import ContextGroups
from .fsdp import FSDP2Backend
from .zero import DeepSpeedBackend, hide_deepspeed


def choose_backend(args: DiffusionGRPOConfig) -> DistributedBackend:
    """Make the backend that the settings, or the launcher, ask for."""
    if args.n_gpu > 1:
        raise ValueError("Several GPUs need a launcher: start with `accelerate launch`, or make one GPU visible.")
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    is_ring = args.context_parallel_type == "ring"
    groups = ContextGroups(args.context_parallel_size, args.world_size, args.process_index, is_ring)
    if args.deepspeed_plugin is not None:
        hide_deepspeed()
        return DeepSpeedBackend(half, groups, args.deepspeed_plugin, args.ds3_gather_for_generation)
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":  # by the launcher
        return FSDP2Backend(half, groups, args.fsdp_plugin_args, args.fsdp_gather_for_generation)
    return DistributedBackend(half, groups)
