"""Bytes of a run on one process, by kind: those that are always in use, and those of each phase."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from ..algorithms.base import Algorithm
from ..algorithms.registry import load_algorithm
from ..config.settings import DiffusionGRPOConfig
from ..training.lazy_modules import list_text_encoders
from ..training.memory import count_bytes
from .batches import Batches
from .measure import DECODING, DENOISING, ENCODING, UPDATE, Measurement
from .sharding import Sharding

LOADING = "loading"  # before anything is on the accelerator
PREPARING = "preparing"  # prompts are encoded before the network is on the accelerator
ALONE = (LOADING, PREPARING)  # phases without the other kinds
OPTIMIZER_BLOCK = 256  # values that share a scale in the 8-bit states of bitsandbytes
OPTIMIZER_SMALL = 4096  # bitsandbytes keeps 32-bit states for smaller tensors
WEIGHT_BLOCK = 64  # values that share a scale in the 4-bit weights of bitsandbytes


@dataclass
class Memory:
    """Bytes of one kind on one process."""

    name: str
    accelerator: int = 0
    cpu: int = 0
    basis: str = ""
    phase: str = ""


def add_up(memory: list[Memory]) -> Memory:
    """Return the peak memory: all kinds that are always in use, and the largest phase.

    The phase of the result is the one in which the accelerator holds the most bytes.
    """
    phases = dict.fromkeys(["", *(item.phase for item in memory)])
    sums: dict[str, list[int]] = {"accelerator": [], "cpu": []}
    for where, found in sums.items():
        for phase in phases:
            there = [i for i in memory if i.phase == phase or (not i.phase and phase not in ALONE)]
            found.append(sum(getattr(item, where) for item in there))
    most = max(sums["accelerator"])
    return Memory("most at a time", most, max(sums["cpu"]), phase=list(phases)[sums["accelerator"].index(most)])


@dataclass
class Parts:
    """What a pipeline is made of, with fake tensors for weights."""

    model: nn.Module
    networks: dict[str, nn.Module]
    others: dict[str, nn.Module] = field(default_factory=dict)
    specs: dict[str, Any] = field(default_factory=dict)
    moved: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()

    def weigh_others(self, names: Iterable[str]) -> int:
        """Return the bytes of some of the other networks."""
        return sum(weigh(self.others[name], self.specs.get(name)) for name in names)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The weights that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def frozen(self) -> int:
        """Bytes of the frozen weights and the buffers of the trained networks."""
        return sum(weigh(network, self.specs.get(name), is_frozen=True) for name, network in self.networks.items())

    @property
    def buffers(self) -> int:
        """Bytes of the buffers of the trained networks, which each process has whole."""
        return sum(count_bytes(network.buffers()) for network in self.networks.values())


def estimate_memory(
    parts: Parts,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    sharding: Sharding,
    counted: Measurement | None,
    batches: Batches,
) -> list[Memory]:
    """Estimate the bytes on one process, by kind."""
    found = [*_list_state(parts, args, sharding), *_list_copies(parts, args, peft_config, sharding)]
    found += _list_frozen(parts, args)
    found.append(_plan_loading(parts, sharding))
    if counted is None:
        return found
    trajectory = batches.samples_per_process * (counted.sample_bytes + batches.trained_steps * counted.step_bytes)
    found.append(_place("trajectory", trajectory, args.offload_trajectories, "recorded by the rollout's own code"))
    has_copy, is_divided = _has_reference(args, peft_config), _divides_reference(args, sharding)
    is_gathered = has_copy and is_divided and sharding.name == "zero3"  # FSDP2 gathers the policy only
    gathered = _weigh_gathered(parts, args, 2 if is_gathered else 1, sharding)
    visits = has_copy and args.offload_ref_model and not is_divided
    visiting = _weigh_weights(parts, args, False) + parts.buffers if visits else 0
    return found + _list_phases(parts, args, counted, batches, gathered, visiting)


def _plan_loading(parts: Parts, sharding: Sharding) -> Memory:
    """Return what a process holds in CPU memory while it loads; networks that are sharded stay in their files."""
    loaded, basis = parts.weigh_others(parts.others), "networks are read as they are sharded"
    if not sharding.parameters:
        loaded += parts.frozen + count_bytes(parts.trained)
        basis = "before it moves to the accelerator"
    return Memory("pipeline as it is loaded", 0, loaded, basis, LOADING)


def _list_state(parts: Parts, args: DiffusionGRPOConfig, sharding: Sharding) -> list[Memory]:
    """List weights, gradients and optimizer states, as they are divided among the processes."""
    trained = parts.trained
    own, grads = count_bytes(trained), count_bytes(trained)
    flat = [nn.Parameter(torch.empty(sum(p.numel() for p in trained), device="meta"))]  # which DeepSpeed makes of them
    states = count_optimizer_bytes(flat if sharding.keeps_masters else trained, args)
    whole, masters = _weigh_weights(parts, args, sharding.keeps_masters), 0
    if sharding.keeps_masters:
        masters = 4 * sum(p.numel() for p in trained)  # whatever the dtype of the weights
        grads = masters // 2 if args.bf16 or args.fp16 else grads
    engine, away, away_optimizer = sharding.basis, sharding.offload_parameters, sharding.offload_optimizer
    weights = _place("parameters", sharding.share(whole, sharding.parameters), away, engine)
    weights.accelerator += parts.buffers
    found = [
        weights,
        _place("gradients", sharding.share(grads, sharding.gradients), away_optimizer, engine),
        _place("optimizer", sharding.share(states + masters, sharding.optimizer), away_optimizer, engine),
    ]
    if args.group_offload is not None:
        groups = [measure_groups(network, args) for network in parts.networks.values()]
        present = own + max(groups)  # experts take turns, and the groups of one leave before those of the next come
        waiting = _weigh_pinned(parts) if args.group_offload_stream else parts.frozen
        present = min(present, whole + parts.buffers)
        found[0] = Memory("parameters", present, waiting, "the blocks that work, and what is trained")
    if sharding.copies_gradients:
        found.append(Memory("gradient buckets", grads, basis="DDP's copies for the all-reduce"))
    if sharding.parameters and sharding.processes > 1:
        found.append(_weigh_block(parts, args, sharding))
    if sharding.bucket:
        bucket = sharding.bucket * (2 if args.bf16 or args.fp16 else 4)
        found.append(Memory("gradient bucket", bucket, basis="DeepSpeed's buffer, as large as its configuration says"))
    quantised = [network for name, network in parts.networks.items() if name in parts.specs]
    if quantised:
        largest = max(map(_weigh_dense, quantised))
        found.append(Memory("restored layer", largest, basis="the largest quantised layer, while it is used"))
    return found


def _weigh_block(parts: Parts, args: DiffusionGRPOConfig, sharding: Sharding) -> Memory:
    """Return the weights that a process has whole at a time while the network works, if they are sharded."""
    if sharding.name == "fsdp2":
        unit = measure_largest_unit(parts.networks.values())
        return Memory("gathered block", unit, basis="FSDP2's largest block, and what is in none")
    size = 2 if args.bf16 or args.fp16 else 4  # bytes of a weight that DeepSpeed has cast
    kept = size * (sharding.live_weights + count_largest_block(parts.model))
    kept = min(_weigh_weights(parts, args, is_cast=True), kept)
    phase = UPDATE if args.ds3_gather_for_generation else ""  # rollouts gather the whole network
    basis = "the most that ZeRO-3 keeps gathered (stage3_max_live_parameters)"
    return Memory("gathered blocks", kept, basis=basis, phase=phase)


def _weigh_weights(parts: Parts, args: DiffusionGRPOConfig, is_cast: bool) -> int:
    """Return the bytes of all weights of the networks, undivided and without buffers."""
    if is_cast and (args.bf16 or args.fp16) and not parts.specs:
        return sum(2 * p.numel() if p.is_floating_point() else p.nbytes for p in parts.model.parameters())
    return count_bytes(parts.trained) + parts.frozen - parts.buffers


def _has_reference(args: DiffusionGRPOConfig, peft_config: PeftConfig | None) -> bool:
    """Return whether the run copies the networks as a reference."""
    return args.needs_reference and peft_config is None


def _divides_reference(args: DiffusionGRPOConfig, sharding: Sharding) -> bool:
    """Return whether each process has only a share of the reference. ZeRO-3 keeps it whole if it is offloaded."""
    return sharding.parameters and (sharding.name == "fsdp2" or not args.offload_ref_model)


def _weigh_gathered(parts: Parts, args: DiffusionGRPOConfig, copies: int, sharding: Sharding) -> int:
    """Return the bytes that a process holds besides its shard while samples are made and weights are gathered."""
    gathers = {"zero3": args.ds3_gather_for_generation, "fsdp2": args.fsdp_gather_for_generation}
    if sharding.processes == 1 or not gathers.get(sharding.name):
        return 0
    whole = copies * _weigh_weights(parts, args, sharding.keeps_masters)
    return whole if sharding.offload_parameters else whole - sharding.share(whole, True)


def _list_copies(
    parts: Parts, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, sharding: Sharding
) -> list[Memory]:
    """List copies of the weights: the reference, the moving average, the old policy."""
    found = []
    own = sharding.share(count_bytes(parts.trained), sharding.parameters)
    if _has_reference(args, peft_config):
        is_divided = _divides_reference(args, sharding)
        is_away = args.offload_ref_model or is_divided and sharding.offload_parameters
        whole = _weigh_weights(parts, args, is_divided and sharding.keeps_masters)  # else the engine does not see it
        reference = _place("reference", sharding.share(whole, is_divided), is_away, "a copy of the network")
        if args.offload_ref_model and not is_divided:
            reference.cpu += parts.buffers
        else:
            reference.accelerator += parts.buffers
        found.append(reference)
    if args.ema_decay is not None:
        found.append(Memory("moving average", own, basis=sharding.basis))
    if has_old_policy(args):
        found.append(Memory("old policy", own, basis=sharding.basis))
    return found


def _list_frozen(parts: Parts, args: DiffusionGRPOConfig) -> list[Memory]:
    """List the frozen parts; those that are moved are on the accelerator only in their phase."""
    released = list_text_encoders(parts.others) if _are_prompts_cached(args) else []
    there = [name for name in parts.others if name not in released]
    moved = [name for name in there if name in parts.moved and args.offload_frozen is not None]
    stay = parts.weigh_others(name for name in there if name not in moved)
    return [Memory("frozen parts", stay, parts.weigh_others(moved), "text encoders, VAE and the like")]


def _list_phases(
    parts: Parts, args: DiffusionGRPOConfig, counted: Measurement, batches: Batches, gathered: int, visiting: int
) -> list[Memory]:
    """List temporary memory: one row for each phase that was measured."""
    moved = parts.moved if args.offload_frozen is not None else ()
    cached, found = _are_prompts_cached(args), []
    size = args.per_device_train_batch_size
    without_gradient = counted.peaks.get(DENOISING, 0) * size // args.rollout_call_size
    for phase, name, basis in (
        (ENCODING, "encoding prompts", "the most at a time, for one call of a rollout"),
        (DENOISING, "denoising", "the most at a time, for one call of a rollout"),
        (DECODING, "decoding", "the most at a time, for one call of a rollout"),
        (UPDATE, "activations", "the most at a time in one micro-batch's forward and backward pass"),
    ):
        if phase not in counted.peaks:
            continue
        count = counted.peaks[phase]
        if phase == ENCODING:
            encoders = parts.others if cached else moved
            count += parts.weigh_others(n for n in encoders if n in parts.others and n not in parts.decodes)
        if phase == DECODING:
            count += parts.weigh_others(n for n in moved if n in parts.decodes)
        if phase == ENCODING and cached:
            found.append(Memory(name, count, 0, "text encoders at work, before the network is loaded", PREPARING))
        elif phase == UPDATE and visiting and visiting + without_gradient > count:
            count = visiting + without_gradient
            found.append(Memory(name, count, 0, "the reference's pass, for which it comes from CPU memory", phase))
        elif phase != UPDATE and gathered:
            found.append(Memory(name, count + gathered, 0, basis + ", and the network, gathered whole", phase))
        else:
            found.append(Memory(name, count, 0, basis, phase))
    released = list_text_encoders(parts.others) if cached else []
    rest = [name for name in moved if name in parts.others and name not in released]
    if counted.tokens and rest:
        most = max(parts.weigh_others([name]) for name in rest)
        found.append(Memory("decoding", most, 0, "the largest part that turns tokens into samples", DECODING))
    elif cached and (encoders := [name for name in rest if name not in parts.decodes]):
        basis = "parts that work in each rollout although prompts are cached"
        found.append(Memory("encoding prompts", parts.weigh_others(encoders), 0, basis, ENCODING))
    if args.cache_prompt_embeds == "memory":
        prompts = counted.prompt_bytes * (batches.prompts or 0)
        found.append(Memory("prompt embeddings", 0, prompts, "at most, of all prompts"))
    return found


def _are_prompts_cached(args: DiffusionGRPOConfig) -> bool:
    return args.cache_prompt_embeds != "off"


def _place(name: str, count: int, is_on_cpu: bool, basis: str) -> Memory:
    return Memory(name, 0 if is_on_cpu else count, count if is_on_cpu else 0, basis)


def find_planned_algorithm(args: DiffusionGRPOConfig) -> Algorithm:
    """Return the algorithm, with only those settings on which its memory depends."""
    return load_algorithm(args.loss_type, args.loss_kwargs, anchor=args.anchor)


def has_old_policy(args: DiffusionGRPOConfig) -> bool:
    """Return whether the algorithm keeps an old policy."""
    return args.is_renoised and find_planned_algorithm(args).old_decay is not None


def keeps_means(args: DiffusionGRPOConfig) -> bool:
    """Return whether a rollout keeps the mean of each trained step in addition to the latents."""
    return args.anchor != "own" and args.recording.old == "mean"


# Quantised weights


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
    """Return the bytes of a weight as a backend keeps it, with its scales.

    Args:
        weight: (out, in) weight of a linear layer.
    """
    backend, options = getattr(spec, "backend", ""), getattr(spec, "options", {})
    if backend == "bitsandbytes_4bit" or getattr(spec, "load_in_4bit", False):
        blocks = math.ceil(weight.numel() / WEIGHT_BLOCK)
        is_nested = options.get("bnb_4bit_use_double_quant") or getattr(spec, "bnb_4bit_use_double_quant", False)
        scales = blocks + 4 * math.ceil(blocks / OPTIMIZER_BLOCK) if is_nested else 4 * blocks
        return math.ceil(weight.numel() / 2) + scales
    bits = {"int4": 4, "int2": 2}.get(options.get("weights_dtype"), 8)  # quanto
    return math.ceil(weight.numel() * bits / 8) + 4 * len(weight)  # a scale per row


def _weigh_dense(network: nn.Module) -> int:
    """Return the bytes of the largest linear layer, as it is restored for a multiplication."""
    return max((weight.nbytes for weight in list_linear_weights(network)), default=0)


# Blocks


def measure_groups(network: nn.Module, args: DiffusionGRPOConfig) -> int:
    """Return the bytes of frozen weights and buffers that are on the accelerator at a time with `group_offload`.

    With "block_level", this is what lies outside the blocks, which stays for a whole pass, and the largest group. With
    "leaf_level", it is the largest layer, plus weights that the modules around it own. With gradient checkpointing, it
    is at least a whole block. If the next group is fetched early, it counts too. See diffusers'
    `apply_group_offloading`.
    """
    is_ahead, per_group = args.group_offload_stream, args.group_offload_blocks
    if args.group_offload == "leaf_level":
        return _measure_layers(network, is_ahead, args.activation_checkpointing)
    per_group = 1 if is_ahead else per_group
    lists = [child for child in network.children() if isinstance(child, (nn.ModuleList, nn.Sequential))]
    groups = [
        sum(map(_count_frozen, blocks[start : start + per_group]))
        for blocks in map(list, lists)
        for start in range(0, len(blocks), per_group)
    ]
    outside = _count_frozen(network) - sum(map(_count_frozen, lists))
    return outside + (2 if is_ahead else 1) * max(groups, default=0)


def _measure_layers(network: nn.Module, is_ahead: bool, is_recomputed: bool) -> int:
    """Return the bytes of the layers that are present at a time.

    What is fetched early is the next layer in the order of definition, or the largest of the other blocks.
    """
    own = {module: _count_frozen(module, recurse=False) for module in network.modules()}
    ordered = [module for module in own if own[module]]
    found = [0]
    for chain in _list_chains(network):
        present = [module for module in chain if own[module]]
        after = ordered.index(present[-1]) + 1 if present and is_ahead else len(ordered)
        found.append(sum(own[module] for module in [*present, *ordered[after : after + 1]]))
    if is_recomputed:
        blocks = sorted(map(_count_frozen, _list_recomputed(network)))
        found.append(sum(blocks[-2:] if is_ahead else blocks[-1:]))
    return max(found)


def _list_chains(module: nn.Module, around: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, ...]]:
    """Yield each module without children, after the modules that it is a part of."""
    chain, children = (*around, module), list(module.children())
    if not children:
        yield chain
    for child in children:
        yield from _list_chains(child, chain)


def _list_recomputed(network: nn.Module) -> list[nn.Module]:
    """Return the blocks that gradient checkpointing recomputes.

    Modules of diffusers that recompute what is in their lists have a flag. Those in the list of another one are not
    recomputed as a whole: they recompute their own blocks.
    """
    flag = "gradient_checkpointing"
    return [
        block
        for module in network.modules()
        if hasattr(module, flag)
        for child in module.children()
        if isinstance(child, nn.ModuleList)
        for block in child
        if not hasattr(block, flag)
    ]


def _weigh_pinned(parts: Parts) -> int:
    """Return the bytes of page-locked memory for frozen weights: torch rounds each tensor up to a power of two.

    See `CachingHostAllocator` in https://github.com/pytorch/pytorch/issues/150517.
    """
    networks = parts.networks.values()
    sizes = [x.nbytes for network in networks for x in network.parameters() if not x.requires_grad]
    sizes += [x.nbytes for network in networks for x in network.buffers()]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _count_frozen(module: nn.Module, recurse: bool = True) -> int:
    frozen = [p for p in module.parameters(recurse) if not p.requires_grad]
    return count_bytes([*frozen, *module.buffers(recurse)])


def count_largest_block(model: nn.Module) -> int:
    """Return the number of weights of the largest repeated block of the network."""
    lists = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
    return max((sum(p.numel() for p in block.parameters()) for block in lists), default=0)


def measure_largest_unit(networks: Iterable[nn.Module]) -> int:
    """Return the bytes of the units that FSDP2 has gathered at a time: its largest block, and what is in no block.

    Units are the repeated blocks that a network names. What is in none of them stays gathered for the whole pass.
    Networks take turns.
    """
    most = 0
    for network in networks:
        named = set(getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ())
        owners: dict[nn.Parameter, str] = {}
        for name, module in network.named_modules():  # inner units come after outer ones
            if not name or type(module).__name__ in named:
                owners |= dict.fromkeys(module.parameters(), name)
        sizes: Counter[str] = Counter()
        for parameter, name in owners.items():
            sizes[name] += parameter.nbytes
        most = max(most, sizes.pop("", 0) + max(sizes.values(), default=0))
    return most


def count_optimizer_bytes(trained: list[nn.Parameter], args: DiffusionGRPOConfig) -> int:
    """Count the bytes that the configured optimizer keeps after a step.

    The optimizer's own class takes one step on tensors without values, one tensor per shape. The 8-bit optimizers of
    bitsandbytes need a GPU for a step, so their bytes are computed here: one per value and a float32 per block of 256.
    """
    name = OptimizerNames(args.optim).value
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
