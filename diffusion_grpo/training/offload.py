"""Keep frozen parts of a pipeline off the accelerator while the trained network runs.

Text encoders, image encoders and the VAE stay in CPU memory. They move to the accelerator when they are called, and
leave it when the network is called. diffusers knows which ones may move (`model_cpu_offload_seq`) and how to bring
them back.
"""

from typing import Any

import torch
from accelerate.hooks import CpuOffload, add_hook_to_module
from diffusers import DiffusionPipeline
from torch import nn


def place_frozen_parts(
    pipe: DiffusionPipeline, networks: list[nn.Module], device: torch.device, offload_frozen: str | None
) -> "FrozenOffload | None":
    """Move all parts of a pipeline but the networks to a device, or offload them until they are needed."""
    if offload_frozen is not None:
        return FrozenOffload(pipe, networks, device)
    for part in pipe.components.values():
        if isinstance(part, nn.Module) and not any(part is network for network in networks):
            part.to(device)
    return None


class FrozenOffload:
    """Offloading that keeps a pipeline's frozen parts in CPU memory except while they are used."""

    # a part called with the network at every step (a ControlNet) is not in diffusers' sequence, and stays

    def __init__(self, pipe: DiffusionPipeline, networks: list[nn.Module], device: str | torch.device):
        if not pipe.model_cpu_offload_seq:
            raise ValueError(
                f"offload_frozen: {type(pipe).__name__} does not say which of its parts may leave the accelerator (it "
                "has no model_cpu_offload_seq); leave offload_frozen out."
            )
        movable = set(pipe.model_cpu_offload_seq.split("->")) - set(pipe._exclude_from_cpu_offload)
        self._pipe = pipe
        self.hooks: dict[str, OnDemandHook] = {}
        for name, part in pipe.components.items():
            if not isinstance(part, nn.Module) or any(part is network for network in networks):
                continue
            if name in movable:
                self.hooks[name] = OnDemandHook(device)
                add_hook_to_module(part, self.hooks[name])  # moves the part to the CPU
            else:
                part.to(device)
        for network in networks:
            network.register_forward_pre_hook(self._leave)

    @property
    def present(self) -> list[str]:
        """Names of the movable parts that are on the accelerator."""
        return [name for name, hook in self.hooks.items() if hook.is_present]

    def _leave(self, *_: Any) -> None:
        for name in self.present:
            self.hooks[name].init_hook(getattr(self._pipe, name))


class OnDemandHook(CpuOffload):
    """accelerate's hook, called before any method of a diffusers part, that remembers where the part is."""

    is_present = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.is_present = False
        return super().init_hook(module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self.is_present:
            self.is_present = True
            module.to(self.execution_device)
        return args, kwargs
