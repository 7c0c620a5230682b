"""How a checkpoint was written: by how many processes, and how these divided the state.

A small file in a checkpoint's folder records it. A mode is a dict: `processes`, `zero_stage` (0 without DeepSpeed),
`fsdp` (0 or 1), and `networks_apart`: 1 if DeepSpeed's optimizer has parameter groups for each of several networks.
The file also has the name of the optimizer, `optim`.
"""

import json
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME

from .sharded_checkpoints import has_shards

MODE_FILE = "processes.json"
# names of transformers for optimizers with the same state; a paged optimizer has that of the ordinary one
SAME_STATE = {
    "adamw_torch_fused": "adamw_torch",
    "adamw_torch_xla": "adamw_torch",
    "adamw_torch_npu_fused": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "ademamix_32bit": "ademamix",
    "rmsprop_bnb_32bit": "rmsprop_bnb",
}


def write_mode(folder: Path, mode: dict[str, int], optimizer: str) -> None:
    """Record in a checkpoint how many processes wrote it, and how, and the name of the optimizer in the settings."""
    (folder / MODE_FILE).write_text(json.dumps(mode | {"optim": optimizer}), encoding="utf-8")


def find_other_optimizer(folder: Path, optimizer: str) -> str | None:
    """Return the name of the optimizer that wrote a checkpoint if it keeps another state than `optimizer`."""
    wrote = json.loads((folder / MODE_FILE).read_text(encoding="utf-8"))["optim"]
    names = [name.removeprefix("paged_") for name in (wrote, optimizer)]
    there, here = (SAME_STATE.get(name, name) for name in names)
    return None if there == here else wrote


def read_mode(folder: Path) -> str:
    """Return in words how a checkpoint was written."""
    return describe_mode(json.loads((folder / MODE_FILE).read_text(encoding="utf-8")))


def describe_mode(mode: dict[str, int]) -> str:
    """Return a mode in words: `by 2 processes with ZeRO-3`."""
    number = "one process" if mode["processes"] == 1 else f"{mode['processes']} processes"
    engine = f"ZeRO-{mode['zero_stage']}" if mode["zero_stage"] else "FSDP2" if mode["fsdp"] else None
    engine = f"{engine} and an optimizer group per network" if mode.get("networks_apart") and engine else engine
    return f"by {number} with {engine}" if engine else f"by {number} with whole weights"


def check_separate_disks(mode: dict[str, int], output_dir: str) -> None:
    """Refuse to write shares of a checkpoint to disks of which no process sees all."""
    if mode["zero_stage"] or mode["fsdp"]:
        raise ValueError(
            f"output_dir={output_dir!r} is not the same folder on all machines, and each would save a part of every "
            f"checkpoint, written {describe_mode(mode)}; choose a folder on a disk that they share, or set "
            "save_only_model=True."
        )


def is_readable(folder: Path, mode: dict[str, int]) -> bool:
    """Return whether optimizer state can be read: DeepSpeed's only in the mode in which it was written."""
    is_engines = any(folder.glob("global_step*"))
    if mode["zero_stage"]:
        return is_engines and read_mode(folder) == describe_mode(mode)
    return not is_engines


def find_missing_state(folder: Path, needed: tuple[str, ...]) -> str | None:
    """Return what a checkpoint lacks of the optimizer's and the schedule's state, in words for a message."""
    if not ((folder / OPTIMIZER_NAME).is_file() or has_shards(folder) or any(folder.glob("global_step*"))):
        return "optimizer state"
    return next((name for name in needed if not (folder / name).is_file()), None)
