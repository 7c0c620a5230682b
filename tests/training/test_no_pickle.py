"""Nothing that a resume reads from a folder runs code: each file is replaced by one that would, when unpickled."""

import os
import pickle
import shutil
import types

import pytest
import torch
import transformers
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from tiny_runs import trainer_for
from torch import nn

from diffusion_grpo.distributed.deepspeed_checkpoints import restore_engine
from diffusion_grpo.distributed.sharded_checkpoints import has_shards, restore_optimizer, save_shards
from diffusion_grpo.rewards.models.base import read_weights
from diffusion_grpo.run.manifest import ResumeError, write_manifest
from diffusion_grpo.run.resume_point import refuse_unreadable
from diffusion_grpo.run.weights import PolicyFiles, load_weights
from tests.run.test_manifest import SETTINGS


class Poison:
    """Unpickled, it makes a folder."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


VALUED = SETTINGS | {"ema_decay": 0.9, "advantage_estimator": "gae", "max_steps": 2}
READ = [
    "adapter_model.safetensors",
    "policy/adapter_model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "rollout-rank0.safetensors",
    "scheduler.pt",
    "trainer_state.json",
    "value_model.safetensors",
]
NOT_READ = ["adapter_config.json", "processes.json", "pytorch_lora_weights.safetensors"]
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


def write_poison(path, mark):
    """As `torch.save` writes it, or as a plain pickle."""
    if path.suffix in (".pt", ".pth", ".bin"):
        torch.save({"state": Poison(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(Poison(mark)))


def test_the_poison_works(tmp_path):
    write_poison(tmp_path / "a.pt", tmp_path / "ran")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").is_dir()


def test_these_are_all_files_of_a_checkpoint(checkpoint):
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    unread = {*NOT_READ, "manifest.json", *(f"policy/{name}" for name in NOT_READ)}
    assert names - unread == set(READ)


@pytest.mark.parametrize("name", READ)
def test_no_file_that_is_read_runs_code(copy, tmp_path, name):
    write_poison(copy / name, tmp_path / "ran")
    write_manifest(copy)  # whoever prepares a folder prepares that too
    trainer = trainer_for(tmp_path / "again", **VALUED)
    with pytest.raises(ResumeError, match="checkpoint-1 (is damaged|holds a file with more than tensors)"):
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
    files = PolicyFiles(trainer.pipe, trainer.policy.component)
    for load in (lambda place: files.load(trainer.model, place), lambda place: load_weights(trainer.pipe, place)):
        with pytest.raises(OSError, match="diffusion_pytorch_model.safetensors"):
            load(tmp_path / "saved")
    assert not (tmp_path / "ran").exists()


def test_the_scaler_of_half_precision_runs_no_code(tmp_path):
    trainer = trainer_for(tmp_path / "run")
    trainer.accelerator.scaler = types.SimpleNamespace(load_state_dict=lambda state: None)
    write_poison(tmp_path / "scaler.pt", tmp_path / "ran")
    with pytest.raises(ResumeError, match="more than tensors"):
        trainer._load_scaler(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth", ".pkl"])
def test_weights_of_a_reward_run_no_code(tmp_path, suffix):
    write_poison(tmp_path / f"weights{suffix}", tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError):
        read_weights(tmp_path / f"weights{suffix}")
    assert not (tmp_path / "ran").exists()


# Sharded state


def trained(optimizer_class, seed=0, steps=3, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optimizer_class(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (transformers.Adafactor, {"lr": 0.1, "relative_step": False}),  # its `step` is a number
    ],
)
def test_sharded_state_comes_back_bit_for_bit(tmp_path, optimizer_class, settings):
    model, optimizer = trained(optimizer_class, **settings)
    save_shards(tmp_path, model, optimizer, is_first=True)
    other, fresh = trained(optimizer_class, seed=1, steps=0, **settings | {"lr": 0.7})
    assert restore_optimizer(tmp_path, other, fresh)
    expected, found = optimizer.state_dict(), fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for place, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(found["state"][place][name]), torch.as_tensor(value)), name


def test_sharded_state_is_safetensors_and_json_and_no_index_is_unpickled(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    save_shards(tmp_path, model, optimizer, is_first=True)
    assert {path.suffix for path in (tmp_path / "optimizer").iterdir()} == {".safetensors", ".json"}
    for folder in (tmp_path / "optimizer", tmp_path / "dcp"):
        folder.mkdir(exist_ok=True)
        write_poison(folder / ".metadata", tmp_path / "ran")
    assert restore_optimizer(tmp_path, model, optimizer) and not (tmp_path / "ran").exists()


def test_state_of_other_parameters_is_refused(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    save_shards(tmp_path, model, optimizer, is_first=True)
    larger = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no optimizer state for 2.weight"):
        restore_optimizer(tmp_path, larger, torch.optim.AdamW(larger.parameters()))
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"0.weight.exp_avg has the shape \(4, 3\), and this run's \(5, 3\)"):
        restore_optimizer(tmp_path, wider, torch.optim.AdamW(wider.parameters()))


def test_pickled_shards_of_an_earlier_version_are_refused(copy, tmp_path):
    (copy / "optimizer.pt").unlink()
    (copy / "dcp").mkdir()
    write_poison(copy / "dcp" / ".metadata", tmp_path / "ran")
    write_manifest(copy)
    assert not has_shards(copy)
    with pytest.raises(ResumeError, match="no optimizer state but one whose index would have to be unpickled"):
        trainer_for(tmp_path / "again", **VALUED).train(resume_from_checkpoint=str(copy))
    assert not (tmp_path / "ran").exists()


# DeepSpeed


def engine(folder):
    """What `restore_engine` uses of one: it reads its files as DeepSpeed's does."""
    own = TorchCheckpointEngine()
    found = types.SimpleNamespace(checkpoint_engine=own, read=None)

    def load_checkpoint(place, load_module_strict):
        found.read = found.checkpoint_engine.load(f"{place}/state.pt", map_location="cpu")

    found.load_checkpoint = load_checkpoint
    return found, own


@pytest.mark.parametrize("zipped", [True, False])
def test_deepspeed_files_run_no_code(tmp_path, zipped):
    torch.save({"module": Poison(tmp_path / "ran")}, tmp_path / "state.pt", _use_new_zipfile_serialization=zipped)
    deepspeed, own = engine(tmp_path)
    with pytest.raises(ResumeError, match="more than tensors"), refuse_unreadable(tmp_path):
        restore_engine(deepspeed, tmp_path)
    assert not (tmp_path / "ran").exists() and deepspeed.checkpoint_engine is own


def test_what_deepspeed_itself_keeps_beside_tensors_is_read(tmp_path):
    kept = {
        "loss_scaler": LossScaler(scale=2.0),
        "dynamic": DynamicLossScaler(
            init_scale=8.0,
            scale_window=10,
            min_scale=1,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
        ),
        "stage": ZeroStageEnum.weights,
        "slices": [{"a": fragment_address(numel=3, start=1)}],
        "shapes": {"a": torch.Size([2, 3])},
        "exp_avg": torch.arange(3.0),
    }
    torch.save(kept, tmp_path / "state.pt")
    deepspeed, _ = engine(tmp_path)
    restore_engine(deepspeed, tmp_path)
    assert deepspeed.read["loss_scaler"].cur_scale == 2.0 and deepspeed.read["dynamic"].cur_scale == 8.0
    assert deepspeed.read["stage"] == 3 and deepspeed.read["slices"][0]["a"].numel == 3
    assert deepspeed.read["shapes"] == kept["shapes"] and torch.equal(deepspeed.read["exp_avg"], kept["exp_avg"])
