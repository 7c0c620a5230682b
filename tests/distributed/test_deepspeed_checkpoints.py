"""What a DeepSpeed engine wrote is read as tensors and plain values only."""

import pickle
import types

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from poison import Poison

from diffusion_grpo.distributed.checkpoints import restore_engine


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
    with pytest.raises(pickle.UnpicklingError):
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
