"""Bytes of a run on one process, by kind: those that are always in use, and those of each phase."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from ..config.settings import DiffusionGRPOConfig
from ..training.lazy_modules import list_text_encoders
from ..training.memory import count_bytes
from .batches import Batches, has_old_policy
from .measure import DECODING, DENOISING, ENCODING, UPDATE, Measurement
from .sharding import Sharding
from .weightless import Parts

LOADING = "loading"  # before anything is on the accelerator
PREPARING = "preparing"  # prompts are encoded before the network is on the accelerator
ALONE = (LOADING, PREPARING)  # phases without the other kinds
NAMES = {ENCODING: "encoding prompts", DENOISING: "denoising", DECODING: "decoding", UPDATE: "activations"}
OPTIMIZER_BLOCK = 256  # values that share a scale in the 8-bit states of bitsandbytes
OPTIMIZER_SMALL = 4096  # bitsandbytes keeps 32-bit states for smaller tensors
WEIGHT_BLOCK = 64  # values that share a scale in the 4-bit weights of bitsandbytes


@dataclass
class Memory:
    """Bytes of one kind on one process."""

    name: str
    accelerator: int = 0
    cpu: int = 0
    phase: str = ""


def add_up(memory: list[Memory]) -> Memory:
    """Return the peak memory: all kinds that are always in use, and the phase with most on the accelerator."""
    totals = []
    for phase in dict.fromkeys(["", *(item.phase for item in memory)]):
        present = [i for i in memory if i.phase == phase or (not i.phase and phase not in ALONE)]
        totals.append((sum(i.accelerator for i in present), sum(i.cpu for i in present), phase))
    most = max(totals, key=lambda total: total[0])
    return Memory("most at a time", most[0], max(total[1] for total in totals), most[2])


def estimate_memory(
    parts: Parts,
    args: DiffusionGRPOConfig,
    is_full_training: bool,
    sharding: Sharding,
    counted: Measurement | None,
    batches: Batches,
) -> list[Memory]:
    """Estimate the bytes on one process, by kind."""
    copies_reference = args.needs_reference and is_full_training
    released = list_text_encoders(parts.others) if args.cache_prompt_embeds != "off" else []
    moved = [name for name in parts.moved if args.offload_frozen is not None and name not in released]
    stay = [name for name in parts.others if name not in (*released, *moved)]
    memory = _list_state(parts, args, sharding)
    memory += _list_copies(parts, args, copies_reference, sharding)
    memory.append(Memory("frozen parts", _weigh_others(parts, stay), _weigh_others(parts, moved)))
    loaded = _weigh_others(parts, parts.others)
    if not sharding.parameters:  # otherwise networks are read as they are sharded
        loaded += _weigh_frozen(parts) + count_bytes(parts.trained)
    memory.append(Memory("pipeline as it is loaded", 0, loaded, LOADING))
    if counted is None:
        return memory
    memory.append(_place("trajectory", _count_trajectory(args, counted, batches), args.offload_trajectories))
    memory += _list_phases(parts, args, copies_reference, sharding, counted)
    if moved and counted.tokens:  # the largest part that turns tokens into samples
        memory.append(Memory(NAMES[DECODING], max(_weigh_others(parts, [name]) for name in moved), phase=DECODING))
    elif released and (encoders := [name for name in moved if name not in parts.decodes]):
        memory.append(Memory(NAMES[ENCODING], _weigh_others(parts, encoders), phase=ENCODING))
    if args.cache_prompt_embeds == "memory":
        memory.append(Memory("prompt embeddings", 0, counted.prompt_bytes * (batches["prompts"] or 0)))
    return memory


def _place(name: str, count: int, is_on_cpu: bool) -> Memory:
    return Memory(name, 0 if is_on_cpu else count, count if is_on_cpu else 0)


def _list_state(parts: Parts, args: DiffusionGRPOConfig, sharding: Sharding) -> list[Memory]:
    """List weights, gradients and optimizer states, as they are divided among the processes."""
    trained = parts.trained
    size, count, buffers = count_bytes(trained), sum(p.numel() for p in trained), _weigh_buffers(parts)
    gradients, states = size, 0
    if sharding.is_deepspeed:  # which steps one float32 tensor of all trained weights
        states, trained = 4 * count, [nn.Parameter(torch.empty(count, device="meta"))]
        gradients = 2 * count if args.bf16 or args.fp16 else size
    states += count_optimizer_bytes(trained, args)
    whole = _weigh_networks(parts, args, sharding.is_deepspeed)
    weights = _place("parameters", sharding.share(whole, sharding.parameters), sharding.offload_parameters)
    weights.accelerator += buffers
    if args.group_offload is not None:  # networks take turns
        most = size + max(measure_groups(network, args) for network in parts.networks.values())
        frozen = _weigh_pinned(parts) if args.group_offload_stream else _weigh_frozen(parts)
        weights = Memory("parameters", min(most, whole + buffers), frozen)
    memory = [
        weights,
        _place("gradients", sharding.share(gradients, sharding.gradients), sharding.offload_optimizer),
        _place("optimizer", sharding.share(states, sharding.optimizer), sharding.offload_optimizer),
    ]
    if sharding.name == "ddp":
        memory.append(Memory("gradient buckets", gradients))  # copies for the all-reduce
    if sharding.name == "fsdp2" and sharding.processes > 1:
        memory.append(Memory("gathered block", max(map(measure_largest_unit, parts.networks.values()))))
    used = 2 if args.bf16 or args.fp16 else 4  # bytes of a value that DeepSpeed has cast
    if sharding.bucket:
        memory.append(Memory("gradient bucket", used * sharding.bucket))
    if sharding.name == "zero3" and sharding.processes > 1:
        gathered = min(whole, used * sharding.live_weights)
        phase = UPDATE if args.ds3_gather_for_generation else ""  # rollouts gather the whole network
        memory.append(Memory("gathered blocks", gathered, phase=phase))
    if quantised := [network for name, network in parts.networks.items() if name in parts.specs]:
        layers = [weight.nbytes for network in quantised for weight in list_linear_weights(network)]
        memory.append(Memory("restored layer", max(layers, default=0)))  # while it is used
    return memory


def _list_copies(parts: Parts, args: DiffusionGRPOConfig, copies_reference: bool, sharding: Sharding) -> list[Memory]:
    """List copies of the weights: the reference, the moving average, the old policy."""
    memory, size = [], sharding.share(count_bytes(parts.trained), sharding.parameters)
    if copies_reference:
        is_divided, buffers = _divides_reference(args, sharding), _weigh_buffers(parts)
        whole = _weigh_networks(parts, args, is_divided and sharding.is_deepspeed)  # else the engine does not see it
        is_on_cpu = args.offload_ref_model or is_divided and sharding.offload_parameters
        reference = _place("reference", sharding.share(whole, is_divided), is_on_cpu)
        if args.offload_ref_model and not is_divided:
            reference.cpu += buffers
        else:
            reference.accelerator += buffers
        memory.append(reference)
    if args.ema_decay is not None:
        memory.append(Memory("moving average", size))
    if has_old_policy(args):
        memory.append(Memory("old policy", size))
    return memory


def _divides_reference(args: DiffusionGRPOConfig, sharding: Sharding) -> bool:
    """Return whether each process has only a share of the reference. ZeRO-3 keeps it whole if it is offloaded."""
    return sharding.parameters and (sharding.name == "fsdp2" or not args.offload_ref_model)


def _count_trajectory(args: DiffusionGRPOConfig, counted: Measurement, batches: Batches) -> int:
    """Count the bytes of what a rollout keeps until its last update."""
    per_sample, per_step = counted.sample_bytes, counted.step_bytes
    latent = (per_step - 12) // 2  # a step has latents before and after it, a log-probability and an index
    if not args.is_recorded:  # only the finished latents, and those that entered the last steps
        per_sample += latent * (1 + args.takes_gradients)
        per_step = 8 + (latent if has_old_policy(args) else 0)
    elif args.anchor != "own" and args.recording.old == "mean" and not counted.tokens:
        per_step += latent  # the mean of each step
    return batches["samples_per_process"] * (per_sample + batches["trained_steps"] * per_step)


def _list_phases(
    parts: Parts, args: DiffusionGRPOConfig, copies_reference: bool, sharding: Sharding, counted: Measurement
) -> list[Memory]:
    """List temporary memory: one row for each phase that was measured."""
    is_cached, moved = args.cache_prompt_embeds != "off", parts.moved if args.offload_frozen is not None else []
    encoders = [name for name in (parts.others if is_cached else moved) if name not in parts.decodes]
    decoders = [name for name in moved if name in parts.decodes]
    gathered = _weigh_gathered(parts, args, copies_reference, sharding)
    memory = []
    for phase, count in counted.peaks.items():
        if phase == UPDATE and copies_reference and args.offload_ref_model and not _divides_reference(args, sharding):
            # for its pass, which has no gradient, the reference comes from CPU memory
            without_gradient = (
                counted.peaks.get(DENOISING, 0) * args.per_device_train_batch_size // args.rollout_call_size
            )
            count = max(count, _weigh_networks(parts, args, False) + _weigh_buffers(parts) + without_gradient)
        elif phase == ENCODING and is_cached:
            memory.append(Memory(NAMES[phase], count + _weigh_others(parts, encoders), phase=PREPARING))
            continue
        elif phase != UPDATE:
            present = {ENCODING: encoders, DECODING: decoders}.get(phase, [])
            count += gathered + _weigh_others(parts, present)
        memory.append(Memory(NAMES[phase], count, phase=phase))
    return memory


def _weigh_gathered(parts: Parts, args: DiffusionGRPOConfig, copies_reference: bool, sharding: Sharding) -> int:
    """Return the bytes that a process holds besides its shard while samples are made and weights are gathered."""
    gathers = {"zero3": args.ds3_gather_for_generation, "fsdp2": args.fsdp_gather_for_generation}
    if sharding.processes == 1 or not gathers.get(sharding.name):
        return 0
    whole = _weigh_networks(parts, args, sharding.is_deepspeed)
    if sharding.name == "zero3" and copies_reference and _divides_reference(args, sharding):
        whole *= 2  # FSDP2 gathers the policy only
    return whole if sharding.offload_parameters else whole - sharding.share(whole, True)


# Weights


def _weigh_networks(parts: Parts, args: DiffusionGRPOConfig, is_cast: bool) -> int:
    """Return the bytes of the networks' weights, undivided and without buffers; `is_cast` if by DeepSpeed."""
    if is_cast and (args.bf16 or args.fp16) and not parts.specs:
        return sum(2 * p.numel() if p.is_floating_point() else p.nbytes for p in parts.model.parameters())
    return count_bytes(parts.trained) + _weigh_frozen(parts) - _weigh_buffers(parts)


