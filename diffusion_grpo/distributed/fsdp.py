"""FSDP2: each process keeps a share of every weight, and gathers whole weights when they are needed.

torch's `fully_shard` is applied to the network and to its repeated blocks, on CPUs too, by a function that accelerate
calls in place of its own. Sharded weights have rules of their own: who calls the network, when its units are gathered,
and how whole tensors are read and written.
"""

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from ..policy.networks import replace_attribute
from . import late_weights, refusals
from .backend import DistributedBackend
from .checkpoints import save_shards
from .context_parallel import ContextGroups
from .trained_weights import TrainedWeights, as_dtensor, as_shard, is_sharded


class FSDP2Backend(DistributedBackend):
    """Several processes under FSDP2; [`DistributedBackend`] says what each method is for."""

    sharding = "fsdp2"
    shards_weights = passes_together = _reduces_every_pass = True

    def __init__(
        self, half: torch.dtype | None, groups: ContextGroups, plugin_args: dict[str, Any] | None, keeps_gathered: bool
    ):
        super().__init__(half, groups)
        self._plugin_args, self._keeps_gathered = plugin_args or {}, keeps_gathered
        self._idle: list[nn.Module] = []  # networks without a gradient in this update
        _check_plugin(self._plugin_args)

    def bind(self, accelerator: Accelerator, model: nn.Module, networks: list[nn.Module]) -> None:
        super().bind(accelerator, model, networks)
        activate(accelerator, self._plugin_args)
        configure_plugin(accelerator.state.fsdp_plugin, networks)

    def check_run(self, component: tuple[str, ...], *, processes: int, own_steps: bool, draws_tokens: bool) -> None:
        if draws_tokens:
            raise ValueError(
                f"FSDP does not train {', '.join(component)}: a language model writes token by token, and "
                "would gather its weights again for each token; start without FSDP (ZeRO-3 gathers them once)."
            )
        if len(component) > 1 and own_steps:
            refusals.refuse_turns(component, *refusals.OWN_STEPS)

    def wrap_prepare(self, model: nn.Module) -> contextlib.AbstractContextManager:
        return replace_attribute(accelerate.accelerator, "fsdp2_prepare_model", shard_model)

    @property
    def _meets_in_calls(self) -> bool:
        return self._weights.is_sharded

    def trained_weights(self, model: nn.Module, take_turns: bool) -> TrainedWeights:
        self._weights = ShardedWeights(model, take_turns=take_turns)
        return self._weights

    # A reference

    def shard_reference(self, reference: nn.Module, is_offloaded: bool) -> nn.Module:
        if not is_sharded(reference):
            shard_reference(reference, self.accelerator, is_offloaded)
        return reference

    def reference_weights(self, model: nn.Module, names: list[str]) -> TrainedWeights:
        return ShardedWeights(model, names)

    # Passes

    @contextlib.contextmanager
    def gather_for_passes(self, networks: list[nn.Module], reference: nn.Module | None) -> Iterator[Callable]:
        self._place(networks)
        with gather_units(self._weights.model, self.accelerator, self._keeps_gathered):
            yield lambda method, *args: method(*args)

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module, is_last: bool) -> Iterator[None]:
        networks = split(model)
        for network in networks:  # reducing only in the last pass, as in Trainer's no_sync, keeps whole gradients
            network.set_requires_gradient_sync(True)
        yield
        if is_last and self._weights.take_turns:  # a process may have a share of zeros only
            is_trained = [float(any(map(has_share_of_gradient, network.parameters()))) for network in networks]
            trained = self.accelerator.reduce(torch.tensor(is_trained, device=self.accelerator.device), "sum").tolist()
            self._idle = [network for network, count in zip(networks, trained, strict=True) if count == 0]

    def forward(self, model: nn.Module, method: Callable[..., Tensor], *args: Any) -> Tensor:
        return method(*args) + self._calls.take_spare()  # FSDP's hooks are on the network that the pipeline calls

    def _find_idle(self, networks: list[nn.Module]) -> list[nn.Module]:
        return self._idle

    # Checkpoints

    def save_optimizer(self, folder: Path, model: nn.Module, optimizer: Any, is_writer: bool) -> bool:
        save_shards(folder, model, optimizer, is_writer)
        return True


