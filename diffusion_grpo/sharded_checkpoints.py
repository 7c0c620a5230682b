"""Weights and optimizer state as FSDP2 keeps them, on disk: torch's distributed checkpoints (DCP).

In: a model, its optimizer and a folder. Out: a folder `dcp` in a checkpoint, to which each process writes its shares
and from which any number of processes, one among them, reads its own. A module of its own because the names in it are
those of parameters and not the places of plain optimizer files.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.trainer import OPTIMIZER_NAME

from .fsdp import as_shard, is_sharded

FOLDER = "dcp"


def has_shards(checkpoint: Path) -> bool:
    """Whether FSDP2 wrote it."""
    return (checkpoint / FOLDER / ".metadata").is_file()


def save_shards(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Every process writes its shares of the trained weights and of the optimizer's state."""
    dcp.save(_state(model, _plain(optimizer)), checkpoint_id=checkpoint / FOLDER)


def restore_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> bool:
    """Optimizer state where FSDP2 wrote it or is to have it; of plain files into plain optimizers `Trainer` knows.

    The weights are not read: they are in the checkpoint's portable files too, bit for bit the same.

    Returns:
        whether there was such state.
    """
    optimizer = _plain(optimizer)
    if has_shards(checkpoint):
        state = {"optimizer": _state(model, optimizer)["optimizer"]}
        dcp.load(state, checkpoint_id=checkpoint / FOLDER)
        options = StateDictOptions(ignore_frozen_params=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=options)
        return True
    file = checkpoint / OPTIMIZER_NAME
    if not is_sharded(model) or not file.is_file():
        return False
    _load_whole(torch.load(file, map_location="cpu", weights_only=True), optimizer)
    return True


def _load_whole(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """State of a plain optimizer into one of sharded parameters, which has them in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, values in saved["state"].items():
        like = parameters[place]
        for name, value in values.items():
            if isinstance(like, DTensor) and torch.is_tensor(value) and value.shape == like.shape:
                values[name] = as_shard(value, like)
    optimizer.load_state_dict(saved)


def _plain(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # inside accelerate's


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    options = StateDictOptions(ignore_frozen_params=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
