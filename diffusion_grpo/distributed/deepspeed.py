"""DeepSpeed: what ZeRO keeps in parts, whole again where that is needed.

In: the trainer's accelerator, its engine and its trained parameters. Out: contexts in which weights are whole (for a
rollout, for a file), their parts (for averages), and a DeepSpeed configuration without open values. A module of its
own because nothing else should know how an engine keeps its weights. DeepSpeed itself is imported where it is used: it
is optional.
"""

import collections
import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config
from trl.models.utils import _ForwardRedirection, add_hooks, remove_hooks

from ..config.settings import DiffusionGRPOConfig
from ..policy.denoising import HOOKS, replaced

logger = logging.getLogger(__name__)


def zero_stage(accelerator: Accelerator) -> int:
    """DeepSpeed's ZeRO stage: 1 parts the optimizer state, 2 gradients too, 3 parameters too; 0 without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None else plugin.zero_stage


# Configuration


def hide_deepspeed() -> None:
    """From here on `from_pretrained` loads whole models.

    transformers parts every model that is loaded while a ZeRO-3 configuration is known to it, and makes `generate`
    wait for all processes: text encoders would fail in their forward, and reward models too.
    """
    unset_hf_deepspeed_config()


def set_learning_rate(args: DiffusionGRPOConfig, learning_rate: float) -> None:
    """A default that is known late, also where the DeepSpeed configuration says "auto"."""
    args.learning_rate = learning_rate
    if args.deepspeed:
        args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
        args.hf_deepspeed_config.trainer_config_process(args)
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)


def check_deepspeed(args: DiffusionGRPOConfig) -> None:
    """Refuses a DeepSpeed configuration that would silently train in another precision than the settings say.

    Raises:
        ValueError: bf16 or fp16 is on in the settings and off in the configuration.
    """
    if args.deepspeed_plugin is None:
        return
    config = args.deepspeed_plugin.hf_ds_config
    for name in ("bf16", "fp16"):
        if getattr(args, name) and not (config.is_true(f"{name}.enabled") or config.is_true("torch_autocast.enabled")):
            raise ValueError(
                f"{name}=True, but the DeepSpeed configuration says nothing of it; add "
                f'"{name}": {{"enabled": "auto"}}, or set {name}=False.'
            )


def fill_sizes(config: HfTrainerDeepSpeedConfig, model: nn.Module) -> None:
    """Buckets that are "auto": as transformers fills them in, from the width of the network.

    A diffusers config has no `hidden_size`; the width is the one that most of the weights of linear layers and
    convolutions read.
    """
    weights: collections.Counter[int] = collections.Counter()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
            weights[width] += module.weight.numel()
    width = weights.most_common(1)[0][0] if weights else 1024
    config.fill_only("zero_optimization.reduce_bucket_size", width * width)
    config.fill_only("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * width * width))
    config.fill_only("zero_optimization.stage3_param_persistence_threshold", 10 * width)


def check_experts(component: str, accelerator: Accelerator, args: DiffusionGRPOConfig) -> None:
    """Refuses experts that take turns (Wan 2.2 A14B) where processes cannot share their gradients.

    Raises:
        ValueError: FSDP; ZeRO-2 or 3 with steps that each sample draws for itself; ZeRO-3 with an offloaded optimizer.
    """
    if ", " not in component or accelerator.num_processes == 1:
        return
    stage = zero_stage(accelerator)
    if accelerator.distributed_type == DistributedType.FSDP:
        reason, change = "FSDP waits for both at once", "use DeepSpeed or DDP"
    elif stage >= 2 and args.permute_steps:
        reason, change = "with permute_steps processes would train different ones at once", "set permute_steps=False"
    elif stage == 3 and accelerator.state.deepspeed_plugin.hf_ds_config.get_value(
        "zero_optimization.offload_optimizer"
    ):
        reason, change = "ZeRO-3 offloads gradients of one of them only", "leave out offload_optimizer, or use ZeRO-2"
    else:
        return
    raise ValueError(f"{component} take turns, and {reason}; {change}, or name one network in train_component.")


# Passes


def precision(accelerator: Accelerator, args: DiffusionGRPOConfig) -> contextlib.AbstractContextManager:
    """`accelerator.autocast`, also with DeepSpeed, where accelerate leaves casting to the network's half precision.

    The pipeline calls the network with what its other parts made, in whatever dtype they have.
    """
    if zero_stage(accelerator):
        return torch.autocast(accelerator.device.type, torch.bfloat16 if args.bf16 else torch.float16)
    return accelerator.autocast()


@contextlib.contextmanager
def accumulating(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Backward passes inside only add up gradients: DDP does not reduce them, DeepSpeed does not step on them."""
    state = accelerator.gradient_state
    synced = state.sync_gradients
    state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(synced)


