"""How a checkpoint was written: by how many processes, and how these divided the state.

A small file in a checkpoint's folder records it. A mode is a dict: `processes`, `zero_stage` (0 without DeepSpeed),
`fsdp` (0 or 1), and `networks_apart`: 1 if DeepSpeed's optimizer has parameter groups for each of several networks.
The file also has the name of the optimizer, `optim`.
"""

import json
from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME

from .sharded_checkpoints import has_pickled_shards, has_shards

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
    path = folder / MODE_FILE
    wrote = json.loads(path.read_text(encoding="utf-8")).get("optim") if path.is_file() else None
    names = [str(name).removeprefix("paged_") for name in (wrote, optimizer)]
    there, here = (SAME_STATE.get(name, name) for name in names)
    return None if wrote is None or there == here else wrote


def read_mode(folder: Path) -> str:
    """Return in words how a checkpoint was written."""
    path = folder / MODE_FILE
    return describe_mode(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else "in another mode"


def describe_mode(mode: dict[str, int]) -> str:
    """Return a mode in words: `by 2 processes with ZeRO-3`."""
    number = "one process" if mode["processes"] == 1 else f"{mode['processes']} processes"
    engine = f"ZeRO-{mode['zero_stage']}" if mode["zero_stage"] else "FSDP2" if mode.get("fsdp") else None
    engine = f"{engine} and an optimizer group per network" if mode.get("networks_apart") and engine else engine
    return f"by {number} with {engine}" if engine else f"by {number} with whole weights"


def is_readable(folder: Path, mode: dict[str, int]) -> bool:
    """Return whether optimizer state can be read: DeepSpeed's only in the mode in which it was written."""
    is_engines = any(folder.glob("global_step*"))
    if mode["zero_stage"]:
        return is_engines and read_mode(folder) == describe_mode(mode)
    return not is_engines


def find_missing_state(folder: Path, needed: tuple[str, ...]) -> str | None:
    """Return what a checkpoint lacks of the optimizer's and the schedule's state, in words for a message.

    Args:
        folder: folder of the checkpoint.
        needed: names of further files that must be there.
    """
    is_there = (folder / OPTIMIZER_NAME).is_file() or has_shards(folder) or any(folder.glob("global_step*"))
    if not is_there:
        old = " but one whose index would have to be unpickled" if has_pickled_shards(folder) else ""
        return f"optimizer state{old}"
    return next((name for name in needed if not (folder / name).is_file()), None)
