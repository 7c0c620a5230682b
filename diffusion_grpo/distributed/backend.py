"""The interface between a run and its processes. The base class serves a single process and DDP.

[`~diffusion_grpo.distributed.deepspeed.DeepSpeedBackend`] and [`~diffusion_grpo.distributed.fsdp.FSDP2Backend`] serve
sharded training. Nothing outside this package checks for a ZeRO stage or for FSDP.
"""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..policy.network_gate import NetworkAccess
from ..policy.quantized import list_quantized_weights
from .collectives import gather_json
from .context_parallel import ContextGroups
from .forward_redirection import redirect
from .sharded_checkpoints import restore_optimizer
from .weights import TrainedWeights


class DistributedBackend:
    """One process, or several under DDP.

    It is made before the model. The accelerator, and the engine that wraps the model for training, are bound to it as
    soon as `Trainer` has made them.
    """

    name = "DDP"

    def __init__(self, half: torch.dtype | None, groups: ContextGroups):
        self.half, self.groups = half, groups
        self._accelerator: Accelerator | None = None
        self._engine: nn.Module | None = None
        self._unwrapped: tuple[nn.Module | None, nn.Module | None] = (None, None)  # a model, with and without wrapper

    # Set-up

    def bind(self, accelerator: Accelerator, networks: list[nn.Module]) -> None:
        """Take the accelerator that `Trainer` has made, and configure it for the trained networks."""
        self._accelerator = accelerator

    def check_start(self) -> None:
        """Check that training can start."""

    def set_engine(self, engine: nn.Module) -> None:
        """Take the engine that wraps the model for training, or the model itself before there is one."""
        self._engine = engine

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator, once bound."""
        return self._accelerator

    @property
    def trainer_attributes(self) -> dict[str, Any]:
        """Attributes that `Trainer` set before `bind` and that now need other values."""
        return {}

    @property
    def loads_before_engine(self) -> bool:
        """Whether a checkpoint's weights are read before an engine wraps the model instead of afterwards."""
        return False

    @property
    def leaves_networks_in_place(self) -> bool:
        """Whether the trained networks stay where they were loaded until an engine takes them."""
        return False

    def check_quantization(self, methods: Collection[str]) -> None:
        """Refuse a quantised network that these processes cannot train a LoRA on."""

    def check_optimizer(self, name: str) -> None:
        """Refuse an optimizer that cannot update weights as these processes hold them."""

    def check_run(self, component: tuple[str, ...], *, processes: int, own_steps: bool, draws_tokens: bool) -> None:
        """Refuse a run that these processes cannot train."""

    def check_group_offload(self) -> None:
        """Refuse group offloading, which moves frozen weights in and out of the accelerator."""

    def leave_frozen_weights(self, model: nn.Module) -> None:
        """Let an engine skip frozen weights and buffers, which may be on another device than the trained weights."""
        named = [*model.named_parameters(), *model.named_buffers()]
        frozen = [name for name, tensor in named if not tensor.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)

    # Loading

    def read_networks(self, names: Collection[str]) -> contextlib.AbstractContextManager:
        """Return a context for loading a pipeline of which the networks of these names are trained.

        Backends that shard weights leave them in their files until then, so that a machine holds them once. Here each
        process holds them.
        """
        return contextlib.nullcontext()

    def cast(self, network: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Cast a network's weights, all of which are trained, in place."""
        return network if network.dtype == dtype else network.to(dtype)

    def copy_model(self, model: nn.Module) -> nn.Module:
        """Copy a model that no engine has wrapped yet."""
        return copy.deepcopy(model)

    def fill_config(self, model: nn.Module) -> None:
        """Fill in those parts of a configuration that depend on the model.

        DDP must ignore quantised weights, which it cannot send. All processes have made the same ones anyway.
        """
        skipped = list_quantized_weights(model)
        if skipped:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, skipped)

    def network_access(self, model: nn.Module) -> NetworkAccess:
        """Return how the policy may call the networks of a model."""
        return NetworkAccess(forward_context=self._autocast, casts_outputs=self.half is not None)

    def _autocast(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.half is None else self.accelerator.autocast()

    def trained_weights(self, model: nn.Module, take_turns: bool) -> TrainedWeights:
        """Return the trained parameters; with `take_turns`, they belong to experts that share the steps."""
        return TrainedWeights([p for p in model.parameters() if p.requires_grad], take_turns)

    def wrap_prepare(self, model: nn.Module) -> contextlib.AbstractContextManager:
        """Return a context for accelerate's `prepare` of the model."""
        return contextlib.nullcontext()

    # A reference: a frozen copy of the model

    @property
    def moves_references(self) -> bool:
        """Whether a reference in CPU memory is moved to the accelerator and back as a whole."""
        return True

    def reference_waits_on_cpu(self, is_offloaded: bool) -> bool:
        """Whether a reference starts out in CPU memory."""
        return is_offloaded

    def shard_reference(self, reference: nn.Module, is_offloaded: bool) -> nn.Module:
        """Shard a reference over the processes like the model; return the module to call for its passes."""
        return reference

    def reference_weights(self, reference: nn.Module, model: nn.Module) -> TrainedWeights:
        """Return those parameters of a reference that the model trains."""
        pairs = zip(reference.parameters(), model.parameters(), strict=True)
        return TrainedWeights([ref for ref, parameter in pairs if parameter.requires_grad])

    # Passes of the network outside of updates

    @property
    def passes_together(self) -> bool:
        """Whether all processes must call the network equally often, also outside updates."""
        return False

    @contextlib.contextmanager
    def gather_for_passes(self, networks: list[nn.Module], reference: nn.Module | None) -> Iterator[Callable]:
        """Make the networks callable outside an update, gathering sharded weights first."""
        yield lambda method, *args: method(*args)

    @property
    def meets_in_passes(self) -> bool:
        """Whether passes outside updates contain collectives, in which processes would wait for one that failed."""
        return self.groups.size > 1

    def equalize_outside_updates(self, passes: list[Any]) -> list[tuple[Any, bool]]:
        """As `equalize`, for passes without gradient."""
        return self._equalize(passes, self.passes_together)

    # Passes of an update

    @property
    def reduces_every_pass(self) -> bool:
        """Whether every backward pass of an update is a collective, so that all processes need the same number."""
        return False

    def equalize(self, passes: list[Any]) -> list[tuple[Any, bool]]:
        """Repeat the last pass until every process has as many passes as the process with the most.

        This is a collective if processes must call the network together.
        """
        return self._equalize(passes, self.reduces_every_pass)

    def _equalize(self, passes: list[Any], is_together: bool) -> list[tuple[Any, bool]]:
        missing = 0
        if is_together:
            count = torch.tensor([len(passes)], device=self.accelerator.device)
            missing = int(self.accelerator.gather(count).max()) - len(passes)
        return [(one, True) for one in passes] + [(passes[-1], False)] * missing

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Change an optimizer before an engine takes it: let it skip networks whose gradient is 0.

        Only networks that take turns are skipped. Gradients are dropped no earlier than in the step, because a
        `GradScaler` needs at least one.
        """
        if isinstance(model, nn.ModuleDict):
            networks = list(model.values())
            optimizer.register_step_pre_hook(lambda *_: drop_gradients(self.find_idle(networks)))

    def find_idle(self, networks: list[nn.Module]) -> list[nn.Module]:
        """Return the networks whose gradient is 0: no process trains them in this update, or nothing is to be learned.

        Gradients that were summed over the processes are equal on all of them, so all find the same networks.
        """
        return [network for network in networks if not any(map(has_gradient, network.parameters()))]

    def begin_update(self, optimizer: Any) -> None:
        """Clear gradients that the last update left behind."""

    def begin_micro_batch(self, model: nn.Module) -> None:
        """Get the engine ready for the passes of one micro-batch."""

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

    def forward(self, model: nn.Module, method: Callable, *args: Any) -> Any:
        """Call `method` inside the forward of the engine that wraps the model, so that its hooks run."""
        if self._unwrapped[0] is not model:  # cached: accelerate reads package metadata in each call
            self._unwrapped = (model, self.accelerator.unwrap_model(model))
        return redirect(model, self._unwrapped[1], method, *args)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        self.accelerator.backward(loss)

    def finish_micro_batch(self, model: nn.Module, weights: TrainedWeights) -> None:
        """Do what takes all processes after the last pass of a micro-batch."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether the engine updates the weights inside the last backward pass."""
        return False

    # Checkpoints

    @property
    def mode(self) -> dict[str, int]:
        """How weights and optimizer state are kept, as recorded in checkpoints."""
        return {"processes": self.accelerator.num_processes, "zero_stage": 0, "fsdp": 0}

    def save_optimizer(self, folder: Path, model: nn.Module, optimizer: Any, is_writer: bool) -> bool:
        """Write the optimizer's state if it is sharded; every process calls this."""
        return False

    def keeps_schedule(self, schedule: Any) -> bool:
        """Whether `save_optimizer` writes the learning rate's schedule too, and `load_optimizer` reads it."""
        return False

    def load_optimizer(self, folder: Path, model: nn.Module, optimizer: Any) -> bool:
        """Read the optimizer's state if it is sharded now or was when it was written."""
        return restore_optimizer(folder, model, optimizer)

    # Collectives

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the (processes x rows, ...) rows of all processes, or of the first in each context-parallel group."""
        return self.groups.first_of_each(self.accelerator.gather(tensor))

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return self.accelerator.reduce(tensor, "sum")

    def gather_json(self, own: Any) -> list[Any]:
        """Return what each process has: numbers, strings, lists, and mappings from strings."""
        return gather_json(self.accelerator, own)


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether the gradient of a parameter is not 0."""
    return parameter.grad is not None and bool(parameter.grad.any())


def drop_gradients(networks: list[nn.Module]) -> None:
    """Drop the gradients of networks, so that an optimizer skips them."""
    for network in networks:
        network.zero_grad(set_to_none=True)
