"""Write tables and files of the samples of rollouts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from .records import write_files, write_inputs, write_samples


@dataclasses.dataclass(frozen=True)
class KeptSamples:
    """Settings of which samples of a rollout are kept as files.

    With `save_samples_steps`, whole rollouts at these updates are kept and nothing else; otherwise a few samples of
    the first rollout, of one every `log_samples_steps` updates, and of the last.
    """

    samples_per_rollout: int
    updates_per_rollout: int
    save_steps: int | None
    log_steps: int | None
    count: int

    def saves_all(self, step: int) -> bool:
        """Return whether the rollout after `step` updates is kept as a whole: the first at or after each multiple."""
        return self.save_steps is not None and step % self.save_steps < self.updates_per_rollout

    def number(self, step: int, last_step: int) -> int:
        """Return how many samples, first by position, of the rollout after `step` of `last_step` updates are kept."""
        if self.saves_all(step):
            return self.samples_per_rollout
        if self.save_steps is not None or self.log_steps is None:
            return 0
        is_last = step + self.updates_per_rollout >= last_step
        return self.count if is_last or step % self.log_steps < self.updates_per_rollout else 0


class SampleWriter:
    """Writer of this process's samples of a rollout into the run's folder."""

    def __init__(
        self,
        folder: Path,
        *,
        reward_names: list[str],
        kept: KeptSamples,
        fps: float,
        sampling_rate: int | None,
        part: str,
        is_active: bool,
        writes_tables: bool,
        find_images: Callable[[dict[str, Any]], list[Image.Image]],
    ):
        self._folder, self._reward_names, self.kept = folder, reward_names, kept
        self._fps, self._rate, self._part = fps, sampling_rate, part
        self._is_active, self._writes_tables, self._find_images = is_active, writes_tables, find_images

    def write(
        self,
        step: int,
        last_step: int,
        rows: list[dict],
        samples: list,
        positions: Tensor,
        rewards: Tensor,
        columns: dict[str, list],
    ) -> None:
        """Write the table of a rollout, and the files of those samples that are kept.

        Args:
            rewards: (samples, functions) rewards.
        """
        if not self._is_active:
            return
        files = self._write_files(step, last_step, rows, samples, positions)
        if not (self._writes_tables or files):
            return
        table = {"step": [step] * len(rows), "prompt": [row.get("prompt", "") for row in rows]}
        table |= dict(zip(self._reward_names, rewards.T.tolist(), strict=True))
        write_samples(self._folder / f"step-{step:06d}{self._part}.parquet", columns | files | table)

    def _write_files(
        self, step: int, last_step: int, rows: list[dict], samples: list, positions: Tensor
    ) -> dict[str, list]:
        """Write the kept samples and what they were made from; return columns that name the files, if any is kept."""
        number = self.kept.number(step, last_step)
        if number == 0 or samples[0] is None:  # None: rewards see only latents
            return {}
        names = [f"{position:04d}" if position < number else None for position in positions.tolist()]
        stems = [None if name is None else self._folder / f"step-{step:06d}" / name for name in names]
        inputs = [stem and stem.with_name(f"{stem.name}-input") for stem in stems]
        taken = write_inputs(map(self._find_images, rows), inputs, self._folder)
        return write_files(samples, stems, self._folder, self._fps, self._rate) | taken
