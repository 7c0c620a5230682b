"""FSDP2: each process keeps a share of every weight, and whoever asks for it gets it.

In: what the user asked accelerate for, and the model. Out: torch's `fully_shard` on the network and its repeated
blocks, by way of accelerate; or one sentence that says why not. A module of its own because sharded weights have rules
of their own: who passes the network, when its units are gathered, and how whole tensors come out of it and go back in.
"""

import collections
import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config.settings import DiffusionGRPOConfig
from ..policy.denoising import replaced
from .deepspeed import TrainedWeights


def is_asked_for(args: DiffusionGRPOConfig) -> bool:
    """Whether `accelerate launch` or the settings ask for FSDP."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_fsdp(args: DiffusionGRPOConfig) -> None:
    """Refuses, before a model is loaded, what FSDP2 cannot do here.

    Raises:
        ValueError: FSDP1, one process, a wrapping by size, or FSDP's own activation checkpointing.
    """
    if not is_asked_for(args):
        return
    version = (args.fsdp_plugin_args or {}).get("fsdp_version", os.environ.get("FSDP_VERSION", "1"))
    if int(version) != 2:  # before accelerate looks for the accelerator that FSDP1 needs
        raise ValueError(
            "FSDP1 cannot train here: set fsdp_version: 2 in the accelerate config (FSDP_VERSION=2), or "
            "fsdp_config={'version': 2}."
        )
    plugin = plugin_of(args)
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        raise ValueError(
            "fsdp_auto_wrap_policy: SIZE_BASED_WRAP is not supported; take TRANSFORMER_BASED_WRAP, which shards the "
            "blocks that the network repeats."
        )
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing renames the network's blocks, so that nothing else could load what is "
            "saved; leave it out and set gradient_checkpointing=True, which does the same."
        )
    if args.world_size == 1:
        raise ValueError(
            "FSDP was asked for, but there is one process, which has nobody to share with; raise num_processes, or "
            "leave FSDP out."
        )


def plugin_of(args: DiffusionGRPOConfig) -> FullyShardedDataParallelPlugin:
    """accelerate's settings of FSDP, from `fsdp_config` or from the environment that `accelerate launch` sets."""
    return FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))


def activate(accelerator: Accelerator, args: DiffusionGRPOConfig) -> bool:
    """Makes sure that who asked for FSDP gets it.

    accelerate knows FSDP on accelerators only: on CPUs it keeps `MULTI_CPU`, which is DDP, without a word. Nothing
    else in it depends on the device, so that its state is all that has to be put right.

    Returns:
        whether weights will be sharded.

    Raises:
        ValueError: FSDP was asked for, and accelerate would do something else.
    """
    if not is_asked_for(args):
        return False
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = plugin_of(args)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"FSDP was asked for, but accelerate would train with {accelerator.distributed_type.value}; start with "
            "`accelerate launch` on several processes, or leave FSDP out."
        )
    return True


def repeated_blocks(network: nn.Module, chosen: list[str] | None = None) -> list[str]:
    """Names of the classes that become units: the user's, or the blocks that a diffusers network says it repeats.

    Raises:
        ValueError: it names no blocks, or is a language model.
    """
    if hasattr(network, "generate"):
        raise ValueError(
            f"FSDP does not train {type(network).__name__}: a language model writes token by token, and would gather "
            "its weights for each; start without FSDP."
        )
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
            f"{type(network).__name__} names no repeated blocks, so FSDP does not know its units; name their classes "
            "in fsdp_transformer_layer_cls_to_wrap (FSDP_TRANSFORMER_CLS_TO_WRAP)."
        )
    return names


def settle(plugin: FullyShardedDataParallelPlugin, networks: list[nn.Module]) -> None:
    """Writes into accelerate's settings what a diffusers network needs.

    Units are its repeated blocks and the network itself, which pipelines call: of a LoRA the `PeftModel` around it is
    not. Autocast alone computes in half precision, as in one process: FSDP's own casting would round timesteps too.
    """
    if len(networks) > 1:
        raise ValueError(
            "FSDP trains one network, and this pipeline's experts are several; name one of them in train_component, "
            "or start without FSDP."
        )
    network = networks[0]
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    blocks = repeated_blocks(network, plugin.transformer_cls_names_to_wrap)
    plugin.transformer_cls_names_to_wrap = [*blocks, type(network).__name__]
    plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.accelerator.is_available():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    plugin.cpu_ram_efficient_loading = False  # every process has loaded the pipeline; that way fails on buffers


