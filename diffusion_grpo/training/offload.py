"""Keep frozen parts of a pipeline off the accelerator while the trained network works.

Text encoders, image encoders and the VAE wait in CPU memory, come when they are called, and leave when the network is.
diffusers knows which ones may move (`model_cpu_offload_seq`) and how to call them back.
"""

from typing import Any

import torch
from accelerate.hooks import CpuOffload, add_hook_to_module
from diffusers import DiffusionPipeline
from torch import nn

from ..distributed.backend import DistributedBackend


def place_pipeline(
    pipe: DiffusionPipeline,
    model: nn.Module,
    networks: list[nn.Module],
    backend: DistributedBackend,
    *,
    device: torch.device,
    offload_frozen: str | None,
    swaps_blocks: bool,
) -> "FrozenOffload | None":
    """Move the pipeline to the training device, except what waits elsewhere until it is needed.

    Args:
        pipe: the pipeline.
        model: what is trained, before an engine wraps it.
        networks: of the pipeline, those that are trained.
        backend: whose engine may take the networks from where they are.
        device: of this process.
        offload_frozen: the setting of that name.
        swaps_blocks: whether the networks' frozen weights come and go by themselves (`group_offload`).

    Returns:
        what moves the frozen parts; None without `offload_frozen`.
    """
    if swaps_blocks:
        backend.leave_frozen_weights(model)
    if offload_frozen is not None:
        return FrozenOffload(pipe, networks, device)
    if not swaps_blocks and not backend.leaves_networks_in_place:
        pipe.to(device)
        return None
    for part in pipe.components.values():
        if isinstance(part, nn.Module) and not any(part is network for network in networks):
            part.to(device)
    return None


class FrozenOffload:
    """Keeps a pipeline's frozen parts in CPU memory except while they are used.

    What the pipeline calls beside the network at every step (a ControlNet) is in no such sequence and stays. A part
    that takes the place of another later takes over its hook.

    Args:
        pipe: on any device; afterwards what stays is on `device`, the networks are left where they are.
        networks: those that are trained.
        device: where the frozen parts work.

    Raises:
        ValueError: the pipeline does not say which of its parts may leave.
    """

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
                add_hook_to_module(part, self.hooks[name])  # moves it to the CPU
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
    """accelerate's hook, which diffusers' parts call before any of their methods; it remembers where they are."""

    is_present = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.is_present = False
        return super().init_hook(module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        if not self.is_present:
            self.is_present = True
            module.to(self.execution_device)
        return args, kwargs
