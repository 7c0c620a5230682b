"""Networks that take turns over the steps: an update leaves networks unchanged that it did not train."""

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class IdleNetworks:
    """Makes an optimizer skip the networks that no process has trained in an update.

    DeepSpeed gives the optimizer zeros for weights without a gradient, and Adam's momentum and the weight decay would
    change these weights. So each network gets parameter groups of its own, and those of an idle network have no
    gradients while the optimizer steps.
    """

    def __init__(self, networks: nn.ModuleDict, optimizer: torch.optim.Optimizer, device: torch.device):
        self._count, self._device = len(networks), device
        self._trained: Tensor | None = None  # 1 for each network with a gradient in this update
        self._is_agreed = False
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        self._watched: list[torch.optim.Optimizer] = []
        self._handles: list[RemovableHandle] = []
        numbers: dict[int, int] = {}
        for number, network in enumerate(networks.values()):
            for parameter in network.parameters():
                if parameter.requires_grad:
                    numbers[id(parameter)] = number
                    self._handles.append(parameter.register_hook(functools.partial(self._note, number)))
        _split_groups(optimizer, numbers)

    def begin_update(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Forget which networks the last update trained."""
        self._trained, self._is_agreed = torch.zeros(self._count, device=self._device), False
        for optimizer in optimizers:
            if not any(optimizer is watched for watched in self._watched):
                self._watched.append(optimizer)
                self._handles.append(optimizer.register_step_pre_hook(self._hold_back))
                self._handles.append(optimizer.register_step_post_hook(self._give_back))

    def close(self) -> None:
        """Remove all hooks from the networks and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], []

    def _note(self, number: int, gradient: Tensor) -> None:
        if self._trained is not None:  # within an update
            self._trained[number] = torch.maximum(self._trained[number], gradient.any().to(self._trained))

    def _hold_back(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Remove the gradients of idle networks; the first step of an update is a collective."""
        if not self._is_agreed:
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(self._trained, torch.distributed.ReduceOp.MAX)
            self._is_agreed = True
        trained = self._trained.tolist()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not trained[group["network"]] and parameter.grad is not None:
                    self._held.append((parameter, parameter.grad))
                    parameter.grad = None

    def _give_back(self, *arguments: Any) -> None:
        """Put the gradients back, since an engine that offloads them keeps writing to the same memory."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held = []


def _split_groups(optimizer: torch.optim.Optimizer, numbers: dict[int, int]) -> None:
    """Split parameter groups by network, and record the number of the network in each group."""
    for group in list(optimizer.param_groups):
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(numbers[id(parameter)], []).append(parameter)
        for turn, (number, own) in enumerate(sorted(parts.items())):
            if turn == 0:
                group.update(params=own, network=number)
            else:
                optimizer.add_param_group({**group, "params": own, "network": number})