def _check_plugin(plugin_args: dict[str, Any]) -> None:
    version = plugin_args.get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
    if int(version) != 2:  # checked before accelerate looks for the GPU that FSDP1 needs
        raise ValueError(
            "FSDP1 cannot train here: set fsdp_version: 2 in the accelerate config (FSDP_VERSION=2), or "
            "fsdp_config={'version': 2}."
        )
    if FullyShardedDataParallelPlugin(**plugin_args).activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing renames the network's blocks, so that nothing else could load what is "
            "saved; leave it out and set gradient_checkpointing=True, which does the same."
        )


def activate(accelerator: Accelerator, plugin_args: dict[str, Any]) -> None:
    """Enable FSDP2 on CPUs too, where accelerate silently keeps `MULTI_CPU`, which is DDP."""
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin_args)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"FSDP was requested, but accelerate would train with {accelerator.distributed_type.value}; start with "
            "`accelerate launch` on several processes, or leave FSDP out."
        )


def find_repeated_blocks(network: nn.Module, chosen: list[str] | None = None) -> list[str]:
    """Return the names of the classes that become units: those the user chose, or the network's repeated blocks."""
    present = {type(module).__name__ for module in network.modules()}
    named = chosen or getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or []
    names = [name for name in named if name in present]
    if chosen and set(chosen) - present:
        raise ValueError(
            f"fsdp_transformer_layer_cls_to_wrap: {type(network).__name__} has no {sorted(set(chosen) - present)[0]}; "
            f"it is made of {', '.join(sorted(present - {type(network).__name__}))}."
        )
    if not names:
        raise ValueError(
            f"{type(network).__name__} does not declare its repeated blocks, so FSDP does not know what to shard; "
            "name their classes in fsdp_transformer_layer_cls_to_wrap (FSDP_TRANSFORMER_CLS_TO_WRAP)."
        )
    return names


def configure_plugin(plugin: FullyShardedDataParallelPlugin, networks: list[nn.Module]) -> None:
    """Set accelerate's settings of FSDP for diffusers networks: units are the repeated blocks and the networks."""
    chosen = plugin.transformer_cls_names_to_wrap
    names = [name for network in networks for name in (*find_repeated_blocks(network, chosen), type(network).__name__)]
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = list(dict.fromkeys(names))
    # autocast alone, as in a single process: FSDP's own casting would round timesteps
    plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    plugin.cpu_ram_efficient_loading = False  # every process has loaded the pipeline; True fails on buffers


def shard_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard the trained model in place, as accelerate's `fsdp2_prepare_model` does, and return it."""
    if is_sharded(model):  # trained before
        return model
    plugin = accelerator.state.fsdp_plugin
    # accelerate would make a unit of the `ModuleDict` around experts, which torch refuses because it is never called
    for network in split(model):
        shard_units(network, plugin, plugin.cpu_offload, is_trained=True)
    if isinstance(model, nn.ModuleDict):  # accelerate calls this method of prepared models
        model.set_requires_gradient_sync = functools.partial(_set_sync, split(model))
    return model


def shard_reference(model: nn.Module, accelerator: Accelerator, is_offloaded: bool) -> None:
    """Shard the reference, a frozen copy of the trained model, in the same way; shares may stay on the CPU."""
    plugin = accelerator.state.fsdp_plugin
    offload = plugin.cpu_offload or OffloadPolicy()
    if is_offloaded:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    for network in split(model):
        shard_units(network, plugin, offload, is_trained=False)


def shard_units(
    network: nn.Module, plugin: FullyShardedDataParallelPlugin, offload: OffloadPolicy, is_trained: bool
) -> None:
    """Turn a network and its blocks into units, in place."""
    reshards = plugin.reshard_after_forward if is_trained else True
    for module in reversed(list(network.modules())):  # inner units first
        if module is network or type(module).__name__ in plugin.transformer_cls_names_to_wrap:
            late_weights.fill(module.parameters(), is_copied=False)  # only one unit at a time is whole
            fully_shard(
                module,
                reshard_after_forward=None if module is network and is_trained else reshards,
                mp_policy=plugin.mixed_precision_policy,
                offload_policy=offload,
            )


