"""A reference that follows the policy, sharded or not: what a checkpoint holds of it is what is read back."""

from pathlib import Path

import pytest
import rank_runs
import ranks_server
import torch
from safetensors.torch import load_file
from tiny_runs import are_equal, difference

SETTINGS = {
    "reward_weights": [0.0, 1.0],
    "lora": False,
    "optim": "sgd",
    "learning_rate": 0.1,
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 3,
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "bf16": True,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    full = folder / "transformer"
    return load_file(min((full if full.is_dir() else folder).glob("*.safetensors")))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "own",
    [{"offload_ref_model": False}, {"offload_ref_model": True}, {"lora": True, "learning_rate": 10.0}],
    ids=["on", "offloaded", "lora"],
)
@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_a_moved_reference_is_read_back_bit_for_bit(tmp_path, mode, own):
    """In half precision, into a reference that is whole or sharded; and a resumed run ends where the unbroken did."""
    settings = SETTINGS | own | {"mode": mode}
    ranks_server.succeed(tmp_path, 2, rank_runs.move_reference, tmp_path, settings, limit=600)
    first, last = (tmp_path / "whole" / f"checkpoint-{step}" for step in (1, 3))
    reference = weights(first / "reference")
    assert are_equal(weights(tmp_path / "back" / "reference"), reference) and len(reference) > 4
    assert difference(reference, weights(last / "reference")) > 1e-5  # it has moved
    for part in ("", "reference"):
        assert are_equal(weights(tmp_path / "again" / "checkpoint-3" / part), weights(last / part))
