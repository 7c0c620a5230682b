"""Atomic checkpoints, and resuming from them exactly.

Folders `checkpoint-N` are written under a temporary name and renamed into place, so that a kill at any moment leaves
the older ones as they were.
"""

import logging
import shutil
from pathlib import Path

from torch import nn

from ..distributed.weights import TrainedWeights
from ..rollout.feed import RolloutFeed
from ..rollout.reference import CopiedReference
from ..rollout.value_model import ValueModel
from ..run.card_data import list_upload_patterns
from ..run.resume_point import refuse_unreadable
from ..weights.files import POLICY_FOLDER, PolicyFiles
from .average import OldPolicy, PolicyAverage, find_policy_folder

logger = logging.getLogger(__name__)
REFERENCE_FOLDER, OLD_POLICY_FOLDER = "reference", "old_policy"


class Checkpointer:
    """Writer and reader of the weights in a checkpoint: the policy's, and those that accompany it.

    Every process calls its methods; sharded weights are gathered inside.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        files: PolicyFiles,
        weights: TrainedWeights,
        average: PolicyAverage | None,
        old_policy: OldPolicy | None,
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
            with self._reference.weights.show_whole(is_kept=self._is_writer):
                self._write(self._reference.plain_module, folder / REFERENCE_FOLDER)
        if self._values is not None and self._is_writer:
            self._values.save(folder)

    def save_rollout(self, folder: Path, step: int) -> None:
        """Write what is left of the current rollout after `step` updates; every process writes its own part."""
        self._feed.save(folder, step)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; the next micro-batch continues the rollout within which it was written.

        If the checkpoint lacks an average, an old policy or a moving reference that this run has, a warning is logged:
        the first two start from the checkpoint's policy, the reference from the model before training.
        """
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
        """Read the weights of the best checkpoint: those of the policy and their average."""
        self._load_moving(self._average, folder)
        self._load_policy(find_policy_folder(folder, has_average=self._average is not None))

    def copy_weights(self, checkpoint: Path, folder: Path) -> None:
        """Copy the weights of a checkpoint, without its training state, to another folder."""
        self._files.copy(checkpoint, folder)

    def list_upload_patterns(self) -> dict[str, list[str]]:
        """Return `allow_patterns` and `ignore_patterns` of the files in the output folder that are pushed."""
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
        """Read the moving reference; if the checkpoint has none, it stays the model before training."""
        if self._reference is None:
            return
        if not (folder / REFERENCE_FOLDER).is_dir():
            logger.warning("%s contains no reference: it starts from the model as it was before training.", folder)
            return
        with self._reference.weights.rewrite():
            self._files.load(self._reference.plain_module, folder / REFERENCE_FOLDER)

    def _load_moving(self, moving: PolicyAverage | None, folder: Path) -> None:
        """Read a moving average; the model also holds it afterwards, until its own weights are loaded."""
        if moving is None:
            return
        self._load_policy(folder)
        moving.take(self._weights.exact())


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an existing `target` is deleted only once the new one is in place."""
    aside = target.with_name(f"tmp-{target.name}-old")
    if target.exists():
        target.rename(aside)
    source.rename(target)
    if aside.exists():
        shutil.rmtree(aside)
