"""A reference that follows the policy, sharded or not: what a checkpoint holds of it is what is read back."""

from pathlib import Path

import pytest
import rank_runs
import ranks_server
import torch
from safetensors.torch import load_file
from tiny_runs import SMOOTH

SETTINGS = SMOOTH | {
    "lora": False,
    "optim": "sgd",
    "learning_rate": 0.1,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 3,
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "bf16": True,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    full = folder / "transformer"
    return load_file(next((full if full.is_dir() else folder).glob("*.safetensors")))


def assert_same(some: Path, others: Path) -> None:
    ours, theirs = weights(some), weights(others)
    assert ours.keys() == theirs.keys() and len(ours) > 4
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.distributed
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [2, 3, None], ids=["zero2", "zero3", "fsdp2"])
def test_a_moved_reference_is_read_back_bit_for_bit(tmp_path, stage, offloaded):
    """In half precision, into a reference that is whole or sharded; and a resumed run ends where the unbroken did."""
    check_read_back(tmp_path, SETTINGS | {"offload_ref_model": offloaded}, stage)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3, None], ids=["zero2", "zero3", "fsdp2"])
def test_a_moved_reference_of_a_lora_is_read_back_bit_for_bit(tmp_path, stage):
    check_read_back(tmp_path, SETTINGS | {"lora": True, "learning_rate": 10.0}, stage)


def check_read_back(tmp_path: Path, settings: dict, stage: int | None) -> None:
    ranks_server.succeed(tmp_path, 2, rank_runs.move_reference, tmp_path, settings, stage, limit=600)
    first, last = (tmp_path / "whole" / f"checkpoint-{step}" for step in (1, 3))
    assert_same(tmp_path / "back" / "reference", first / "reference")
    ours, theirs = weights(first / "reference"), weights(last / "reference")
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) > 1e-5  # it has moved
    for part in ("", "reference"):
        assert_same(tmp_path / "again" / "checkpoint-3" / part, last / part)
