"""Choose the backend of a run: the only place that checks which engine shards the weights."""

from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin

from .backend import DistributedBackend
from .context_parallel import ContextGroups
from .fsdp import FSDP2Backend, wants_fsdp
from .zero import DeepSpeedBackend, hide_deepspeed


def make_backend(
    half: torch.dtype | None,
    groups: ContextGroups,
    *,
    processes: int,
    deepspeed_plugin: DeepSpeedPlugin | None,
    ds3_gather_for_generation: bool,
    fsdp: Any,
    fsdp_plugin_args: dict[str, Any] | None,
    fsdp_gather_for_generation: bool,
) -> DistributedBackend:
    """Make the backend that the settings, or the launcher, ask for."""
    if deepspeed_plugin is not None:
        hide_deepspeed()
        return DeepSpeedBackend(half, groups, deepspeed_plugin, ds3_gather_for_generation)
    if wants_fsdp(fsdp):
        return FSDP2Backend(half, groups, fsdp_plugin_args, fsdp_gather_for_generation, processes)
    return DistributedBackend(half, groups)
