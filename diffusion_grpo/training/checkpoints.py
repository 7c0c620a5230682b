"""Checkpoints that are whole or not there, and resuming from them exactly.

Folders `checkpoint-N` are written aside and renamed into place, so that a kill at any moment leaves the older ones as
they were.
"""

import logging
import shutil
from pathlib import Path

from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..distributed.weights import TrainedWeights
from ..rollout.feed import RolloutFeed
from ..rollout.reference import CopiedReference
from ..rollout.value_model import ValueModel
from ..run.card_data import list_upload_patterns
from ..run.manifest import ResumeError
from ..run.resume_point import refuse_unreadable
from ..run.weights import POLICY_FOLDER, PolicyFiles
from .average import PolicyAverage, find_policy_folder

logger = logging.getLogger(__name__)
REFERENCE_FOLDER, OLD_POLICY_FOLDER = "reference", "old_policy"


class Checkpointer:
    """Writes and reads what a checkpoint holds of the policy and of what stands beside it.

    Every process calls its methods; sharded weights are put together inside.

    Args:
        model: the trained one, without an engine around it.
        files: writes and reads the policy's weights as diffusers lays them out.
        weights: the trained parameters.
        average: their moving average, or None.
        old_policy: a moving copy of the policy that the algorithm needs, or None.
        reference: one that is moved towards the policy and so has to be kept, or None.
        values: the value model, or None.
        feed: of micro-batches, which may stop within a rollout.
        is_writer: whether this process writes what all have in common.
        pushes_samples: whether samples go to the Hub too.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        files: PolicyFiles,
        weights: TrainedWeights,
        average: PolicyAverage | None,
        old_policy: PolicyAverage | None,
        reference: CopiedReference | None,
        values: ValueModel | None,
        feed: RolloutFeed,
        is_writer: bool,
        pushes_samples: bool,
    ):
        self._model, self._files, self._weights, self._average = model, files, weights, average
        self._old_policy = old_policy
        self._reference, self._values, self._feed = reference, values, feed
        self._is_writer, self._pushes_samples = is_writer, pushes_samples

    def save_weights(self, folder: Path, whole_pipeline: bool = False) -> None:
        """Write the weights that are published: the average's, where there is one; the policy's own beside them."""
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
            with self._reference.weights.show_whole(is_kept=self._is_writer):
                self._write(self._reference.plain_module, folder / REFERENCE_FOLDER)
        if self._values is not None and self._is_writer:
            self._values.save(folder)

    def save_rollout(self, folder: Path, step: int) -> None:
        """Write the rest of the running rollout after `step` updates; every process writes its own."""
        self._feed.save(folder, step)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; the next micro-batch continues the rollout that it lies within.

        A checkpoint of a run without an average, an old policy or a moving reference has none to read: the first two
        start from its policy, the reference from the model as it was before training. A warning says so.

        Raises:
            ResumeError: it is not whole, or a file cannot be read.
        """
        if not (folder / TRAINER_STATE_NAME).is_file():
            raise ResumeError(f"{folder} is not a complete checkpoint: it has no {TRAINER_STATE_NAME}.")
        with refuse_unreadable(folder):
            policy = find_policy_folder(folder, has_average=self._average is not None)
            self._load_moving(self._average, folder)
            self._load_moving(self._old_policy, self._find_old_policy(folder, policy))
            self._load_reference(folder)
            self._load_policy(policy)
            if self._values is not None:
                self._values.load(folder)
        self._feed.resume_from(folder)

    def load_best(self, folder: Path) -> None:
        """Read the weights of the best checkpoint: the policy's, and their average."""
        self._load_moving(self._average, folder)
        self._load_policy(find_policy_folder(folder, has_average=self._average is not None))

    def copy_weights(self, checkpoint: Path, folder: Path) -> None:
        """Copy the weights in a checkpoint, and nothing of the training state, to another folder."""
        self._files.copy(checkpoint, folder)

    def list_upload_patterns(self) -> dict[str, list[str]]:
        """Say by `allow_patterns` and `ignore_patterns` which files of the output folder are pushed."""
        return list_upload_patterns(self._files.pipe.components, self._pushes_samples)

    def _write(self, model: nn.Module, folder: Path, whole_pipeline: bool = False) -> None:
        if self._is_writer:
            self._files.save(model, folder, whole_pipeline)

    def _load_policy(self, folder: Path) -> None:
        with self._weights.rewrite():
            self._files.load(self._model, folder)

    def _find_old_policy(self, folder: Path, policy: Path) -> Path:
        if self._old_policy is None or (folder / OLD_POLICY_FOLDER).is_dir():
            return folder / OLD_POLICY_FOLDER
        logger.warning("%s contains no old policy: it starts from the policy's weights there.", folder)
        return policy

    def _load_reference(self, folder: Path) -> None:
        """Read the moving reference; the one that is loaded is the model before training, which it starts as."""
        if self._reference is None:
            return
        if not (folder / REFERENCE_FOLDER).is_dir():
            logger.warning("%s contains no reference: it starts from the model as it was before training.", folder)
            return
        with self._reference.weights.rewrite():
            self._files.load(self._reference.plain_module, folder / REFERENCE_FOLDER)

    def _load_moving(self, moving: PolicyAverage | None, folder: Path) -> None:
        """Read a moving average; the model holds it afterwards too, until its own weights are loaded."""
        if moving is None:
            return
        self._load_policy(folder)
        moving.take(self._weights.exact())


def replace_folder(source: Path, target: Path) -> None:
    """Rename into place; a folder of that name goes only after the new one stands."""
    aside = target.with_name(f"tmp-{target.name}-old")
    if target.exists():
        target.rename(aside)
    source.rename(target)
    if aside.exists():
        shutil.rmtree(aside)
