"""Read the files of a DeepSpeed engine, as tensors and plain values only.

DeepSpeed itself unpickles these files, and would run any code that somebody has put there.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..policy.network_gate import replace_attribute


class TensorsOnly:
    """A wrapper of an engine's checkpoint engine that reads files without calling or importing anything in them."""

    def __init__(self, own: Any):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file written by `torch.save`."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)


def restore_engine(engine: nn.Module, checkpoint: Path) -> None:
    """Restore the weights, optimizer state and schedule of an engine from its checkpoint."""
    with replace_attribute(engine, "checkpoint_engine", TensorsOnly(engine.checkpoint_engine)):
        engine.load_checkpoint(str(checkpoint), load_module_strict=False)