def redirected(wrapper: nn.Module, model: nn.Module, method: Callable, *args: Any) -> Any:
    """Calls `method` inside the forward of whatever wraps the model (DDP, DeepSpeed), so that its hooks run."""
    return method(*args) if wrapper is model else _ForwardRedirection()(wrapper, model, method, *args)


def in_step(passes: list[Any], accelerator: Accelerator, is_together: bool) -> list[tuple[Any, bool]]:
    """As many passes on every process as on that with the most: the last is repeated, and counts for nothing.

    Args:
        passes: of this process.
        accelerator: a collective of all its processes.
        is_together: whether a pass gathers weights, so that one that others do not make would wait for ever.

    Returns:
        the passes, each with whether it is one of those given.
    """
    missing = 0
    if is_together:
        count = torch.tensor([len(passes)], device=accelerator.device)
        missing = int(accelerator.gather(count).max()) - len(passes)
    return [(one, True) for one in passes] + [(passes[-1], False)] * missing


def next_of_all(accelerator: Accelerator, weights: "TrainedWeights") -> Callable[[int], list[int]]:
    """How [`~diffusion_grpo.policy.denoising.Policy`] asks what each process does next: a collective once weights are parted."""

    def ask(own: int) -> list[int]:
        if not weights.is_parted:
            return [own]
        return accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()

    return ask


def clear_gradients(optimizer: Any, weights: "TrainedWeights") -> None:
    """Before an update under ZeRO-3, whose first backward pass overwrites the last update's gradients.

    It does so only for the parameters that this pass reaches; those of another expert would be added to old ones.
    """
    if weights.stage == 3:
        optimizer.optimizer.grad_partitions_flat_buffer.zero_()


