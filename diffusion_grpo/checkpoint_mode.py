"""How a checkpoint was written: by how many processes, and which of them kept what.

In: the trainer's accelerator, or a checkpoint's folder. Out: a small file in the folder, and words for messages. A
module of its own because every engine reads it, and none of them should know the others.
"""

import json
from pathlib import Path

from accelerate import Accelerator

from .distributed import zero_stage

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


def fits(folder: Path, accelerator: Accelerator) -> bool:
    """Whether a checkpoint holds DeepSpeed state that was written in the same mode by as many processes."""
    return written_mode(folder) == mode(accelerator) and any(folder.glob("global_step*"))
