"""Checkpoints, and the run's folder that holds them: written at once, verified, found again, resumed from exactly.

Folders `checkpoint-N` are written under a temporary name and renamed into place, so that a kill at any moment leaves
the older ones as they were. Each lists the hashes of its files in `manifest.json`. A run locks its folder, clears or
sets aside what an earlier one left, and says after Ctrl-C how to resume.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..config.settings import DiffusionGRPOConfig
from ..policy.base import Policy
from ..report.card import list_upload_patterns
from ..report.record import ResumeError
from ..rollout.generate import RolloutLoader
from ..weights import files
from ..weights.files import POLICY_FOLDER
from .average import PolicyAverage, find_policy_folder
from .learner import Learner

logger = logging.getLogger(__name__)
REFERENCE_FOLDER, OLD_POLICY_FOLDER = "reference", "old_policy"
MANIFEST, LOCK = "manifest.json", "_lock"  # held by the run in the folder; no push contains a name with "_" in front
SAMPLES = ("evaluations", "samples", "validation")  # folders whose entries have the number of their update
THREADS = 8


class DamagedCheckpoint(ResumeError):
    """A file of a checkpoint is missing or has changed.

    Examples:
        >>> written = Path(folder, "trainer_state.json").write_text("{}")
        >>> write_manifest(Path(folder))
        >>> written = Path(folder, "trainer_state.json").write_text("[]")
        >>> check(Path(folder))
        Traceback (most recent call last):
        DamagedCheckpoint: ...
    """


class Checkpointer:
    """Writer and reader of a checkpoint's weights: the policy's, and those beside it. Every process calls it."""

    def __init__(self, args: DiffusionGRPOConfig, policy: Policy, learner: Learner, loader: RolloutLoader):
        self._model, self._policy, self._loader = learner.model, policy, loader
        self._weights, self._average, self._old_policy = learner.weights, learner.average, learner.old_policy
        self._reference, self._values = learner.reference if args.sync_ref_model else None, learner.values
        self._is_writer, self._pushes_samples = args.should_save, args.push_samples

    def save_weights(self, folder: Path, whole_pipeline: bool = False) -> None:
        """Write the weights to publish: the average if there is one, with the policy's own weights in a subfolder."""
        shown = None if self._average is None else self._average.shares
        with self._weights.show_whole(shown, is_kept=self._is_writer):
            self._write(self._model, folder, whole_pipeline)
        if self._average is not None:
            with self._average.place(is_shown=False), self._weights.show_whole(is_kept=self._is_writer):
                self._write(self._model, folder / POLICY_FOLDER)

    def save_beside_weights(self, folder: Path) -> None:
        """Write the old policy, the reference and the value model."""
        if self._old_policy is not None:
            with self._weights.show_whole(self._old_policy.shares, is_kept=self._is_writer):
                self._write(self._model, folder / OLD_POLICY_FOLDER)
        if self._reference is not None:
            reference = self._reference.weights
            values = reference.exact() if reference.is_sharded else self._weights.shard(reference.exact())
            with self._weights.show_whole(values, is_kept=self._is_writer):
                self._write(self._model, folder / REFERENCE_FOLDER)
        if self._values is not None and self._is_writer:
            self._values.save(folder)

    def save_rollout(self, folder: Path, step: int) -> None:
        """Write what is left of the current rollout after `step` updates; every process writes its own part."""
        self._loader.save(folder, step)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; an average, old policy or reference that it lacks starts afresh, with a warning."""
        policy = find_policy_folder(folder, has_average=self._average is not None)
        self._load_moving(self._average, folder)
        self._load_moving(self._old_policy, self._find_old_policy(folder, policy))
        self._load_reference(folder)
        self._load_policy(policy)
        if self._values is not None:
            self._values.load(folder)
        self._loader.resume_from(folder)

    def load_best(self, folder: Path) -> None:
        """Read the weights of the best checkpoint: those of the policy and their average."""
        self._load_moving(self._average, folder)
        self._load_policy(find_policy_folder(folder, has_average=self._average is not None))

    def copy_weights(self, checkpoint: Path, folder: Path) -> None:
        """Copy the weights of a checkpoint, without its training state, to another folder."""
        files.copy_weights(checkpoint, folder, self._policy.component)

    def list_upload_patterns(self) -> dict[str, list[str]]:
        """Return `allow_patterns` and `ignore_patterns` of the files in the output folder that are pushed."""
        return list_upload_patterns(self._policy.pipe.components, self._pushes_samples)

    def _write(self, model: nn.Module, folder: Path, whole_pipeline: bool = False) -> None:
        if self._is_writer:
            files.save_policy(model, self._policy.pipe, self._policy.component, folder, whole_pipeline)

    def _load_policy(self, folder: Path) -> None:
        with self._weights.rewrite():
            files.load_policy(self._model, self._policy.component, folder)

    def _find_old_policy(self, folder: Path, policy: Path) -> Path:
        if self._old_policy is None or (folder / OLD_POLICY_FOLDER).is_dir():
            return folder / OLD_POLICY_FOLDER
        logger.warning("%s contains no old policy: it starts from the policy's weights there.", folder)
        return policy

    def _load_reference(self, folder: Path) -> None:
        """Read the moving reference, by way of the policy; without one in the checkpoint it stays as it is."""
        if self._reference is None:
            return
        if not (folder / REFERENCE_FOLDER).is_dir():
            logger.warning("%s contains no reference: it starts from the model as it was before training.", folder)
            return
        self._load_policy(folder / REFERENCE_FOLDER)
        self._reference.weights.approach(self._weights, 1.0)

    def _load_moving(self, moving: PolicyAverage | None, folder: Path) -> None:
        """Read a moving average; the model also holds it afterwards, until its own weights are loaded."""
        if moving is None:
            return
        self._load_policy(folder)
        moving.take(self._weights.exact())


# A checkpoint as a whole


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an existing `target` is deleted only once the new one is in place."""
    aside = target.with_name(f"tmp-{target.name}-old")
    if target.exists():
        target.rename(aside)
    source.rename(target)
    if aside.exists():
        shutil.rmtree(aside)


