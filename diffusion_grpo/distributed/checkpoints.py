"""Checkpoints of several processes: how one was written, and optimizer state of which each process has a share.

A small file in a checkpoint's folder records its mode, a dict of `processes` and `sharding` ("ddp", "zero1" to "zero3"
or "fsdp2"), and the name of the optimizer, `optim`.

FSDP2's shares are in the folder `optimizer`, as safetensors and JSON, which cannot hold code. Any number of
processes, even a single one, can read their shares from it. torch's distributed checkpoints cut and join the tensors.
DeepSpeed's files are read by its engine, as tensors and plain values only.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..policy.networks import replace_attribute
from .trained_weights import as_shard, is_sharded

MODE_FILE = "processes.json"
# names of transformers for optimizers with the same state; a paged optimizer has that of the ordinary one
SAME_STATE = dict.fromkeys(("adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw_torch")
SAME_STATE |= {"adamw_8bit": "adamw_bnb_8bit", "ademamix_32bit": "ademamix", "rmsprop_bnb_32bit": "rmsprop_bnb"}
ENGINES = {"ddp": "whole weights", "fsdp2": "FSDP2"} | {f"zero{stage}": f"ZeRO-{stage}" for stage in range(4)}
Mode = dict[str, Any]
FOLDER, REST = "optimizer", "optimizer.json"
OPTIONS = StateDictOptions(ignore_frozen_params=True)


# How a checkpoint was written


def write_mode(folder: Path, mode: Mode, optimizer: str) -> None:
    """Record in a checkpoint how many processes wrote it, and how, and the name of the optimizer in the settings."""
    (folder / MODE_FILE).write_text(json.dumps(mode | {"optim": optimizer}), encoding="utf-8")


def find_other_optimizer(folder: Path, optimizer: str) -> str | None:
    """Return the name of the optimizer that wrote a checkpoint if it keeps another state than `optimizer`."""
    wrote = json.loads((folder / MODE_FILE).read_text(encoding="utf-8"))["optim"]
    there, here = (SAME_STATE.get(name, name) for name in (x.removeprefix("paged_") for x in (wrote, optimizer)))
    return None if there == here else wrote


def read_mode(folder: Path) -> str:
    """Return in words how a checkpoint was written."""
    return describe_mode(json.loads((folder / MODE_FILE).read_text(encoding="utf-8")))


def describe_mode(mode: Mode) -> str:
    """Return a mode in words: `by 2 processes with ZeRO-3`."""
    number = "one process" if mode["processes"] == 1 else f"{mode['processes']} processes"
    return f"by {number} with {ENGINES[mode['sharding']]}"


def check_separate_disks(mode: Mode, output_dir: str) -> None:
    """Refuse to write shares of a checkpoint to disks of which no process sees all."""
    if mode["sharding"] != "ddp":
        raise ValueError(
            f"output_dir={output_dir!r} is not the same folder on all machines, and each would save a part of every "
            f"checkpoint, written {describe_mode(mode)}; choose a folder on a disk that they share, or set "
            "save_only_model=True."
        )


def is_readable(folder: Path, mode: Mode) -> bool:
    """Return whether optimizer state can be read: DeepSpeed's only in the mode in which it was written."""
    is_engines = any(folder.glob("global_step*"))
    if mode["sharding"].startswith("zero"):
        return is_engines and read_mode(folder) == describe_mode(mode)
    return not is_engines


def find_missing_state(folder: Path) -> str | None:
    """Return what a checkpoint lacks of the optimizer's and the schedule's state, in words for a message."""
    if not ((folder / OPTIMIZER_NAME).is_file() or has_shards(folder) or any(folder.glob("global_step*"))):
        return "optimizer state"
    return None if (folder / SCHEDULER_NAME).is_file() else SCHEDULER_NAME


# Shares of FSDP2


def has_shards(checkpoint: Path) -> bool:
    """Return whether FSDP2 wrote a checkpoint's optimizer state."""
    return (checkpoint / FOLDER / REST).is_file()


def save_shards(checkpoint: Path, model: nn.Module, optimizer: Optimizer, is_first: bool) -> None:
    """Write this process's shares of the optimizer's state; the first process also writes all that is not a tensor."""
    state = get_optimizer_state_dict(model, _plain(optimizer), options=OPTIONS)
    writer = dcp.HuggingFaceStorageWriter(str(checkpoint / FOLDER), save_distributed=True)
    dcp.save(_tensors(state), storage_writer=writer, no_dist=not torch.distributed.is_initialized())
    if is_first:
        rest = {"param_groups": state["param_groups"], "numbers": _numbers(state)}
        (checkpoint / FOLDER / REST).write_text(json.dumps(rest), encoding="utf-8")


def restore_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> bool:
    """Read optimizer state that FSDP2 wrote, or that a sharded optimizer needs; other state is left to `Trainer`."""
    optimizer = _plain(optimizer)
    if has_shards(checkpoint):
        _load_shards(checkpoint / FOLDER, model, optimizer)
        return True
    file = checkpoint / OPTIMIZER_NAME
    if not is_sharded(model) or not file.is_file():
        return False
    _load_whole(torch.load(file, map_location="cpu", weights_only=True), optimizer)
    return True


def _load_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    state = get_optimizer_state_dict(model, optimizer, options=OPTIONS)  # from a step of size 0, for all parameters
    _fill_rest(json.loads((folder / REST).read_text(encoding="utf-8")), state)
    saved = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    # an expert that had not been trained has no saved state, and must not get any
    idle = {name for name, values in state["state"].items() if not any(f"{name}.{key}" in saved for key in values)}
    used = {name: values for name, values in state["state"].items() if name not in idle}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(_tensors({"state": used}), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=OPTIONS)
    for name, parameter in model.named_parameters():
        if name in idle:
            optimizer.state.pop(parameter, None)


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's tensors under flat names; a number becomes a vector, which DCP can cut."""
    return {
        f"{parameter}.{name}": value.view(1) if value.dim() == 0 else value
        for parameter, values in state["state"].items()
        for name, value in values.items()
        if torch.is_tensor(value)
    }


def _numbers(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what some optimizers keep in addition to tensors, such as Adafactor's `step`."""
    numbers = {
        parameter: {name: value for name, value in values.items() if not torch.is_tensor(value)}
        for parameter, values in state["state"].items()
    }
    return {parameter: values for parameter, values in numbers.items() if values}


def _fill_rest(saved: dict[str, Any], state: dict[str, Any]) -> None:
    """Fill in the optimizer's settings and numbers, in place; lists that were tuples become tuples again."""
    for ours, theirs in zip(state["param_groups"], saved["param_groups"], strict=True):
        if ours["params"] != theirs["params"]:
            raise ValueError("The checkpoint's optimizer state belongs to other parameters than this run trains.")
        for name, value in theirs.items():
            ours[name] = tuple(value) if isinstance(ours.get(name), tuple) else value
    for parameter, numbers in saved["numbers"].items():
        state["state"][parameter] |= numbers


def _load_whole(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Load the state of a plain optimizer into an optimizer of sharded parameters, which have the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, values in saved["state"].items():
        like = parameters[place]
        for name, value in values.items():
            if isinstance(like, DTensor) and torch.is_tensor(value) and value.shape == like.shape:
                values[name] = as_shard(value, like)
    optimizer.load_state_dict(saved)


def _plain(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's optimizer


# Files of DeepSpeed, which would unpickle them and run any code that somebody has put there


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