def split(model: nn.Module) -> list[nn.Module]:
    """Return the trained networks of a model: experts, or the model itself."""
    return list(model.values()) if isinstance(model, nn.ModuleDict) else [model]


def has_share_of_gradient(parameter: nn.Parameter) -> bool:
    """Return whether this process's share of a parameter's gradient is not 0."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    return gradient is not None and bool(gradient.any())


def _set_sync(networks: list[nn.Module], is_synced: bool) -> None:
    for network in networks:
        network.set_requires_gradient_sync(is_synced)


def find_units(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose weights are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gather_units(model: nn.Module, accelerator: Accelerator, is_kept: bool) -> Iterator[None]:
    """Enter around passes without gradient; with `is_kept`, gather each unit once and keep it until the end."""
    units, reshards = find_units(model), accelerator.state.fsdp_plugin.reshard_after_forward
    for unit in units if is_kept else ():
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:  # gathered weights would be stale after an update
            if is_kept and not any(unit is network for network in split(model)):
                unit.set_reshard_after_forward(reshards, recurse=False)
            unit.reshard()


class ShardedWeights(TrainedWeights):
    """Values of the trained parameters under FSDP2: whole before it has sharded the model, shares afterwards."""

    def __init__(self, model: nn.Module, names: list[str] | None = None, take_turns: bool = False):
        super().__init__([], take_turns)
        self.leave_some_without_gradient = False  # processes make their passes together
        self.model = model
        self.names = names or [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())  # sharding makes new ones
        return [named[name] for name in self.names]

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.model)

    def exact(self) -> list[Tensor]:
        return [value.detach() for value in self.used()]

    def used(self) -> list[Tensor]:
        """Return what this process holds of each parameter, in the same memory: writing to it changes the weights."""
        late_weights.fill(self.parameters)
        return [
            parameter.detach().to_local().requires_grad_() if isinstance(parameter, DTensor) else parameter
            for parameter in self.parameters
        ]

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        """Return this process's shares of whole values; values that are shares already are returned as they are."""
        pairs = zip(self.parameters, values, strict=True)
        return [as_shard(v, p).to_local() if isinstance(p, DTensor) and v.shape == p.shape else v for p, v in pairs]

    def join(self, shares: list[Tensor]) -> Iterator[Tensor]:
        """Yield whole values from the shares of all processes; every process must ask for all of them."""
        for parameter, share in zip(self.parameters, shares, strict=True):
            if isinstance(parameter, DTensor):  # NCCL cannot read CPU memory, where shares may be
                share = as_dtensor(share.to(parameter.device_mesh.device_type), parameter).full_tensor()
            yield share

    @contextlib.contextmanager
    def show_whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        """Show the trained parameters whole, in networks of their original classes; a collective."""
        shown: dict[nn.Module, dict[str, nn.Parameter]] = collections.defaultdict(dict)
        if self.is_sharded or values is not None:
            whole = self.join(self.exact() if values is None else values)
            for path, parameter, value in zip(self.names, self.parameters, whole, strict=True):
                if is_kept:
                    owner, _, name = path.rpartition(".")
                    value = nn.Parameter(value.detach().cpu().clone(), parameter.requires_grad)
                    shown[self.model.get_submodule(owner)][name] = value
        classes = [(unit, type(unit)) for unit in find_units(self.model)]
        with contextlib.ExitStack() as stack:
            for module, parameters in shown.items():
                stack.enter_context(replace_attribute(module, "_parameters", {**module._parameters, **parameters}))
                # removes FSDP's hook, which expects shares after loading
                hooks = collections.OrderedDict()
                stack.enter_context(replace_attribute(module, "_load_state_dict_post_hooks", hooks))
            for unit, cls in classes:  # their own, in front of which FSDP put one
                unit.__class__ = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
            try:
                yield
            finally:
                for unit, cls in classes:
                    unit.__class__ = cls
