"""What processes that share the training state cannot do, refused alike by a run and by its plan."""

import pytest

from diffusion_grpo.distributed.refusals import check_group_offload, check_optimizer, check_quantization

OPTIMIZERS = [
    ("fsdp2", "adamw_bnb_8bit", "bitsandbytes cannot step FSDP2's sharded tensors; use adamw_torch"),
    ("fsdp2", "adamw_torch_8bit", "FSDP2's checkpoints cannot hold torchao's compressed states"),
    ("zero2", "adamw_torch_4bit", "nearly all states would keep 32 bits; use adamw_8bit, or DDP"),
]
METHODS = [
    ("fsdp2", "bitsandbytes_8bit", "FSDP2 cannot shard bitsandbytes_8bit's weights; set load_in_4bit"),
    ("fsdp2", "torchao", "FSDP2 cannot shard torchao's weights"),
    ("zero3", "torchao", "DeepSpeed cannot move or send torchao's weights"),
    ("zero1", "quanto", "DeepSpeed cannot move or send quanto's weights"),
]


@pytest.mark.parametrize(
    ("check", "sharding", "given", "message"),
    [(check_optimizer, *case) for case in OPTIMIZERS]
    + [(check_quantization, sharding, [method], message) for sharding, method, message in METHODS]
    + [
        (check_group_offload, sharding, is_full_training, "group_offload")
        for sharding, is_full_training in (("zero1", False), ("fsdp2", False), ("ddp", True), ("one process", True))
    ],
)
def test_what_an_engine_cannot_do_is_refused(check, sharding, given, message):
    with pytest.raises(ValueError, match=message):
        check(sharding, given)


def test_what_an_engine_can_do_is_not_refused():
    for sharding, name in (("zero3", "adamw_bnb_8bit"), ("ddp", "adamw_torch_8bit"), ("fsdp2", "adamw_torch")):
        check_optimizer(sharding, name)
    for sharding, method in (
        ("fsdp2", "bitsandbytes_4bit"),
        ("zero3", "bitsandbytes_8bit"),
        ("one process", "torchao"),
    ):
        check_quantization(sharding, [method])
    check_quantization("fsdp2", [])
    check_group_offload("ddp", is_full_training=False)