def _weigh_frozen(parts: Parts) -> int:
    """Return the bytes of the frozen weights and the buffers of the trained networks."""
    return sum(weigh(network, parts.specs.get(name), is_frozen=True) for name, network in parts.networks.items())


def _weigh_buffers(parts: Parts) -> int:
    """Return the bytes of the buffers of the trained networks, which each process has whole."""
    return sum(count_bytes(network.buffers()) for network in parts.networks.values())


def _weigh_others(parts: Parts, names: Iterable[str]) -> int:
    return sum(weigh(parts.others[name], parts.specs.get(name)) for name in names)


def weigh(network: nn.Module, spec: Any = None, is_frozen: bool = False) -> int:
    """Return the bytes of a network's weights and buffers, SD3's table of positions for example."""
    quantised = {} if spec is None else {id(x): x for x in list_linear_weights(network)}
    left = [p for p in network.parameters() if id(p) not in quantised and not (is_frozen and p.requires_grad)]
    return count_bytes([*left, *network.buffers()]) + sum(count_quantised_bytes(w, spec) for w in quantised.values())


def list_linear_weights(network: nn.Module) -> list[nn.Parameter]:
    """Return the frozen weights of linear layers, which every backend of `quantization` compresses."""
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return [layer.weight for layer in layers if not layer.weight.requires_grad]


