"""8-bit and 4-bit AdamW by transformers' names: compressed states, checkpointed and resumed bit for bit."""

import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_pipelines import build
from tiny_runs import LORA, are_equal, brightness, trained_weights, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.distributed.fsdp import FSDP2Backend
from diffusion_grpo.training import preflight

FULL = {"lora": False, "learning_rate": 1e-3, "num_inference_steps": 2, "gradient_accumulation_steps": 1}
FULL |= {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step, which takes longer than all else here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(
    ("optim", "kind"),
    [("adamw_torch_8bit", "OptimState8bit"), ("adamw_torch_4bit", "OptimState4bit"), ("adamw_8bit", "")],
)
def test_compressed_states_are_saved_and_resumed(tmp_path, optim, kind):
    if not kind:
        pytest.importorskip("bitsandbytes")
    trainer = trainer_for(tmp_path / "whole", optim=optim, **FULL)
    before = trained_weights(trainer)
    trainer.train()
    states = [
        value for state in trainer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    compressed = [value for value in states if type(value).__name__ == kind or value.dtype == torch.uint8]
    assert compressed and all(value.numel() >= 4096 for value in compressed)
    shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "again" / "checkpoint-1")
    again = trainer_for(tmp_path / "again", optim=optim, **FULL)
    again.train(resume_from_checkpoint=True)
    weights = trained_weights(trainer)
    assert are_equal(weights, trained_weights(again)) and not are_equal(weights, before)


def test_what_cannot_work_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "choose_backend", lambda args: FSDP2Backend.__new__(FSDP2Backend))
    with pytest.raises(ValueError, match="optim='lion_8bit': bitsandbytes cannot step FSDP2's"):
        trainer_for(tmp_path, optim="lion_8bit")
    monkeypatch.undo()
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install bitsandbytes"):
        trainer_for(tmp_path, optim="lion_8bit")


def test_an_optimizer_of_ones_own_has_to_hold_what_is_trained(tmp_path):
    pipe, _ = build("sd3")
    settings = {"train_dataset": Dataset.from_dict({"prompt": ["a cat", "a dog"]}), "reward_funcs": brightness}
    settings["args"] = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True)
    frozen = torch.optim.SGD(pipe.vae.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizers: the optimizer holds none of the weights that are trained"):
        DiffusionGRPOTrainer(model=pipe, peft_config=LoraConfig(**LORA), optimizers=(frozen, None), **settings)
    pipe, _ = build("sd3")
    own = torch.optim.SGD(pipe.transformer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5)
    trainer = DiffusionGRPOTrainer(model=pipe, optimizers=(own, schedule), **settings)
    assert trainer.optimizer is own and trainer.lr_scheduler is schedule
    assert trainer.args.target_change is None and trainer.step_size is None  # it has its own rate
    with pytest.raises(ValueError, match="optimizers: the schedule was made for another optimizer"):
        DiffusionGRPOTrainer(model=pipe, optimizers=(None, schedule), **settings)
