"""What a launch configuration divides among the processes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.planning.sharding import Sharding, override_launch_settings

OWN_FILE = {"deepspeed_config_file": "zero3.json"}


@pytest.mark.parametrize(
    ("launch", "name", "divided"),
    [
        ({"distributed_type": "NO", "num_processes": 1}, "one process", (False, False, False)),
        ({"distributed_type": "MULTI_GPU", "num_processes": 4}, "ddp", (False, False, False)),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, "zero1", (True, False, False)),
        ({"distributed_type": "DEEPSPEED"}, "zero2", (True, True, False)),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "zero3", (True, True, True)),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": OWN_FILE}, "zero3", (True, True, True)),
        ({"distributed_type": "FSDP"}, "fsdp2", (True, True, True)),
    ],
)
def test_each_mode_divides_optimizer_gradients_and_parameters(launch, name, divided, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    found = Sharding.of({"num_processes": 2} | launch)
    assert found.name == name and (found.optimizer, found.gradients, found.parameters) == divided


def test_a_share_is_rounded_up_and_a_whole_stays_whole():
    found = Sharding.of({"distributed_type": "FSDP", "num_processes": 2})
    assert found.share(5, is_divided=True) == 3 and found.share(5, is_divided=False) == 5


def test_a_distribution_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="MEGATRON_LM cannot be planned"):
        Sharding.of({"distributed_type": "MEGATRON_LM", "num_processes": 2})


@pytest.mark.parametrize(
    ("zero", "name", "is_offloaded"),
    [
        ({"stage": 3}, "zero3", (False, False)),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "zero3", (False, True)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "zero2", (True, False)),
        ({"stage": 1, "offload_optimizer": {"device": "none"}}, "zero1", (False, False)),
        (None, "zero0", (False, False)),
    ],
)
def test_deepspeed_in_the_settings_goes_before_the_launchers(zero, name, is_offloaded, tmp_path):
    own = {} if zero is None else {"zero_optimization": zero}
    (tmp_path / "own.json").write_text(json.dumps(own))
    for config in (own | {"train_batch_size": "auto"}, str(tmp_path / "own.json")):
        settings = SimpleNamespace(deepspeed=config, fsdp=None)
        launch = override_launch_settings({"distributed_type": "MULTI_GPU", "num_processes": 2}, settings)
        found = Sharding.of(launch)
        assert (found.name, found.processes) == (name, 2)
        assert (found.offload_optimizer, found.offload_parameters) == is_offloaded


@pytest.mark.parametrize(("config", "is_offloaded"), [({}, False), ({"fsdp_cpu_offload": True}, True)])
def test_fsdp_in_the_settings_goes_before_the_launchers(config, is_offloaded, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it
    settings = DiffusionGRPOConfig(str(tmp_path), fsdp=True, fsdp_config=config, use_cpu=True)
    launch = {"distributed_type": "NO", "num_processes": 2}
    assert override_launch_settings(launch, DiffusionGRPOConfig(str(tmp_path), use_cpu=True)) == launch
    found = Sharding.of(override_launch_settings(launch, settings))
    assert (found.name, found.offload_parameters) == ("fsdp2", is_offloaded)


def test_a_file_of_deepspeed_that_cannot_be_read_is_named(tmp_path):
    launch = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    with pytest.raises(ValueError, match="configuration .*missing.json cannot be read"):
        Sharding.of(launch | {"deepspeed_config": {"deepspeed_config_file": str(tmp_path / "missing.json")}})
