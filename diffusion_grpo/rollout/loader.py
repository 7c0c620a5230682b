"""Hand out a run's micro-batches in order; make a new rollout when the last one is used up."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..algorithms.batch import MicroBatch, Rows
from ..config.settings import DiffusionGRPOConfig
from ..distributed.backend import DistributedBackend
from .buffer import RolloutBuffer
from .generate import RolloutGenerator
from .order import RolloutOrder
from .restore import restore_buffer, rollout_file, save_buffer
from .value_model import ValueTargets


class RolloutLoader:
    """Loader of the micro-batches of a run.

    Attributes:
        is_first: whether the last micro-batch handed out is the first of its update.
        is_used_up: whether it is the last of its rollout.
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        args: DiffusionGRPOConfig,
        backend: DistributedBackend,
        read_rows: Callable[[list[int]], Rows],
    ):
        self._generator, self._args, self._backend, self._read_rows = generator, args, backend, read_rows
        self._checkpoint: Path | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the current rollout, so that the next micro-batch starts a new one, of the sizes set now."""
        self.buffer: RolloutBuffer | None = None
        self._sizes, self._slot, self._update, self._micro_step = self._args.batch_sizes, 0, -1, 0
        self.is_first = self.is_used_up = False

    def resume_from(self, checkpoint: Path) -> None:
        """Start from a checkpoint, which may have been written within a rollout."""
        self.reset()
        self._checkpoint = checkpoint

    def next(self, row_indices: list[int], step: int, last_step: int) -> MicroBatch:
        """Return the next micro-batch."""
        if self._update != step:
            self._update, self._micro_step = step, 0
        self.is_first = self._micro_step == 0
        generation, self._slot = divmod(step * self._sizes.accumulation + self._micro_step, self._sizes.slots)
        self._micro_step += 1
        self.is_used_up = self._slot == self._sizes.slots - 1
        if self._slot == 0 or self.buffer is None:
            everyone = self._backend.gather(torch.tensor(row_indices, device=self._args.device)).tolist()
            order = RolloutOrder(self._sizes, self._args.seed, generation, everyone)
            if self._slot == 0:
                self.buffer = self._generator(order, self._read_rows, step, last_step)
            else:
                self.buffer = self._restore(order)
        return self.buffer.micro_batch(self._slot)

    @property
    def value_targets(self) -> ValueTargets:
        """The value model's targets in the last micro-batch handed out."""
        return self.buffer.advantages.targets[self.buffer.range_of(self._slot)]

    def save(self, folder: Path, step: int) -> None:
        """Write the current rollout into a checkpoint after `step` updates, unless it is used up."""
        is_within = self.buffer is not None and step * self._sizes.accumulation % self._sizes.slots
        if is_within and self._backend.groups.is_first:
            save_buffer(self.buffer, rollout_file(folder, self._sizes.data_process))

    def _restore(self, order: RolloutOrder) -> RolloutBuffer:
        def learn_rows(indices: list[int]) -> Rows:
            rows = self._read_rows(indices)
            self._generator.learn(rows)
            return rows

        folder = self._checkpoint or Path()
        return restore_buffer(folder, order, self._generator.inputs, learn_rows, self._args.trajectory_device)
