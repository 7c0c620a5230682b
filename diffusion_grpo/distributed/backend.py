"""The interface between a run and its processes. The base class serves a single process and DDP.

[`~diffusion_grpo.distributed.zero.DeepSpeedBackend`] and [`~diffusion_grpo.distributed.fsdp.FSDP2Backend`] serve
sharded training. Only this package checks for ZeRO stages or FSDP. `NetworkPasses` calls networks outside updates.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..policy.networks import NetworkAccess, replace_attribute
from . import late_weights
from .checkpoints import restore_optimizer
from .collectives import EqualCalls
from .context_parallel import ContextGroups
from .failure import ProcessGroupMonitor
from .trained_weights import TrainedWeights


class DistributedBackend:
    """One process, or several under DDP; made before the model, and later bound to the accelerator."""

    accelerator: Accelerator  # once bound
    sharding: str = "ddp"  # what divides the training state: "ddp" (nothing), "zero1" to "zero3" or "fsdp2"
    shards_weights: bool = False  # whether processes keep shares of the trained weights, in files until then
    passes_together: bool = False  # whether all call the network equally often, also outside updates
    _reduces_every_pass = False  # whether every backward pass of an update is a collective
    _meets_in_calls = False  # whether a call of a network is a collective now

    def __init__(self, half: torch.dtype | None, groups: ContextGroups):
        self._half, self.groups = half, groups
        self._calls: EqualCalls | None = None
        self._weights: TrainedWeights | None = None
        self._unwrapped: tuple[nn.Module | None, nn.Module | None] = (None, None)  # a model, with and without wrapper

    # Set-up

    def bind(self, accelerator: Accelerator, model: nn.Module, networks: list[nn.Module]) -> None:
        """Take the accelerator that `Trainer` has made, and configure it for the model and its trained networks."""
        self.accelerator = accelerator
        # DDP would send frozen weights, which are the same everywhere; it cannot send quantised or offloaded ones
        named = [*model.named_parameters(), *model.named_buffers()]
        frozen = [name for name, tensor in named if not tensor.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)

    def check_run(self, component: tuple[str, ...], *, processes: int, own_steps: bool, draws_tokens: bool) -> None:
        """Refuse a run that these processes cannot train."""

    def network_access(self, model: nn.Module) -> NetworkAccess:
        """Return how the policy may call the networks of a model."""
        context = contextlib.nullcontext if self._half is None else self._autocast
        access = NetworkAccess(forward_context=context, casts_outputs=self._half is not None)
        if not self.shards_weights:
            return access
        self._calls = EqualCalls(self._exchange)
        return dataclasses.replace(access, hook=self._calls, skips_hooks=True)

    def _exchange(self, action: int) -> list[int]:
        """Return what each process does next, if calls of the network are collectives."""
        if not self._meets_in_calls:
            return [action]
        return self.accelerator.gather(torch.tensor([action], device=self.accelerator.device)).tolist()

    def _autocast(self) -> contextlib.AbstractContextManager:
        return self.accelerator.autocast()

    def trained_weights(self, model: nn.Module, take_turns: bool) -> TrainedWeights:
        """Return the trained parameters; with `take_turns`, they belong to experts that share the steps."""
        self._weights = TrainedWeights([p for p in model.parameters() if p.requires_grad], take_turns)
        return self._weights

    def wrap_prepare(self, model: nn.Module) -> contextlib.AbstractContextManager:
        """Return a context for accelerate's `prepare` of the model."""
        return contextlib.nullcontext()

    # A reference: a frozen copy of the model, or of its LoRA

    def shard_reference(self, reference: nn.Module, is_offloaded: bool) -> nn.Module:
        """Shard a reference over the processes like the model; return the module to call for its passes."""
        return reference

    def reference_weights(self, model: nn.Module, names: list[str]) -> TrainedWeights:
        """Return the named parameters of a model, which are frozen."""
        named = dict(model.named_parameters())
        return TrainedWeights([named[name] for name in names])

    # Passes of the network outside of updates

    @contextlib.contextmanager
    def gather_for_passes(self, networks: list[nn.Module], reference: nn.Module | None) -> Iterator[Callable]:
        """Make the networks callable outside an update, gathering sharded weights first."""
        yield lambda method, *args: method(*args)

    def _place(self, networks: list[nn.Module]) -> None:
        """Move networks, which are where they were loaded before training, to the accelerator."""
        for network in [] if self._weights.is_sharded else networks:
            late_weights.fill(network.parameters())
            network.to(self.accelerator.device)

    def equalize(self, passes: list[Any], in_update: bool = False) -> list[tuple[Any, bool]]:
        """Repeat the last pass until every process has as many; each comes with whether it is no repetition."""
        missing = 0
        if self._reduces_every_pass if in_update else self.passes_together:
            count = torch.tensor([len(passes)], device=self.accelerator.device)
            missing = int(self.accelerator.gather(count).max()) - len(passes)
        return [(one, True) for one in passes] + [(one, False) for one in passes[-1:]] * missing  # there may be none

    # Updates

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Change an optimizer before an engine takes it: let it skip idle ones of networks that take turns."""
        if isinstance(model, nn.ModuleDict):
            networks = list(model.values())

            def skip(*_: Any) -> None:  # no earlier: a `GradScaler` needs at least one gradient
                for network in self._find_idle(networks):
                    network.zero_grad(set_to_none=True)

            optimizer.register_step_pre_hook(skip)

    def _find_idle(self, networks: list[nn.Module]) -> list[nn.Module]:
        """Return the networks whose gradient, which was summed over the processes, is 0."""
        gradients = ((network, [p.grad for p in network.parameters() if p.grad is not None]) for network in networks)
        return [network for network, tensors in gradients if not any(gradient.any() for gradient in tensors)]

    def begin_update(self, optimizer: Any) -> None:
        """Clear gradients that the last update left behind."""

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module, is_last: bool) -> Iterator[None]:
        """Only accumulate gradients inside, unless `is_last`: DDP does not reduce them, DeepSpeed does not step."""
        if is_last:
            yield
            return
        state = self.accelerator.gradient_state
        synced = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(synced)

    def forward(self, model: nn.Module, method: Callable[..., Tensor], *args: Any) -> Tensor:
        """Compute a loss by `method` inside the forward of the engine that wraps the model, so that its hooks run."""

        def compute(*args: Any) -> Tensor:
            return method(*args) + self._calls.take_spare()

        if self._unwrapped[0] is not model:  # cached: accelerate reads package metadata in each call
            self._unwrapped = (model, self.accelerator.unwrap_model(model))
        return redirect(model, self._unwrapped[1], method if self._calls is None else compute, *args)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    # Checkpoints

    @property
    def mode(self) -> dict[str, Any]:
        """How weights and optimizer state are kept, as recorded in checkpoints."""
        return {"processes": self.accelerator.num_processes, "sharding": self.sharding}

    def save_optimizer(self, folder: Path, model: nn.Module, optimizer: Any, is_writer: bool) -> bool:
        """Write the optimizer's state if it is sharded; every process calls this."""
        return False

    def load_optimizer(self, folder: Path, model: nn.Module, optimizer: Any) -> bool:
        """Read the optimizer's state if it is sharded now or was when it was written."""
        return restore_optimizer(folder, model, optimizer)

    # Collectives

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the (processes x rows, ...) rows of all processes, or of the first in each context-parallel group."""
        gathered, groups = self.accelerator.gather(tensor), self.groups
        if groups.size == 1:
            return gathered
        return gathered.view(groups.processes, *tensor.shape)[:: groups.size].flatten(0, 1)


class NetworkPasses:
    """Runs methods that call the network outside an update, gathering sharded weights first."""

    def __init__(
        self,
        backend: DistributedBackend,
        monitor: ProcessGroupMonitor,
        networks: list[nn.Module],
        reference: Callable[[], nn.Module | None],
    ):
        self._backend, self._monitor, self._networks, self._reference = backend, monitor, networks, reference

    def __call__(self, method: Callable, *args: Any) -> Any:
        backend = self._backend
        meets = backend.passes_together or backend.groups.size > 1  # in collectives: waiting for one that failed
        watch = self._monitor.propagate_errors() if meets else contextlib.nullcontext()
        with watch, backend.gather_for_passes(self._networks, self._reference()) as run:
            return run(method, *args)


def redirect(wrapper: nn.Module, model: nn.Module, method: Callable, *args: Any) -> Any:
    """Call `method` inside the forward of `wrapper` (DDP, DeepSpeed), so that the wrapper's hooks run."""
    if wrapper is model:
        return method(*args)
    real = model.forward

    def detour(*given: Any) -> Any:
        with replace_attribute(model, "forward", real):
            return method(*given)

    with replace_attribute(model, "forward", detour):
        return wrapper(*args)