def write_manifest(folder: Path) -> None:
    """Write the hashes of all files under `folder`; call it once, after every process has written its files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = dict(zip(names, pool.map(_hash, paths), strict=True))
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")


def check(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest, which a user who changed a file may have deleted."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise DamagedCheckpoint(f"{checkpoint} is not a complete checkpoint: it has no {TRAINER_STATE_NAME}")
    if not (checkpoint / MANIFEST).is_file():
        return
    try:
        hashes = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except ValueError:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {MANIFEST} cannot be read") from None
    paths = [checkpoint / name for name in hashes]
    with ThreadPoolExecutor(THREADS) as pool:
        for name, written, present in zip(hashes, hashes.values(), pool.map(_hash, paths), strict=True):
            if present != written:
                what = "is missing" if present is None else "is not what was written (its SHA-256 differs)"
                raise DamagedCheckpoint(f"{checkpoint} is damaged: {name} {what}")


def is_whole(checkpoint: Path) -> bool:
    """Return whether `check` accepts a checkpoint."""
    try:
        check(checkpoint)
    except DamagedCheckpoint:
        return False
    return True


def _hash(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The folder of a run


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` inside this context, so that only one run at a time uses it; the lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ResumeError(
            f"{folder} is being written by another run; wait until it has ended or end it, or choose another "
            "output_dir."
        ) from None
    try:
        yield
    finally:
        lock.release()


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in an output folder, the newest first."""
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*")]
    numbered = [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
    return [path for _, path in sorted(numbered, reverse=True)]


def find_newest_whole(folder: Path) -> Path | None:
    """Find the newest undamaged checkpoint; log which newer ones are skipped."""
    damages = []
    for checkpoint in list_checkpoints(folder):
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


def count_updates(folder: Path) -> int:
    """Return after how many updates the trainer state in a folder was written; 0 without one."""
    state = folder / TRAINER_STATE_NAME
    return json.loads(state.read_text(encoding="utf-8"))["global_step"] if state.is_file() else 0


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint or the result of updates, which a new run would overwrite."""
    return bool(list_checkpoints(folder)) or count_updates(folder) > 0


def refuse_used_folder(folder: Path) -> None:
    """Refuse to start a run in a folder that holds one."""
    if not holds_run(folder):
        return
    newest = next(iter(list_checkpoints(folder)), None)
    there = f"newest: {newest.name}" if newest else "without a checkpoint to continue from"
    resume = "resume_from_checkpoint=True to continue it, " if newest else ""
    raise ResumeError(
        f"{folder} already contains a run ({there}); set {resume}overwrite_output_dir=True to replace it, or another "
        "output_dir."
    )


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


def find_later(folder: Path, update: int) -> list[Path]:
    """List what a run left after an update: the ended run's log, samples and, last, checkpoints."""
    state = folder / TRAINER_STATE_NAME
    paths = [path for name in SAMPLES for path in folder.glob(f"{name}/step-*")] + list_checkpoints(folder)
    numbers = [re.match(r"(?:checkpoint|step)-(\d+)", path.name) for path in paths]
    later = [path for path, number in zip(paths, numbers, strict=True) if number and int(number[1]) > update]
    return [state] * state.is_file() + later


def clear_run(folder: Path, update: int) -> None:
    """Delete what a run left after an update, for one that starts in its place."""
    for path in find_later(folder, update):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_later_aside(folder: Path, update: int) -> Path | None:
    """Move what a run left after an update into a folder of its own, for a run that goes back to that update."""
    if not any(int(path.name.split("-")[1]) > update for path in list_checkpoints(folder)):
        return None
    aside, number = folder / "abandoned" / f"after-{update}", 2
    while aside.exists():
        aside, number = aside.with_name(f"after-{update}-{number}"), number + 1
    for path in find_later(folder, update):
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


@contextlib.contextmanager
def explain_interrupt(folder: Path, updates: Callable[[], int]) -> Iterator[None]:
    """Turn Ctrl-C inside this context into one line that says how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        newest = next(iter(list_checkpoints(folder)), None)
        how = (
            f"continue from {newest} with resume_from_checkpoint=True (--resume_from_checkpoint true on the command "
            "line)"
            if newest
            else "there is no checkpoint yet, so start again, with a new trainer or the same command"
        )
        done = updates()
        raise KeyboardInterrupt(f"Interrupted after {done} update{'s' if done != 1 else ''}; {how}.") from None