def shard_reference(model: nn.Module, accelerator: Accelerator, is_offloaded: bool) -> None:
    """Shards a frozen copy of the trained network, the reference, as that one is; its shares may wait on the CPU."""
    plugin = accelerator.state.fsdp_plugin
    offload = plugin.cpu_offload or OffloadPolicy()
    if is_offloaded:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    kwargs = {"mp_policy": plugin.mixed_precision_policy, "offload_policy": offload, "reshard_after_forward": True}
    for module in reversed(list(model.modules())):  # units within units first
        if module is model or type(module).__name__ in plugin.transformer_cls_names_to_wrap:
            fully_shard(module, **kwargs)


def units(model: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())  # asked often: stops at the first


@contextlib.contextmanager
def gathered(model: nn.Module, accelerator: Accelerator, is_kept: bool) -> Iterator[None]:
    """Forward passes without gradient; with `is_kept` each unit is gathered once and kept until the end."""
    for unit in units(model) if is_kept else ():
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units(model):  # what stays gathered would go stale when the weights change
            unit.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)
            unit.reshard()


class ShardedWeights(TrainedWeights):
    """Values of the trained parameters, however they are kept: whole before FSDP2 has sharded the model, then shares.

    Args:
        model: the trained one, or a copy of it.
        names: of the parameters; those with gradient by default.
    """

    def __init__(self, model: nn.Module, names: list[str] | None = None):
        self.model, self.stage, self.has_experts = model, 0, False
        self.names = names or [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those the model has now: sharding makes new ones."""
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.names]

    @property
    def is_parted(self) -> bool:
        """Whether a process has only its share."""
        return is_sharded(self.model)

    def exact(self) -> list[Tensor]:
        """As `used`, without gradient."""
        return [value.detach() for value in self.used()]

    def refresh(self) -> None:
        """Nothing is kept beside the shares."""

    def used(self) -> list[Tensor]:
        """What this process has of each parameter, over the same memory: writing it writes the weights."""
        return [
            parameter.detach().to_local().requires_grad_() if isinstance(parameter, DTensor) else parameter
            for parameter in self.parameters
        ]

    def shares(self, values: list[Tensor]) -> list[Tensor]:
        """This process' shares of whole values; of shares themselves, in a second training, those."""
        pairs = zip(self.parameters, values, strict=True)
        return [as_shard(v, p).to_local() if isinstance(p, DTensor) and v.shape == p.shape else v for p, v in pairs]

    def joined(self, shares: list[Tensor]) -> Iterator[Tensor]:
        """Whole values from the shares of all processes, one parameter at a time; every process must ask for all."""
        for parameter, share in zip(self.parameters, shares, strict=True):
            yield _as_dtensor(share, parameter).full_tensor() if isinstance(parameter, DTensor) else share

    @contextlib.contextmanager
    def whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        """Whole trained parameters in memory, under the classes the networks had, to be written or read as files.

        Every process enters it. One tensor is gathered at a time; frozen parts of a LoRA's network stay shares.

        Args:
            values: shares to show in place of the weights, such as an average's.
            is_kept: False on processes that only help to gather.
        """
        shown: dict[nn.Module, dict[str, nn.Parameter]] = collections.defaultdict(dict)
        if self.is_parted or values is not None:
            joined = self.joined(self.exact() if values is None else values)
            for path, parameter, value in zip(self.names, self.parameters, joined, strict=True):
                if is_kept:
                    owner, _, name = path.rpartition(".")
                    value = nn.Parameter(value.detach().cpu().clone(), parameter.requires_grad)
                    shown[self.model.get_submodule(owner)][name] = value
        classes = [(unit, type(unit)) for unit in units(self.model)]
        with contextlib.ExitStack() as stack:
            for module, own in shown.items():
                stack.enter_context(replaced(module, "_parameters", {**module._parameters, **own}))
                # FSDP's look for shares after a load
                stack.enter_context(replaced(module, "_load_state_dict_post_hooks", collections.OrderedDict()))
            for unit, cls in classes:
                unit.__class__ = _plain_class(cls)
            try:
                yield
            finally:
                for unit, cls in classes:
                    unit.__class__ = cls

    @contextlib.contextmanager
    def rewritten(self) -> Iterator[None]:
        """Whole parameters into which a file is read on every process; afterwards each has its share of them."""
        if not self.is_parted:
            yield
            return
        with self.whole():
            yield
            read = [parameter.detach() for parameter in self.parameters]
        with torch.no_grad():
            for own, value in zip(self.used(), self.shares(read), strict=True):
                own.copy_(value)


def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before FSDP put its own in front of it."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))


def as_shard(whole: Tensor, like: DTensor) -> DTensor:
    """This process's share of a whole tensor, laid out and placed as another one; without communication."""
    mesh = like.device_mesh
    share = distribute_tensor(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None).to_local()
    return _as_dtensor(share.to(like.to_local().device), like)


def _as_dtensor(share: Tensor, like: DTensor) -> DTensor:
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(share, like.device_mesh, like.placements, run_check=False, **layout)
