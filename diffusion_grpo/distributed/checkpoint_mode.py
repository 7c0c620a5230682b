"""How a checkpoint was written: by how many processes, and which of them kept what.

In: the trainer's accelerator, or a checkpoint's folder. Out: a small file in the folder, and words for messages. A
module of its own because every engine reads it, and none of them should know the others.
"""

import json
from pathlib import Path

from accelerate import Accelerator
from transformers.trainer import OPTIMIZER_NAME

from .deepspeed import zero_stage
from .sharded_checkpoints import has_pickled_shards, has_shards

MODE_FILE = "processes.json"


def mode(accelerator: Accelerator) -> str:
    """How this run keeps its weights, in words: `by 2 processes with ZeRO-3`."""
    return _in_words(_mode(accelerator))


def _mode(accelerator: Accelerator) -> dict[str, int]:
    kept = {"zero_stage": zero_stage(accelerator), "fsdp": int(accelerator.is_fsdp2)}
    return {"processes": accelerator.num_processes, **kept}


def written_mode(folder: Path) -> str:
    """The same of the run that wrote a checkpoint."""
    path = folder / MODE_FILE
    return _in_words(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else "in another mode"


def _in_words(mode: dict[str, int]) -> str:
    number = "one process" if mode["processes"] == 1 else f"{mode['processes']} processes"
    engine = f"ZeRO-{mode['zero_stage']}" if mode["zero_stage"] else "FSDP2" if mode.get("fsdp") else None
    return f"by {number} with {engine}" if engine else f"by {number} with whole weights"


def write_mode(folder: Path, accelerator: Accelerator) -> None:
    """Notes in a checkpoint how many processes wrote it, and with what."""
    (folder / MODE_FILE).write_text(json.dumps(_mode(accelerator)), encoding="utf-8")


def is_readable(folder: Path, accelerator: Accelerator) -> bool:
    """Whether optimizer state that is there can be read: DeepSpeed's only in the mode and by as many as wrote it."""
    is_engines = any(folder.glob("global_step*"))
    if zero_stage(accelerator):
        return is_engines and written_mode(folder) == mode(accelerator)
    return not is_engines


def missing_state(folder: Path, needed: tuple[str, ...]) -> str | None:
    """What a checkpoint lacks of the optimizer's and the schedule's state, in words for a message.

    Args:
        folder: the checkpoint's.
        needed: names of further files that must be there.
    """
    is_there = (folder / OPTIMIZER_NAME).is_file() or has_shards(folder) or any(folder.glob("global_step*"))
    if not is_there:
        old = " but one whose index would have to be unpickled" if has_pickled_shards(folder) else ""
        return f"optimizer state{old}"
    return next((name for name in needed if not (folder / name).is_file()), None)
