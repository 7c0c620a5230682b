"""What processes that share the training state cannot do, refused alike by a run and by its plan."""

import pytest

from diffusion_grpo.distributed.refusals import check_group_offload, check_optimizer, check_quantization


@pytest.mark.parametrize(
    ("sharding", "name", "message"),
    [
        ("fsdp2", "adamw_bnb_8bit", "bitsandbytes cannot step FSDP2's sharded tensors; use adamw_torch"),
        ("fsdp2", "adamw_torch_8bit", "FSDP2's checkpoints cannot hold torchao's compressed states"),
        ("zero2", "adamw_torch_4bit", "nearly all states would keep 32 bits; use adamw_8bit, or DDP"),
        ("zero3", "adamw_bnb_8bit", None),
        ("ddp", "adamw_torch_8bit", None),
        ("fsdp2", "adamw_torch", None),
    ],
)
def test_optimizers(sharding, name, message):
    if message is None:
        check_optimizer(sharding, name)
        return
    with pytest.raises(ValueError, match=message):
        check_optimizer(sharding, name)


@pytest.mark.parametrize(
    ("sharding", "method", "message"),
    [
        ("fsdp2", "bitsandbytes_8bit", "FSDP2 cannot shard bitsandbytes_8bit's weights; set load_in_4bit"),
        ("fsdp2", "torchao", "FSDP2 cannot shard torchao's weights"),
        ("zero3", "torchao", "DeepSpeed cannot move or send torchao's weights"),
        ("zero1", "quanto", "DeepSpeed cannot move or send quanto's weights"),
        ("fsdp2", "bitsandbytes_4bit", None),
        ("zero3", "bitsandbytes_8bit", None),
        ("one process", "torchao", None),
    ],
)
def test_quantized_networks(sharding, method, message):
    check_quantization(sharding, [])
    if message is None:
        check_quantization(sharding, [method])
        return
    with pytest.raises(ValueError, match=message):
        check_quantization(sharding, [method])


def test_engines_that_move_weights_themselves_refuse_swapped_blocks():
    check_group_offload("ddp")
    for sharding in ("zero1", "fsdp2"):
        with pytest.raises(ValueError, match="group_offload"):
            check_group_offload(sharding)