@contextlib.contextmanager
def gathered(engine: nn.Module) -> Iterator[None]:
    """Whole ZeRO-3 parameters on each process, without the hooks that would part them again after each layer.

    Inside, processes may call the network as often as they like; none waits for another.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        remove_hooks(engine)
        try:
            yield
        finally:
            add_hooks(engine)


@contextlib.contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Zeros that take no memory in place of parted weights: enough for the shape of an output, and no process waits.

    Which processes meet a new shape is chance (each sample may draw its own steps), so none may gather for it.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for hooks in HOOKS:
                stack.enter_context(replaced(module, hooks, collections.OrderedDict()))
            if module._parameters:
                stack.enter_context(replaced(module._parameters, "_in_forward", False))
        parted = [parameter for parameter in model.parameters() if not parameter.numel()]
        empty = [parameter.data for parameter in parted]
        for parameter in parted:
            parameter.data = parameter.new_zeros(()).expand(parameter.ds_shape)
        try:
            yield
        finally:
            for parameter, data in zip(parted, empty, strict=True):
                parameter.data = data


def layered(engine: nn.Module, model: nn.Module, method: Callable, *args: Any) -> Any:
    """Calls `method` in the engine's forward, where each layer is gathered as it is reached: all processes must reach
    the same layers."""
    results = []

    def inside() -> Tensor:
        results.append(method(*args))
        return torch.zeros(())  # DeepSpeed looks into what a forward returns

    redirected(engine, model, inside)
    return results[0]


def parted(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """A ZeRO-3 engine around a model that is not trained, such as a reference."""
    import deepspeed

    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    for name in ("optimizer", "scheduler"):
        config.pop(name, None)
    config["zero_optimization"].pop("offload_optimizer", None)
    return deepspeed.initialize(model=model, config=config)[0]


# Weights


class TrainedWeights:
    """Values of the trained parameters, however they are kept.

    Without DeepSpeed they are the parameters. ZeRO-1 and 2 keep those whole, in half precision where `bf16` or `fp16`
    is on, beside float32 values that are spread over the processes; under ZeRO-3 a process has its share of each.

    Args:
        parameters: the trained ones, in a fixed order.
        stage: ZeRO's, 0 without DeepSpeed.
        has_experts: whether they belong to several networks that take turns.
    """

    def __init__(self, parameters: list[nn.Parameter], stage: int, has_experts: bool = False):
        self.parameters, self.stage, self.has_experts = parameters, stage, has_experts

    @property
    def is_parted(self) -> bool:
        """Whether a process has only its share: under ZeRO-3, once the engine is built."""
        return self.stage == 3 and all(hasattr(parameter, "ds_id") for parameter in self.parameters)

    def exact(self) -> list[Tensor]:
        """What the optimizer moves, one tensor a parameter, not to be written: whole, or this process' shares."""
        if self.is_parted and not self.parameters[0].requires_grad:  # a reference has no optimizer
            return self.used()
        if self.stage == 0 or (not self.is_parted and self.parameters[0].dtype == torch.float32):
            return [parameter.detach() for parameter in self.parameters]
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

        get = safe_get_local_fp32_param if self.is_parted else safe_get_full_fp32_param
        return [get(parameter).detach() for parameter in self.parameters]

    def used(self) -> list[Tensor]:
        """What the network computes with: whole, or this process' shares. `refresh` after writing."""
        return [parameter.ds_tensor if self.is_parted else parameter for parameter in self.parameters]

    def refresh(self) -> None:
        """ZeRO-3 keeps small parameters whole beside their shares; those are made anew."""
        kept = [parameter for parameter in self.parameters if self.is_parted and parameter.ds_persist]
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    @property
    def are_shared_out(self) -> bool:
        """Whether each pass leaves some whole parameters without gradient, for which other processes would wait."""
        return self.stage < 3 and self.has_experts and torch.distributed.is_initialized()

    def nothing(self) -> Tensor:
        """0, with a gradient of 0 for every parameter."""
        return 0.0 * sum(parameter.sum() for parameter in self.parameters)

    def shares(self, values: list[Tensor]) -> list[Tensor]:
        """This process' shares of whole values; the values themselves where it has all."""
        if not self.is_parted:
            return values
        return [_share(parameter, value) for parameter, value in zip(self.parameters, values, strict=True)]

    def joined(self, shares: list[Tensor]) -> Iterator[Tensor]:
        """Whole values from the shares of all processes, one parameter at a time; every process must ask for all."""
        for parameter, share in zip(self.parameters, shares, strict=True):
            yield _whole(parameter, share) if self.is_parted else share

    @contextlib.contextmanager
    def whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        """The trained parameters whole and exact, as one process has them, to be written to files.

        Args:
            values: shares to show in place of the weights, such as an average's.
            is_kept: False on processes that only help to join.
        """
        if self.stage == 0 and values is None:
            yield
            return
        kept = []
        values = self.exact() if values is None else values
        try:
            for parameter, value in zip(self.parameters, self.joined(values), strict=True):
                if is_kept:
                    kept.append((parameter, parameter.data))
                    parameter.data = value.detach().to("cpu", torch.float32, copy=True)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data

    @contextlib.contextmanager
    def rewritten(self) -> Iterator[None]:
        """Whole parameters into which a file is read on every process; afterwards each has its share of what it says.

        The optimizer's own values are set too: what is saved later is what was read.
        """
        if self.stage == 0:
            yield
            return
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        with self.whole():
            yield
            read = [parameter.data for parameter in self.parameters]
        for parameter, value, used in zip(self.parameters, read, self.used(), strict=True):
            if self.is_parted:
                share = _share(parameter, value)
                safe_set_local_fp32_param(parameter, share)
                used.copy_(share)
            else:
                safe_set_full_fp32_param(parameter, value)
                used.data.copy_(value)
        self.refresh()


def drop_idle_gradients(experts: nn.ModuleDict) -> None:
    """No gradient, as in one process, for an expert that no process' steps belong to: the optimizer passes it over.

    Gradients that were added up over processes are the same on each, so that all find the same experts idle.
    """
    for expert in experts.values():
        trained = [parameter for parameter in expert.parameters() if parameter.grad is not None]
        if not any(parameter.grad.any() for parameter in trained):
            for parameter in trained:
                parameter.grad = None


def _share(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This process' part of a whole value, cut and padded as ZeRO-3 does it."""
    size = parameter.ds_tensor.numel()
    start = size * torch.distributed.get_rank(parameter.ds_process_group)
    flat = value.detach().flatten()[start : start + size]
    return nn.functional.pad(flat, (0, size - len(flat)))


def _whole(parameter: nn.Parameter, share: Tensor) -> Tensor:
    group = parameter.ds_process_group
    share = share.to(parameter.device)  # shares may wait in CPU memory, from which NCCL takes nothing
    parts = [torch.empty_like(share) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, share.contiguous(), group=group)
    return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """DeepSpeed casts a network's buffers (tables of positions) to half precision with its weights: not here."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    yield
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(module._buffers[name].device)
