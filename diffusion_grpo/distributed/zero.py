"""DeepSpeed: its backend and configuration, ZeRO-1 to 3, and whole weights gathered from shares where they are needed.

ZeRO-1 shards the optimizer's state, ZeRO-2 also the gradients, ZeRO-3 also the parameters. `ZeroWeights` reads and
writes the trained parameters in all three; `IdleNetworks` lets the optimizer skip networks that an update did not
train. DeepSpeed itself is imported where it is used, since it is optional.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config
from trl.models.utils import add_hooks, remove_hooks

from ..policy.networks import HOOKS, NetworkAccess, replace_attribute
from . import late_weights, refusals
from .backend import DistributedBackend, redirect
from .checkpoints import restore_engine
from .context_parallel import ContextGroups
from .trained_weights import TrainedWeights


class DeepSpeedBackend(DistributedBackend):
    """Several processes whose engine is DeepSpeed's; [`DistributedBackend`] says what each method is for."""

    def __init__(
        self, half: torch.dtype | None, groups: ContextGroups, plugin: DeepSpeedPlugin, gathers_whole: bool = True
    ):
        super().__init__(half, groups)
        if groups.size > 1:
            raise ValueError("context_parallel_size works only with DDP and FSDP2; start without DeepSpeed.")
        self._plugin, self._gathers_whole = plugin, gathers_whole
        self._idle_networks: IdleNetworks | None = None
        self._is_gathered = self._has_started = False

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 to 3."""
        return self._plugin.zero_stage

    @property
    def sharding(self) -> str:
        return f"zero{self.stage}"

    def check_run(self, component: tuple[str, ...], *, processes: int, own_steps: bool, draws_tokens: bool) -> None:
        if draws_tokens and self.stage == 3 and not self._gathers_whole:
            raise ValueError(
                "ds3_gather_for_generation=False gathers each layer again for every token, and other processes would "
                "wait for those that have finished; set it to True."
            )
        if len(component) <= 1:
            return
        if "optimizer" in self._plugin.hf_ds_config.config:
            raise ValueError(
                f"{', '.join(component)} are trained together, and the optimizer of the DeepSpeed configuration would "
                'also change one that an update does not train; leave "optimizer" out, and set optim.'
            )
        if self.stage >= 2 and own_steps and processes > 1:
            refusals.refuse_turns(component, *refusals.OWN_STEPS)
        if self.stage == 3 and self._plugin.hf_ds_config.get_value("zero_optimization.offload_optimizer"):
            change = "leave out offload_optimizer, or use ZeRO-2"
            refusals.refuse_turns(component, "ZeRO-3 offloads gradients of one of them only", change)

    def bind(self, accelerator: Accelerator, model: nn.Module, networks: list[nn.Module]) -> None:
        super().bind(accelerator, model, networks)
        hide_deepspeed()  # Trainer has registered it again
        fill_sizes(accelerator.state.deepspeed_plugin.hf_ds_config, model)

    @property
    def shards_weights(self) -> bool:
        return self.stage == 3

    @property
    def _engine(self) -> nn.Module | None:
        """DeepSpeed's engine around the model, once there is one."""
        wrapped = self.accelerator.deepspeed_engine_wrapped
        return None if wrapped is None else wrapped.engine

    def network_access(self, model: nn.Module) -> NetworkAccess:
        access = super().network_access(model)
        if self.stage < 3:
            return access
        return dataclasses.replace(access, shapes_only=lambda: without_weights(model))

    @property
    def _meets_in_calls(self) -> bool:
        return self._weights.is_sharded and not self._is_gathered

    def _autocast(self) -> contextlib.AbstractContextManager:
        # accelerate does not autocast a network in half precision, but the pipeline calls the network with inputs from
        # its other parts, which may have any dtype
        if not self.stage:
            return super()._autocast()
        return torch.autocast(self.accelerator.device.type, self._half, cache_enabled=False)

    def trained_weights(self, model: nn.Module, take_turns: bool) -> TrainedWeights:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        if any(isinstance(module, PeftModel) for module in model.modules()):
            frozen = []  # the base model, which is not written to files
        self._weights = ZeroWeights(trained, self.stage, take_turns, frozen)
        return self._weights

    @contextlib.contextmanager
    def wrap_prepare(self, model: nn.Module) -> Iterator[None]:
        if self._has_started:  # accelerate has let go of the engine since
            raise ValueError(
                "DeepSpeed cannot train again with the same trainer; create a new one, with resume_from_checkpoint to "
                "continue the run."
            )
        with keep_buffers(model), shard_first() if self.stage == 3 else contextlib.nullcontext():
            yield
        self._has_started = True

    # A reference

    def shard_reference(self, reference: nn.Module, is_offloaded: bool) -> nn.Module:
        is_wrapped = self.accelerator.unwrap_model(reference) is not reference
        if self.stage != 3 or is_offloaded or is_wrapped:
            late_weights.fill(reference.parameters(), is_copied=True)
            return reference
        return wrap_for_inference(reference, self.accelerator)

    def reference_weights(self, model: nn.Module, names: list[str]) -> TrainedWeights:
        weights = super().reference_weights(model, names)
        return weights if self.stage < 3 else FrozenShares(weights.parameters, self.stage)

    # Passes

    @property
    def passes_together(self) -> bool:
        return self._weights.is_sharded and not self._gathers_whole

    @contextlib.contextmanager
    def gather_for_passes(self, networks: list[nn.Module], reference: nn.Module | None) -> Iterator[Callable]:
        self._place(networks)
        engine = self._engine
        if not self._weights.is_sharded:
            yield lambda method, *args: method(*args)
        elif not self._gathers_whole:
            yield lambda method, *args: _call_layered(engine, self.accelerator.unwrap_model(engine), method, *args)
        else:
            with contextlib.ExitStack() as stack:
                stack.enter_context(replace_attribute(self, "_is_gathered", True))
                for each in (engine, reference):
                    if each is not None and self.accelerator.unwrap_model(each) is not each:
                        stack.enter_context(gather_parameters(each))
                yield lambda method, *args: method(*args)

    @property
    def _reduces_every_pass(self) -> bool:
        return self.stage >= 2

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if self._idle_networks is not None:  # Trainer creates the optimizer more than once
            self._idle_networks.close()
        if self._weights.take_turns:
            self._idle_networks = IdleNetworks(model, optimizer, self.accelerator.device)

    def begin_update(self, optimizer: Any) -> None:
        """Clear gradients under ZeRO-3, whose first backward pass overwrites only those that it computes."""
        if self._idle_networks is not None:
            backup = getattr(self._engine.optimizer, "backup_optimizer", None)  # for what ZeRO-3 does not offload
            stepped = [self._engine.basic_optimizer, backup]
            self._idle_networks.begin_update([each for each in stepped if each is not None])
        if self.stage == 3:
            optimizer.optimizer.grad_partitions_flat_buffer.zero_()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss, scale_wrt_gas=False)

    # Checkpoints

    def save_optimizer(self, folder: Path, model: nn.Module, optimizer: Any, is_writer: bool) -> bool:
        self._engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        return True

    def load_optimizer(self, folder: Path, model: nn.Module, optimizer: Any) -> bool:
        restore_engine(self._engine, folder)
        return False


