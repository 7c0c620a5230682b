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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["to_q", "to_k"], {"to_q", "to_k"}),
        ([r".*attn\.to_q"], r".*attn\.to_q"),
        ("to_out.0", {"to_out.0"}),
        (["all-linear"], "all-linear"),
    ],
)
def test_lora_arguments_become_a_peft_config(config_file, given, expected):
    lora = parse_train_arguments(config_file(use_peft=True, lora_r=4, lora_target_modules=given), [])[1].peft_config()
    assert (lora.r, lora.lora_alpha, lora.target_modules) == (4, 32, expected)
    assert parse_train_arguments(config_file(), [])[1].peft_config() is None


def test_a_script_of_the_users_own_parses_them_beside_the_settings_of_a_run():
    """As docs/coming_from/trl.md says; TRL's `ModelConfig` has names that quantization has here, too."""
    words = ["--dataset_name", "owner/prompts", "--output_dir", "out", "--use_cpu", "--height", "64", "--lora_r", "8"]
    parser = TrlParser((ScriptArguments, DiffusionGRPOConfig, LoraArguments))
    script, args, lora = parser.parse_args_and_config([*words, "--use_peft"])
    assert (script.dataset_name, args.height, lora.peft_config().r) == ("owner/prompts", 64, 8)
    with pytest.raises(ArgumentError, match="load_in_8bit"):
        TrlParser((DiffusionGRPOConfig, ModelConfig))


@pytest.mark.parametrize(("init", "spread"), [("kaiming", (3 * 64) ** -0.5), ("gaussian", 1 / 16)])
def test_how_a_lora_starts(init, spread):
    torch.manual_seed(0)
    lora = LoraArguments(use_peft=True, lora_target_modules=["to_q"], lora_init=init).peft_config()
    model = get_peft_model(torch.nn.Sequential(OrderedDict(to_q=torch.nn.Linear(64, 64))), lora)
    first, second = (getattr(model.base_model.model.to_q, name)["default"].weight for name in ("lora_A", "lora_B"))
    assert second.eq(0).all() and first.std().item() == pytest.approx(spread, rel=0.1)


def test_a_lora_to_train_further_has_its_own_rank():
    assert LoraArguments(use_peft=True).peft_config("folder") is None
    with pytest.raises(ValueError, match="has its own rank and layers; leave out lora_r"):
        LoraArguments(lora_r=4).peft_config("folder")


def test_whether_processes_are_to_be_started():
    assert LaunchArguments().is_empty and not LaunchArguments(machine_rank=0).is_empty
