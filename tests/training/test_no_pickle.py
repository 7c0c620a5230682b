"""Nothing that a resume reads from a folder runs code: each file is replaced by one that would, when unpickled."""

import pickle
import shutil
import types

import pytest
import torch
from poison import write_poison
from safetensors import SafetensorError
from tiny_runs import trainer_for

from diffusion_grpo.rewards.models.base import read_weights
from diffusion_grpo.training.checkpoints import write_manifest
from diffusion_grpo.weights.files import load_policy, load_weights
from tests.training.test_damage import SETTINGS

VALUED = SETTINGS | {"ema_decay": 0.9, "advantage_estimator": "gae", "max_steps": 2}
READ = [
    "adapter_model.safetensors",
    "policy/adapter_model.safetensors",
    "optimizer.pt",
    "processes.json",
    "rng_state.pth",
    "rollout-rank0.safetensors",
    "scheduler.pt",
    "trainer_state.json",
    "value_model.safetensors",
]
NOT_READ = ["adapter_config.json", "pytorch_lora_weights.safetensors"]
# names that transformers, peft or diffusers look for, and what would be read in their place
FALLBACKS = ["adapter_model.bin", "optimizer.bin", "pytorch_model.bin", "training_args.bin", "rng_state_0.pth"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Within a rollout, with an average and a value model."""
    folder = tmp_path_factory.mktemp("whole")
    trainer_for(folder, **VALUED | {"max_steps": 1}).train()
    return folder / "checkpoint-1"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "checkpoint-1")


def test_these_are_all_files_of_a_checkpoint(checkpoint):
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    unread = {*NOT_READ, "manifest.json", *(f"policy/{name}" for name in NOT_READ)}
    assert names - unread == set(READ)


@pytest.mark.parametrize("name", READ)
def test_no_file_that_is_read_runs_code(copy, tmp_path, name):
    write_poison(copy / name, tmp_path / "ran")
    write_manifest(copy)  # whoever prepares a folder prepares that too
    trainer = trainer_for(tmp_path / "again", **VALUED)
    with pytest.raises((pickle.UnpicklingError, SafetensorError, ValueError)):
        trainer.train(resume_from_checkpoint=str(copy))
    assert not (tmp_path / "ran").exists()


def test_no_file_beside_them_runs_code(copy, tmp_path):
    for name in NOT_READ + FALLBACKS:
        write_poison(copy / name, tmp_path / "ran")
    write_manifest(copy)
    trainer = trainer_for(tmp_path / "again", **VALUED)
    trainer.train(resume_from_checkpoint=str(copy))
    assert trainer.state.global_step == 2 and not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_taken_where_safetensors_are_missing(tmp_path):
    trainer = trainer_for(tmp_path / "run", lora=False)
    trainer.save_model(str(tmp_path / "saved"))
    folder = tmp_path / "saved" / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    write_poison(folder / "diffusion_pytorch_model.bin", tmp_path / "ran")
    saved = tmp_path / "saved"
    with pytest.raises(OSError, match="diffusion_pytorch_model.safetensors"):
        load_policy(trainer.model, trainer.policy.component, saved)
    with pytest.raises(OSError, match="diffusion_pytorch_model.safetensors"):
        load_weights(trainer.pipe, saved)
    assert not (tmp_path / "ran").exists()


def test_the_scaler_of_half_precision_runs_no_code(tmp_path):
    trainer = trainer_for(tmp_path / "run")
    trainer.accelerator.scaler = types.SimpleNamespace(load_state_dict=lambda state: None)
    write_poison(tmp_path / "scaler.pt", tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError):
        trainer._load_scaler(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_weights_of_a_reward_run_no_code(tmp_path):
    write_poison(tmp_path / "weights.pt", tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError):
        read_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert (tmp_path / "ran").is_dir()  # the poison works
