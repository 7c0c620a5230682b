"""Hand out a run's micro-batches in order; make a new rollout when the last one is used up."""

import functools
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
    """Loader of the micro-batches of a run."""

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

    def resume_from(self, checkpoint: Path) -> None:
        """Start from a checkpoint, which may have been written within a rollout."""
        self.reset()
        self._checkpoint = checkpoint

    @property
    def is_first(self) -> bool:
        """Whether the last micro-batch handed out is the first of its update."""
        return self._micro_step == 1

    @property
    def is_used_up(self) -> bool:
        """Whether the last micro-batch handed out is the last of its rollout."""
        return self._slot == self._sizes.slots - 1

    def next(self, row_indices: list[int], step: int, last_step: int) -> MicroBatch:
        """Return the next micro-batch."""
        if self._update != step:
            self._update, self._micro_step = step, 0
        micro_batch = step * self._sizes.accumulation + self._micro_step
        self._micro_step += 1
        generation, self._slot = divmod(micro_batch, self._sizes.slots)
        if self._slot == 0 or self.buffer is None:
            everyone = self._backend.gather(torch.tensor(row_indices, device=self._args.device)).tolist()
            order = RolloutOrder(self._sizes, self._args.seed, generation, everyone)
            rows_at = functools.partial(self._rows_at, order)
            if self._slot == 0:
                self.buffer = self._generator(order, rows_at, step, last_step)
            else:
                self.buffer = self._restore(order, rows_at)
        return self.buffer.micro_batch(self._slot)

    @property
    def value_targets(self) -> ValueTargets | None:
        """The value model's targets in the last micro-batch handed out; None without a value model."""
        return self.buffer.value_targets(self._slot)

    def save(self, folder: Path, step: int) -> None:
        """Write the current rollout into a checkpoint after `step` updates, unless it is used up."""
        is_within = self.buffer is not None and step * self._sizes.accumulation % self._sizes.slots
        if is_within and self._backend.groups.is_first:
            save_buffer(self.buffer, rollout_file(folder, self._sizes.data_process))

    def _rows_at(self, order: RolloutOrder, positions: list[int]) -> Rows:
        """Return the dataset rows of the samples at these positions."""
        return self._read_rows([order.row_indices[position] for position in positions])

    def _restore(self, order: RolloutOrder, rows_at: Callable[[list[int]], Rows]) -> RolloutBuffer:
        def learn_rows_at(positions: list[int]) -> Rows:
            rows = rows_at(positions)
            self._generator.learn(rows)
            return rows

        folder = self._checkpoint or Path()
        return restore_buffer(folder, order, self._generator.inputs, learn_rows_at, self._args.trajectory_device)