# Configuration


def hide_deepspeed() -> None:
    """Let `from_pretrained` load whole models again: a registered ZeRO-3 configuration would shard each."""
    unset_hf_deepspeed_config()


def read_config_again(args: TrainingArguments) -> None:
    """Read the DeepSpeed configuration, if there is one, again: "auto" becomes a setting that was decided late."""
    if args.deepspeed:
        args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
        args.hf_deepspeed_config.trainer_config_process(args)
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def fill_sizes(config: HfTrainerDeepSpeedConfig, model: nn.Module) -> None:
    """Fill in bucket sizes that are "auto" or left out, from the width that most weights of the network share."""
    weights: collections.Counter[int] = collections.Counter()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
            weights[width] += module.weight.numel()
    width = weights.most_common(1)[0][0] if weights else 1024
    # left out, as in accelerate's own configurations, it would take 1 to 2 GiB, even for a small LoRA
    config.config["zero_optimization"].setdefault("reduce_bucket_size", "auto")
    config.fill_only("zero_optimization.reduce_bucket_size", width * width)
    config.fill_only("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * width * width))
    config.fill_only("zero_optimization.stage3_param_persistence_threshold", 10 * width)


# Passes


@contextlib.contextmanager
def gather_parameters(engine: nn.Module) -> Iterator[None]:
    """Gather all ZeRO-3 parameters on each process, which may then call the network without waiting for others."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        remove_hooks(engine)
        try:
            yield
        finally:
            add_hooks(engine)


@contextlib.contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Replace sharded weights by zeros that take no memory, which is enough to find the shape of an output."""
    # which processes come across a new shape is random, so no process may gather weights for it
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for hooks in HOOKS:
                stack.enter_context(replace_attribute(module, hooks, collections.OrderedDict()))
            if module._parameters:
                stack.enter_context(replace_attribute(module._parameters, "_in_forward", False))
        sharded = [parameter for parameter in model.parameters() if not parameter.numel()]
        empty = [parameter.data for parameter in sharded]
        for parameter in sharded:
            parameter.data = parameter.new_zeros(()).expand(parameter.ds_shape)
        try:
            yield
        finally:
            for parameter, data in zip(sharded, empty, strict=True):
                parameter.data = data


def _call_layered(engine: nn.Module, model: nn.Module, method: Callable, *args: Any) -> Any:
    """Call `method` in the engine's forward, which gathers layer by layer; all processes must reach the same ones."""
    results = []

    def inside() -> Tensor:
        results.append(method(*args))
        return torch.zeros(())  # DeepSpeed inspects the output of a forward

    redirect(engine, model, inside)
    return results[0]


def wrap_for_inference(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Put a ZeRO-3 engine around a model that is not trained, such as a reference."""
    import deepspeed

    # TRL's `prepare_deepspeed` reads `model.config`, which two experts in a `ModuleDict` lack
    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    config["zero_optimization"].pop("offload_optimizer", None)
    shard_weights(model, config)
    return deepspeed.initialize(model=model, config=config)[0]


@contextlib.contextmanager
def shard_first() -> Iterator[None]:
    """Have `deepspeed.initialize` shard a model by parameters, before it converts it and moves all of it."""
    import deepspeed

    real = deepspeed.initialize

    def initialize(**kwargs: Any) -> Any:
        shard_weights(kwargs["model"], kwargs["config_params"])
        return real(**kwargs)

    with replace_attribute(deepspeed, "initialize", initialize):
        yield


def shard_weights(model: nn.Module, config: dict[str, Any]) -> None:
    """Shard a model's weights by ZeRO-3, in place, as `deepspeed.initialize` does."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.init_distributed(get_accelerator().communication_backend_name())  # uses torch's, if there is one
    half = None
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        half = dtype if config.get(name, {}).get("enabled") is True else half
    deepspeed.zero.Init(module=_OneByOne(model, half), dtype=half or torch.float32, config_dict_or_path=config)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(get_accelerator().current_device_name())


class _OneByOne(nn.Module):
    """Stands in for a module in DeepSpeed: parameters get their values when they are iterated over."""

    def __init__(self, model: nn.Module, half: torch.dtype | None):
        super().__init__()
        self._model, self._half = [model], half  # in a list, so that it is not a submodule

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in self._model[0].parameters(recurse):
            if not hasattr(parameter, "ds_id"):
                # DeepSpeed overwrites the values with those of the first process, also on the CPU
                late_weights.fill([parameter], is_copied=True)
                if self._half is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._half)
            yield parameter


@contextlib.contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Keep a network's buffers (such as position tables) from being cast to half precision by DeepSpeed."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    yield
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(getattr(module, name).device))


