"""The frozen reference: the base model of a LoRA, or a copy of the LoRA or the network; the latter two may move."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..distributed.backend import DistributedBackend
from ..distributed.late_weights import copy_held
from ..distributed.trained_weights import TrainedWeights
from ..policy.base import Policy
from ..policy.token_process import TokenDistribution, TokenTrajectory
from ..policy.trajectory import CleanSamples, Denoised, Finished, StepDistribution, Trajectory
from ..weights.lora import reference_adapters, reference_names


class Reference:
    """The policy's networks with the weights that the run began with, or that were synchronised since."""

    def __init__(self, policy: Policy, model: nn.Module, backend: DistributedBackend):
        self._policy, self._model, self._backend = policy, model, backend

    @torch.no_grad()
    def replay(
        self,
        inputs: dict[str, Any],
        trajectory: Trajectory | TokenTrajectory,
        step: int,
        sources: Tensor | None = None,
    ) -> StepDistribution | TokenDistribution:
        """Score one recorded step under the reference; see [`~diffusion_grpo.policy.rollout.replay`]."""
        with self._load():
            return self._policy.replay(inputs, trajectory, step, self._forwards(), sources)

    @torch.no_grad()
    def denoise(self, inputs: dict[str, Any], samples: CleanSamples, step: int) -> Denoised:
        """Return the clean samples that the reference predicts from re-noised ones."""
        with self._load():
            return self._policy.denoise(inputs, samples, step, self._forwards())

    @torch.no_grad()
    def finish(self, inputs: dict[str, Any], samples: CleanSamples) -> Finished:
        """Return what the reference's last steps make of the latents that entered them; nothing is decoded."""
        with self._load():
            return self._policy.finish(inputs, samples, self._forwards(), is_decoded=False)


class AdapterReference(Reference):
    """The reference of a LoRA: the same network with the adapter switched off, or with a copy of it."""

    module: None = None

    @property
    def weights(self) -> TrainedWeights:
        """The parameters of the adapter's copy that correspond to the policy's trained ones."""
        return self._backend.reference_weights(self._model, reference_names(self._model))

    def shard(self) -> None:
        """Do nothing: the reference shares the network of the policy."""

    def _load(self) -> contextlib.AbstractContextManager[None]:
        return disable_adapters(self._model)

    def _forwards(self) -> None:
        """Return None: the policy's own."""


class CopiedReference(Reference):
    """The reference of full training: a frozen copy of the network."""

    def __init__(
        self, policy: Policy, model: nn.Module, backend: DistributedBackend, device: torch.device, is_offloaded: bool
    ):
        super().__init__(policy, model, backend)
        self._device, self._is_offloaded = device, is_offloaded
        self.module = copy_held(model).requires_grad_(False).eval()
        self.module.to("cpu" if is_offloaded or backend.shards_weights else device)

    @property
    def plain_module(self) -> nn.Module:
        """The copy without the engine that wraps it."""
        return self._backend.accelerator.unwrap_model(self.module)

    @property
    def weights(self) -> TrainedWeights:
        """The parameters of the copy that correspond to the policy's trained ones."""
        names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        return self._backend.reference_weights(self.plain_module, names)

    def shard(self) -> None:
        """Shard the copy across the processes, if the policy is sharded."""
        self.module = self._backend.shard_reference(self.module, self._is_offloaded)

    @contextlib.contextmanager
    def _load(self) -> Iterator[None]:
        """Move the copy to the device inside this context, if it is kept in CPU memory."""
        is_moved = self._is_offloaded and not self.weights.is_sharded
        if is_moved:
            self.module.to(self._device)
        try:
            yield
        finally:
            if is_moved:
                self.module.to("cpu")

    def _forwards(self) -> list[Callable]:
        """Return the callable of each network: the module itself, whose hooks gather sharded weights."""
        model = self.plain_module
        return list(model.values()) if isinstance(model, nn.ModuleDict) else [model]


@contextlib.contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the LoRA off inside this context, or use the reference's copy of it."""
    with contextlib.ExitStack() as stack:
        for part in model.values() if isinstance(model, nn.ModuleDict) else [model]:
            if not isinstance(part, PeftModel):
                raise TypeError(f"{type(part).__name__} has no adapter to switch off.")
            stack.enter_context(reference_adapters(part))
        yield
