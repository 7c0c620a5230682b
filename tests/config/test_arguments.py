"""The settings that only the command line takes."""

from argparse import ArgumentError
from collections import OrderedDict

import pytest
import torch
from peft import get_peft_model
from trl import ModelConfig, ScriptArguments, TrlParser

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.arguments import LaunchArguments, LoraArguments
from diffusion_grpo.config.parse import parse_train_arguments


def test_lora_arguments_become_a_peft_config(config_file):
    lora = parse_train_arguments(config_file(use_peft=True, lora_r=4, lora_target_modules=["to_q", "to_k"]), [])[1]
    assert (lora.peft_config().r, lora.peft_config().target_modules) == (4, {"to_q", "to_k"})
    lora = parse_train_arguments(config_file(use_peft=True, lora_target_modules=[r".*attn\.to_q"]), [])[1]
    assert lora.peft_config().target_modules == r".*attn\.to_q"
    lora = parse_train_arguments(config_file(use_peft=True, lora_target_modules="to_out.0"), [])[1]
    assert lora.peft_config().target_modules == {"to_out.0"}
    lora = parse_train_arguments(config_file(use_peft=True, lora_target_modules=["all-linear"]), [])[1]
    assert lora.peft_config().target_modules == "all-linear"
    assert parse_train_arguments(config_file(), [])[1].peft_config() is None


def test_a_script_of_the_users_own_parses_them_beside_the_settings_of_a_run():
    """As docs/coming_from/trl.md says; TRL's `ModelConfig` has names that quantization has here, too."""
    words = ["--dataset_name", "owner/prompts", "--output_dir", "out", "--use_cpu", "--height", "64", "--lora_r", "8"]
    parser = TrlParser((ScriptArguments, DiffusionGRPOConfig, LoraArguments))
    script, args, lora = parser.parse_args_and_config([*words, "--use_peft"])
    assert (script.dataset_name, args.height, lora.peft_config().r) == ("owner/prompts", 64, 8)
    with pytest.raises(ArgumentError, match="load_in_8bit"):
        TrlParser((DiffusionGRPOConfig, ModelConfig))


def test_how_a_lora_starts(config_file):
    given = {"use_peft": True, "lora_target_modules": ["to_q", "to_k"]}
    inits = [parse_train_arguments(config_file(**given, lora_init=name), [])[1] for name in ("kaiming", "gaussian")]
    assert [lora.peft_config().init_lora_weights for lora in inits] == [True, "gaussian"]
    spreads = []
    for lora in inits:
        torch.manual_seed(0)
        model = get_peft_model(torch.nn.Sequential(OrderedDict(to_q=torch.nn.Linear(64, 64))), lora.peft_config())
        first, second = (getattr(model.base_model.model.to_q, name)["default"].weight for name in ("lora_A", "lora_B"))
        assert second.eq(0).all()
        spreads.append(first.std().item())
    assert spreads == pytest.approx([(3 * 64) ** -0.5, 1 / 16], rel=0.1)


def test_a_lora_to_train_further_has_its_own_rank():
    assert LoraArguments(use_peft=True).peft_config("folder") is None
    with pytest.raises(ValueError, match="has its own rank and layers; leave out lora_r"):
        LoraArguments(lora_r=4).peft_config("folder")


def test_whether_processes_are_to_be_started():
    assert LaunchArguments().is_empty and not LaunchArguments(machine_rank=0).is_empty