def count_quantised_bytes(weight: Tensor, spec: Any) -> int:
    """Return the bytes of a linear layer's (out, in) weight as a backend keeps it, with its scales."""
    backend, options = getattr(spec, "backend", ""), getattr(spec, "options", {})
    if backend == "bitsandbytes_4bit" or getattr(spec, "load_in_4bit", False):
        blocks = math.ceil(weight.numel() / WEIGHT_BLOCK)
        is_nested = options.get("bnb_4bit_use_double_quant") or getattr(spec, "bnb_4bit_use_double_quant", False)
        scales = blocks + 4 * math.ceil(blocks / OPTIMIZER_BLOCK) if is_nested else 4 * blocks
        return math.ceil(weight.numel() / 2) + scales
    bits = {"int4": 4, "int2": 2}.get(options.get("weights_dtype"), 8)  # quanto
    return math.ceil(weight.numel() * bits / 8) + 4 * len(weight)  # a scale per row


# Blocks


def measure_groups(network: nn.Module, args: DiffusionGRPOConfig) -> int:
    """Return the bytes of frozen weights and buffers that are on the accelerator at a time with `group_offload`."""
    copies = 2 if args.group_offload_stream else 1
    # see diffusers' `apply_group_offloading`; a stream fetches the next group early
    if args.group_offload == "block_level":
        lists = [list(child) for child in network.children() if isinstance(child, (nn.ModuleList, nn.Sequential))]
        size = 1 if args.group_offload_stream else args.group_offload_blocks
        groups = [sum(map(_weigh_fixed, x[start : start + size])) for x in lists for start in range(0, len(x), size)]
        outside = _weigh_fixed(network) - sum(_weigh_fixed(block) for blocks in lists for block in blocks)
        return outside + copies * max(groups, default=0)
    around = {"": 0}
    sizes = {name: _weigh_fixed(module, recurse=False) for name, module in network.named_modules()}
    for name, size in sizes.items():  # those of a module come after it
        around[name] = around[name.rpartition(".")[0]] + size
    next_layer = sorted(sizes.values())[-2] if args.group_offload_stream else 0
    blocks = map(_weigh_fixed, _list_recomputed(network)) if args.activation_checkpointing else []
    return max(max(around.values()) + next_layer, sum(sorted(blocks)[-copies:]))


