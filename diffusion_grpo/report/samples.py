"""Write tables and files of samples into a run's folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from torch import Tensor

from ..config.settings import DiffusionGRPOConfig
from ..data.inputs import PipelineInputs
from ..distributed.context_parallel import ContextGroups
from ..media.files import write_sample, write_whole
from ..media.samples import convert_image

INPUT_WIDEST, INPUT_GAP = 512, 4  # pixels: of a copy of an image that samples were made from, and between two


class SampleWriter:
    """Writer of this process's samples of a rollout into the run's folder."""

    def __init__(
        self,
        args: DiffusionGRPOConfig,
        inputs: PipelineInputs,
        reward_names: list[str],
        groups: ContextGroups,
        sampling_rate: int | None,
    ):
        self.args, self._inputs, self._reward_names = args, inputs, reward_names
        self._groups, self._rate, self._sizes = groups, sampling_rate, args.batch_sizes

    def saves_all(self, step: int) -> bool:
        """Return whether the rollout after `step` updates is kept as a whole: the first at or after each multiple."""
        every = self.args.save_samples_steps
        return every is not None and step % every < self._sizes.updates_per_rollout

    def count_kept(self, step: int, last_step: int) -> int:
        """Return how many samples, first by position, of the rollout after `step` of `last_step` updates are kept."""
        args, sizes, every = self.args, self._sizes, self.args.log_samples_steps
        if args.save_samples_steps is not None:
            return sizes.samples_per_rollout if self.saves_all(step) else 0
        if every is None or not args.log_completions:
            return 0
        is_last = step + sizes.updates_per_rollout >= last_step
        return args.num_completions_to_log if is_last or step % every < sizes.updates_per_rollout else 0

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
        """Write the table of a rollout with `rewards` (samples, functions), and the files of the samples to keep."""
        if not self._groups.is_first:
            return
        root, number, files = Path(self.args.output_dir), self.count_kept(step, last_step), {}
        folder = root / "samples"
        if number and samples[0] is not None:  # None: rewards see only latents
            kept = folder / f"step-{step:06d}"
            stems = [kept / f"{position:04d}" if position < number else None for position in positions.tolist()]
            files = write_files(samples, stems, root, self._inputs.fps, self._rate)
            stems = [stem and stem.with_name(f"{stem.name}-input") for stem in stems]
            files |= write_inputs(map(self._inputs.find_images, rows), stems, root)
        if not (self.args.log_completions or files):
            return
        table = {"step": [step] * len(rows), "prompt": [row.get("prompt", "") for row in rows]}
        table |= dict(zip(self._reward_names, rewards.T.tolist(), strict=True))
        part = f"-rank{self._groups.index}" if self._groups.count > 1 else ""
        write_table(folder / f"step-{step:06d}{part}.parquet", columns | files | table)


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    write_whole(path, lambda aside: pyarrow.parquet.write_table(pyarrow.table(columns), aside))


def write_files(
    samples: Iterable[Any], stems: Iterable[Path | None], root: Path, fps: float, sampling_rate: int | None
) -> dict[str, list[str | None]]:
    """Write samples as images, videos and sound, and return columns with the paths below `root`."""
    columns: dict[str, list[str | None]] = {"image": [], "file": []}
    for sample, stem in zip(samples, stems, strict=True):
        files = (None, None) if stem is None else write_sample(sample, stem, fps, sampling_rate)
        for column, path in zip(columns.values(), files, strict=True):
            column.append(None if path is None else str(path.relative_to(root)))
    return columns


def write_inputs(images: Iterable[list[Image.Image]], stems: Iterable[Path | None], root: Path) -> dict[str, list]:
    """Write small copies of the images that the samples were made from, to be shown beside them."""
    column: list[str | None] = []
    for sources, stem in zip(images, stems, strict=True):
        if not sources or stem is None:
            column.append(None)
            continue
        _, path = write_sample(_join(sources), stem, fps=1.0)
        column.append(str(path.relative_to(root)))
    return {"input": column} if any(column) else {}


def _join(images: list[Image.Image]) -> Image.Image:
    """Put small copies of images side by side, all of the height of the first."""
    first, *others = (convert_image(image, "RGB") for image in images)
    first = first.copy()  # the next line changes it in place, and replays still need the original
    first.thumbnail((INPUT_WIDEST, INPUT_WIDEST))
    height = first.height
    row = [first, *(image.resize((max(1, round(image.width * height / image.height)), height)) for image in others)]
    joined = Image.new("RGB", (sum(image.width for image in row) + INPUT_GAP * len(others), height), "white")
    start = 0
    for image in row:
        joined.paste(image, (start, 0))
        start += image.width + INPUT_GAP
    return joined
