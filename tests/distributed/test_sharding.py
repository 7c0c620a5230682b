"""What a launch configuration divides among the processes."""

import pytest

from diffusion_grpo.distributed.sharding import Sharding


@pytest.mark.parametrize(
    ("launch", "name", "divided"),
    [
        ({"distributed_type": "NO", "num_processes": 1}, "one process", (False, False, False)),
        ({"distributed_type": "MULTI_GPU", "num_processes": 4}, "ddp", (False, False, False)),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, "zero1", (True, False, False)),
        ({"distributed_type": "DEEPSPEED"}, "zero2", (True, True, False)),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "zero3", (True, True, True)),
        ({"distributed_type": "FSDP"}, "fsdp2", (True, True, True)),
    ],
)
def test_each_mode_divides_optimizer_gradients_and_parameters(launch, name, divided):
    found = Sharding.of({"num_processes": 2} | launch)
    assert found.name == name and (found.optimizer, found.gradients, found.parameters) == divided


def test_a_network_stays_in_its_file_where_its_weights_will_be_sharded():
    modes = {"DEEPSPEED": {"deepspeed_config": {"zero_stage": 3}}, "FSDP": {}, "MULTI_GPU": {}}
    found = {kind: Sharding.of({"distributed_type": kind, "num_processes": 2} | more) for kind, more in modes.items()}
    assert {kind: sharding.loads_late for kind, sharding in found.items()} == {
        "DEEPSPEED": True,
        "FSDP": True,
        "MULTI_GPU": False,
    }


def test_a_share_is_rounded_up_and_a_whole_stays_whole():
    found = Sharding.of({"distributed_type": "FSDP", "num_processes": 2})
    assert found.share(5, is_divided=True) == 3 and found.share(5, is_divided=False) == 5


def test_a_distribution_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="MEGATRON_LM is not planned"):
        Sharding.of({"distributed_type": "MEGATRON_LM", "num_processes": 2})
