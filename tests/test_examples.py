"""The examples are run as they are written, shortened only in how long they train."""

import runpy
from pathlib import Path

import pytest

from diffusion_grpo import DiffusionGRPOTrainer
from diffusion_grpo.config.parse import parse_train_arguments

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_demo_in_python_is_the_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its output_dir is relative
    monkeypatch.setattr(DiffusionGRPOTrainer, "train", lambda trainer: None)
    trainer = runpy.run_path(str(EXAMPLES / "demo.py"))["trainer"]
    script, lora, args = parse_train_arguments(str(EXAMPLES / "demo.yaml"), ["--output_dir", args_dir(trainer)])
    assert trainer.args.to_dict() == args.to_dict()
    assert trainer.run["reward_funcs"] == script.reward_funcs and trainer.run["trains_by"] == "LoRA rank 16"
    assert len(trainer.eval_dataset) == script.eval_max_prompts
    assert (tmp_path / "outputs" / "demo-py" / "pytorch_lora_weights.safetensors").is_file()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(any(module in name for name in trained) for module in lora.lora_target_modules)


def args_dir(trainer: DiffusionGRPOTrainer) -> str:
    assert trainer.args.output_dir == "outputs/demo-py"
    return trainer.args.output_dir


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_file_of_settings_is_accepted(file, tmp_path):
    on_cpu = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--fp16", "false"]
    script, _, args = parse_train_arguments(str(EXAMPLES / file), on_cpu)
    assert script.reward_funcs and args.num_generations >= 1
    if args.warmup_steps:
        assert args.lr_scheduler_type != "constant"  # which has no warm-up
