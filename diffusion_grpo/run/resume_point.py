"""Where a run starts in its folder: at the newest complete checkpoint, at the one that is named, or anew.

Damaged and missing files, and files that hold code, are refused with a clear message.
"""

import contextlib
import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer import TRAINER_STATE_NAME

from .manifest import MANIFEST, DamagedCheckpoint, ResumeError, check_manifest

logger = logging.getLogger(__name__)
SAMPLES = ("evaluations", "samples", "validation")  # folders whose entries have the number of their update


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in an output folder, the newest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    numbered = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]


def count_updates(folder: Path) -> int:
    """Return after how many updates the trainer state at the top of an output folder was written; 0 without one."""
    state = folder / TRAINER_STATE_NAME
    return json.loads(state.read_text(encoding="utf-8"))["global_step"] if state.is_file() else 0


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint or the result of updates, which a new run would overwrite."""
    return bool(checkpoints(folder)) or count_updates(folder) > 0


def refuse_used_folder(folder: Path) -> None:
    """Refuse to start a run in a folder that holds one."""
    if not holds_run(folder):
        return
    newest = next(iter(checkpoints(folder)), None)
    there = f"newest: {newest.name}" if newest else "without a checkpoint to continue from"
    resume = "resume_from_checkpoint=True to continue it, " if newest else ""
    raise ResumeError(
        f"{folder} already contains a run ({there}); set {resume}overwrite_output_dir=True to replace it, or another "
        "output_dir."
    )


def find_later(folder: Path, update: int) -> list[Path]:
    """List what a run left after an update: the ended run's log, samples and, last, checkpoints."""
    state = folder / TRAINER_STATE_NAME
    paths = [path for name in SAMPLES for path in folder.glob(f"{name}/step-*")] + checkpoints(folder)
    numbers = [re.match(r"(?:checkpoint|step)-(\d+)", path.name) for path in paths]
    later = [path for path, number in zip(paths, numbers, strict=True) if number and int(number[1]) > update]
    return [state] * state.is_file() + later


def clear_run(folder: Path, update: int) -> None:
    """Delete what a run left after an update, for one that starts in its place."""
    for path in find_later(folder, update):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_later_aside(folder: Path, update: int) -> Path | None:
    """Move what a run left after an update into a folder of its own, for a run that goes back to that update.

    Otherwise, the updates that it abandons would leave the newest checkpoint, the longest log and the latest samples.
    """
    if not any(int(path.name.split("-")[1]) > update for path in checkpoints(folder)):
        return None
    aside, number = folder / "abandoned" / f"after-{update}", 2
    while aside.exists():
        aside, number = aside.with_name(f"after-{update}-{number}"), number + 1
    for path in find_later(folder, update):
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


def clear_leftovers(folder: Path) -> None:
    """Remove checkpoints that a kill left half written, and restore one that was being replaced."""
    for replaced in folder.glob("tmp-checkpoint-*-old"):
        name = replaced.name.removeprefix("tmp-").removesuffix("-old")
        if not (folder / name).exists():  # killed between moving the old one away and renaming the new one
            replaced.rename(folder / name)
    for leftover in folder.glob("tmp-checkpoint-*"):
        shutil.rmtree(leftover)
    for mark in folder.glob("checkpoint-*/checkpoint-is-incomplete.txt"):  # of enable_jit_checkpoint
        if not (mark.parent / MANIFEST).is_file():
            shutil.rmtree(mark.parent)


def find_newest_whole(folder: Path) -> Path | None:
    """Find the newest undamaged checkpoint; log which newer ones are skipped."""
    damages = []
    for checkpoint in checkpoints(folder):
        try:
            check(checkpoint)
        except DamagedCheckpoint as damage:
            damages.append(damage)
            continue
        if damages:
            logger.warning("%s; continuing from %s.", "; ".join(map(str, damages)), checkpoint.name)
        return checkpoint
    if damages:
        raise DamagedCheckpoint(f"{damages[0]}, and there is no complete checkpoint; delete {folder} to start again.")
    return None


def check_named(checkpoint: Path) -> None:
    """Refuse a damaged checkpoint that was requested by name, and suggest the newest undamaged one before it."""
    try:
        check(checkpoint)
    except DamagedCheckpoint as damage:
        others, here = checkpoints(checkpoint.resolve().parent), checkpoint.resolve()
        older = others[others.index(here) + 1 :] if here in others else []
        whole = next(filter(is_whole, older), None)
        advice = (
            f"; resume from {whole}, which is complete." if whole else ", and no checkpoint before it is complete."
        )
        raise DamagedCheckpoint(f"{damage}{advice}") from None


def is_whole(checkpoint: Path) -> bool:
    """Return whether `check` accepts a checkpoint."""
    try:
        check(checkpoint)
    except DamagedCheckpoint:
        return False
    return True


def check(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest, which a user who changed a file may have deleted."""
    if (checkpoint / MANIFEST).is_file():
        check_manifest(checkpoint)
    state = checkpoint / TRAINER_STATE_NAME
    if not state.is_file():
        raise DamagedCheckpoint(f"{checkpoint} is not a complete checkpoint: it has no {TRAINER_STATE_NAME}")
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {TRAINER_STATE_NAME} is not JSON ({error})") from None


@contextlib.contextmanager
def refuse_unreadable(checkpoint: Path) -> Iterator[None]:
    """Turn errors from files that cannot be read, or that hold code, into a clear message."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ResumeError(
            f"{checkpoint} contains a file with more than tensors and plain values, and reading it could run code "
            f"from it; none of it was run. Resume from a checkpoint that this program wrote. ({_first_line(error)})"
        ) from error
    except (EOFError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _unreadable(checkpoint, error) from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise _unreadable(checkpoint, error) from error


def _unreadable(checkpoint: Path, error: Exception) -> DamagedCheckpoint:
    reason = _first_line(error) or type(error).__name__
    return DamagedCheckpoint(f"{checkpoint} is damaged ({reason}); resume from an older checkpoint.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@contextlib.contextmanager
def explain_interrupt(folder: Path, updates: Callable[[], int]) -> Iterator[None]:
    """Turn Ctrl-C inside this context into one line that says how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        newest = next(iter(checkpoints(folder)), None)
        how = (
            f"continue from {newest} with resume_from_checkpoint=True (--resume_from_checkpoint true on the command "
            "line)"
            if newest
            else "there is no checkpoint yet, so start again, with a new trainer or the same command"
        )
        done = updates()
        raise KeyboardInterrupt(f"Interrupted after {done} update{'s' if done != 1 else ''}; {how}.") from None