# Weights


class ZeroWeights(TrainedWeights):
    """The trained parameters under ZeRO: whole beside float32 shares under ZeRO-1 and 2, in shares under ZeRO-3."""

    def __init__(
        self, parameters: list[nn.Parameter], stage: int, take_turns: bool = False, frozen: Sequence[nn.Parameter] = ()
    ):
        super().__init__(parameters, take_turns)
        self.stage, self._frozen = stage, list(frozen)
        self.leave_some_without_gradient &= stage < 3

    @property
    def is_sharded(self) -> bool:
        return self.stage == 3 and all(hasattr(parameter, "ds_id") for parameter in self.parameters)

    def exact(self) -> list[Tensor]:
        late_weights.fill(self.parameters)
        if not self.is_sharded and self.parameters[0].dtype == torch.float32:
            return super().exact()
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        get = safe_get_local_fp32_param if self.is_sharded else safe_get_full_fp32_param
        return [get(parameter).detach() for parameter in self.parameters]

    def used(self) -> list[Tensor]:
        late_weights.fill(self.parameters)
        return [parameter.ds_tensor if self.is_sharded else parameter for parameter in self.parameters]

    def refresh(self) -> None:
        """Update the whole copies of small parameters, which ZeRO-3 keeps in addition to their shares."""
        kept = [parameter for parameter in self.parameters if self.is_sharded and parameter.ds_persist]
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        if not self.is_sharded:
            return values
        return [_share(parameter, value) for parameter, value in zip(self.parameters, values, strict=True)]

    def join(self, shares: list[Tensor]) -> Iterator[Tensor]:
        for parameter, share in zip(self.parameters, shares, strict=True):
            yield _join(parameter, share) if self.is_sharded else share

    @contextlib.contextmanager
    def show_whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            whole = self.join(self.exact() if values is None else values)
            for parameter, value in zip(self.parameters, whole, strict=True):
                if is_kept:
                    stack.callback(setattr, parameter, "data", parameter.data)
                    parameter.data = value.detach().to("cpu", torch.float32, copy=True)
            if self.is_sharded and self._frozen:
                stack.enter_context(FrozenShares(self._frozen, self.stage).show_whole(is_kept=is_kept))
            yield

    @property
    def _has_other_values(self) -> bool:
        return self.is_sharded or self.stage < 3  # else files are read into the model itself

    def _set_exact(self, parameter: nn.Parameter, value: Tensor, share: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self.is_sharded:
            safe_set_local_fp32_param(parameter, share)
        else:
            safe_set_full_fp32_param(parameter, value)


class FrozenShares(ZeroWeights):
    """Frozen weights under ZeRO-3, of which no optimizer keeps float32 values; a reference's may stay whole."""

    def exact(self) -> list[Tensor]:
        return [value.detach() for value in self.used()]

    @property
    def _has_other_values(self) -> bool:
        return self.is_sharded

    def _set_exact(self, parameter: nn.Parameter, value: Tensor, share: Tensor) -> None:
        """Do nothing: there are no other values."""


def _share(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this process's share of a whole value, cut and padded as in ZeRO-3."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    flat = value.detach().flatten()[start : start + size]
    return nn.functional.pad(flat, (0, size - len(flat)))


def _join(parameter: nn.Parameter, share: Tensor) -> Tensor:
    group = parameter.ds_process_group
    share = share.to(parameter.device)  # shares may be in CPU memory, which NCCL cannot read
    parts = [torch.empty_like(share) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, share.contiguous(), group=group)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)


# Networks that take turns over the steps


class IdleNetworks:
    """Makes an optimizer skip the networks that no process has trained in an update."""

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
        # DeepSpeed gives zeros for missing gradients, with which momentum and weight decay would change weights
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
        for turn, (number, weights) in enumerate(sorted(parts.items())):
            if turn == 0:
                group.update(params=weights, network=number)
            else:
                optimizer.add_param_group({**group, "params": weights, "network": number})
