"""What processes that share the training state cannot do: checked before a run, and by its plan."""

from collections.abc import Collection
from typing import NoReturn

# optimizers with compressed states, under transformers' names
TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
# 8 or 32 bits per value; paged optimizers move states between GPU and CPU memory
BITSANDBYTES = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
TENSOR_SUBCLASSES = {"torchao", "quanto"}  # DeepSpeed can neither flatten nor swap these
OWN_STEPS = (
    "with step_selection='prompt' or 'sample' processes would train different ones at once",
    "set step_selection='rollout' or 'sliding'",
)


def check_optimizer(sharding: str, name: str) -> None:
    """Refuse an optimizer that cannot update weights as the processes hold them."""
    if sharding == "fsdp2" and name in (*BITSANDBYTES, *TORCHAO):
        reason = "FSDP2's checkpoints cannot hold torchao's compressed states"
        if name in BITSANDBYTES:
            reason = "bitsandbytes cannot step FSDP2's sharded tensors"
        raise ValueError(f"optim={name!r}: {reason}; use adamw_torch, or DeepSpeed with adamw_8bit.")
    if sharding.startswith("zero") and name in TORCHAO:
        raise ValueError(
            f"optim={name!r} compresses only pieces that consist of whole blocks, and DeepSpeed does not cut the "
            "weights at blocks, so nearly all states would keep 32 bits; use adamw_8bit, or DDP."
        )


def check_quantization(sharding: str, methods: Collection[str]) -> None:
    """Refuse a quantised network that the processes cannot train a LoRA on."""
    for method in sorted({*methods} - {"bitsandbytes_4bit"}) if sharding == "fsdp2" else []:
        raise ValueError(
            f"FSDP2 cannot shard {method}'s weights; set load_in_4bit and bnb_4bit_quant_storage: bfloat16, which "
            "it can, or start without FSDP (DDP), where each process holds the quantised network."
        )
    for method in sorted(TENSOR_SUBCLASSES & {*methods}) if sharding.startswith("zero") else []:
        raise ValueError(
            f"DeepSpeed cannot move or send {method}'s weights, which are tensors of a class of their own; start "
            "without it (DDP), or quantise with bitsandbytes (load_in_4bit, load_in_8bit)."
        )


def check_group_offload(sharding: str, is_full_training: bool) -> None:
    """Refuse group offloading, which moves frozen weights, where there are none or an engine moves them itself."""
    if is_full_training:
        raise ValueError(
            "group_offload moves frozen weights, but full training has none; train a LoRA, or use DeepSpeed with "
            "zero3_offload."
        )
    if sharding not in ("one process", "ddp"):
        raise ValueError(
            "group_offload moves weights that DeepSpeed and FSDP2 move themselves; leave it out (zero3_offload and "
            "fsdp_offload_params keep weights in CPU memory too), or start without them."
        )


def refuse_turns(component: tuple[str, ...], reason: str, change: str) -> NoReturn:
    """Refuse to train several networks that take turns."""
    raise ValueError(
        f"{', '.join(component)} take turns, and {reason}; {change}, or name one network in train_component."
    )