def _list_recomputed(network: nn.Module) -> list[nn.Module]:
    """Return the blocks that gradient checkpointing recomputes: those in the lists of modules with diffusers' flag."""
    flag = "gradient_checkpointing"
    owners = [module for module in network.modules() if hasattr(module, flag)]
    lists = [child for owner in owners for child in owner.children() if isinstance(child, nn.ModuleList)]
    # a block with a flag of its own recomputes its own blocks instead
    return [block for blocks in lists for block in blocks if not hasattr(block, flag)]


def _weigh_fixed(module: nn.Module, recurse: bool = True) -> int:
    frozen = [p for p in module.parameters(recurse) if not p.requires_grad]
    return count_bytes([*frozen, *module.buffers(recurse)])


def _weigh_pinned(parts: Parts) -> int:
    """Return the bytes of page-locked memory for frozen weights: torch rounds each tensor up to a power of two."""
    tensors = [x for network in parts.networks.values() for x in (*network.parameters(), *network.buffers())]
    # see `CachingHostAllocator` in https://github.com/pytorch/pytorch/issues/150517
    return sum(1 << (x.nbytes - 1).bit_length() for x in tensors if x.nbytes and not x.requires_grad)


def measure_largest_unit(network: nn.Module) -> int:
    """Return the bytes of the units that FSDP2 has gathered at a time: its largest block, and what is in no block."""
    named = set(getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ())
    units = {name: module for name, module in network.named_modules() if not name or type(module).__name__ in named}
    owners: dict[nn.Parameter, str] = {}
    for name, module in units.items():  # inner units come after outer ones
        owners |= dict.fromkeys(module.parameters(), name)
    sizes: Counter[str] = Counter()
    for parameter, name in owners.items():
        sizes[name] += parameter.nbytes
    return sizes.pop("", 0) + max(sizes.values(), default=0)


# Optimizers


def count_optimizer_bytes(trained: list[nn.Parameter], args: DiffusionGRPOConfig) -> int:
    """Count the bytes that the configured optimizer keeps after a step."""
    name = OptimizerNames(args.optim).value
    # bitsandbytes needs a GPU for a step; it keeps one byte per value and a float32 per block of 256
    if "8bit" in name:
        count = 1 if any(word in name for word in ("lion", "rmsprop")) else 3 if "ademamix" in name else 2
        sizes = [p.numel() for p in trained]
        small = sum(4 * size for size in sizes if size < OPTIMIZER_SMALL)
        large = sum(size + 4 * math.ceil(size / OPTIMIZER_BLOCK) for size in sizes if size >= OPTIMIZER_SMALL)
        return count * (small + large)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    alike = Counter((p.shape, p.dtype) for p in trained)
    copies = {nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")): n for (shape, dtype), n in alike.items()}
    kwargs = {name: value for name, value in kwargs.items() if name != "fused"}  # fused kernels need a device
    optimizer = cls([*copies], **kwargs | {"lr": kwargs["lr"] or 0.0})
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    optimizer.step()
    states = {copy: filter(torch.is_tensor, state.values()) for copy, state in optimizer.state.items()}
    return sum(copies[copy] * count_bytes(tensors) for copy, tensors in states.items())
