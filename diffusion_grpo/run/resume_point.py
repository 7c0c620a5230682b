"""Find the checkpoint that a run resumes from: the newest complete one, or the one that is named.

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

from .manifest import DamagedCheckpoint, ResumeError, check_manifest, has_manifest

logger = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in an output folder, the newest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    numbered = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]


def clear_leftovers(folder: Path) -> None:
    """Remove checkpoints that a kill left half written, and restore one that was being replaced."""
    for replaced in folder.glob("tmp-checkpoint-*-old"):
        name = replaced.name.removeprefix("tmp-").removesuffix("-old")
        if not (folder / name).exists():  # killed between moving the old one away and renaming the new one
            replaced.rename(folder / name)
    for leftover in folder.glob("tmp-checkpoint-*"):
        shutil.rmtree(leftover)


def find_newest_whole(folder: Path) -> Path | None:
    """Find the newest undamaged checkpoint; log which newer ones are skipped.

    Raises:
        DamagedCheckpoint: there are checkpoints, but all are damaged.
    """
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
    """Refuse a damaged checkpoint that was requested by name, and suggest the newest undamaged one before it.

    Raises:
        DamagedCheckpoint: a file is missing or has changed.
    """
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
    """Compare a checkpoint with its manifest; a checkpoint without one, of an earlier version, only gets a warning.

    Raises:
        DamagedCheckpoint: it does not match its manifest, or its trainer state is missing or unreadable.
    """
    if has_manifest(checkpoint):
        check_manifest(checkpoint)
    else:
        logger.warning("%s has no manifest.json, so damage to its files would not be noticed.", checkpoint)
    state = checkpoint / TRAINER_STATE_NAME
    if not state.is_file():
        raise DamagedCheckpoint(f"{checkpoint} is not a complete checkpoint: it has no {TRAINER_STATE_NAME}")
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {TRAINER_STATE_NAME} is not JSON ({error})") from None


@contextlib.contextmanager
def refuse_unreadable(checkpoint: Path) -> Iterator[None]:
    """Turn errors from files that cannot be read, or that hold code, into a clear message.

    Raises:
        ResumeError: such a file was read inside the context.
    """
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
    """Turn Ctrl-C inside this context into one line that says how to resume.

    Args:
        folder: folder of the run.
        updates: returns the number of updates that the run has made.
    """
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
