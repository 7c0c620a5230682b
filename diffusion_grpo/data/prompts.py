"""Prompts: a file, folder or Hub id enters, dataset rows in the order in which they are rolled out leave.

A module of its own because what the user hands over is checked here, before any model is loaded, and because the order
of rows is what makes a resumed run equal an unbroken one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image

from ..config.names import check_name
from .columns import with_absolute_paths

READERS = {
    ".txt": lambda path: datasets.Dataset.from_dict({"prompt": lines(path)}),
    ".jsonl": lambda path: datasets.Dataset.from_json(str(path)),
    ".json": lambda path: datasets.Dataset.from_json(str(path)),
    ".parquet": lambda path: datasets.Dataset.from_parquet(str(path)),
    ".csv": lambda path: datasets.Dataset.from_csv(str(path)),
}
SPLITS = ("train", "validation", "val", "test")  # names of files that hold one
EMBEDDED = "prompt_embeds"  # what most pipelines call prompts that are encoded already
NUMBERS_OF_SAMPLES = ("class_labels",)  # numbers that are one a sample, as a prompt is; others are one a call


def lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank, without the white space around them."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def load_prompts(source: str, split: str = "train") -> datasets.Dataset:
    """Loads a dataset of prompts; `check_dataset` says whether it is one.

    Args:
        source: a file (`.txt`, one prompt a line; `.jsonl`, `.json`, `.parquet`, `.csv`, with a column `prompt`), a
            folder with a file for each split (`train.txt` or `train_metadata.jsonl`, as Flow-GRPO's), a folder
            written by `save_to_disk`, any other folder or Hub id that `datasets.load_dataset` knows, or
            `"tiny"`, the prompts of the embedded model. Paths of pictures, videos and sound in a file are relative
            to its folder.
        split: which split of the dataset; a single file has none, all of it is returned.

    Raises:
        ValueError: the file does not exist, or the folder has no such split.
    """
    path = Path(source)
    if source == "tiny":
        from diffusion_grpo import tiny

        return tiny.prompts(split)
    if path.suffix in READERS and (path.is_file() or not path.exists()):
        if not path.exists():
            raise ValueError(f"There is no file {source}; give the path of an existing file with prompts.")
        return with_absolute_paths(READERS[path.suffix](path), path.absolute().parent)
    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(source)
        if split not in splits:
            raise ValueError(f"{source} has no split '{split}'; it has {', '.join(splits)}.")
        return splits[split]
    if (path / "dataset_info.json").is_file():
        return datasets.load_from_disk(source)
    if files := files_of_splits(path):
        if split not in files:
            raise ValueError(f"{source} has no split '{split}'; it has {', '.join(files)}.")
        return load_prompts(str(files[split]))
    loaded = datasets.load_dataset(source, split=split)
    if path.is_dir() and "prompt" not in loaded.column_names and "text" in loaded.column_names:
        loaded = loaded.rename_column("text", "prompt")
    return loaded


def files_of_splits(folder: Path) -> dict[str, Path]:
    """Find the files of a folder in Flow-GRPO's layout: `train.txt` or `train_metadata.jsonl`, and so for `test`.

    Raises:
        ValueError: two files of one split.
    """
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        split = file.stem.removesuffix("_metadata")
        if file.suffix not in READERS or split not in SPLITS:
            continue
        if split in found:
            raise ValueError(f"{folder} holds {found[split].name} and {file.name} for '{split}'; keep one of them.")
        found[split] = file
    return found


def prompts_of(rows: list[dict[str, Any]]) -> list[str] | None:
    """The prompts of rows, None where there are embeddings only."""
    return [row["prompt"] for row in rows] if rows and "prompt" in rows[0] else None


def prompt_column(dataset: datasets.Dataset) -> list[str]:
    """What stands for each row's prompt in tables: nothing where there are embeddings only."""
    return dataset["prompt"] if "prompt" in dataset.column_names else [""] * len(dataset)


def named_datasets(train: Any, evaluation: Any) -> list[tuple[str, datasets.Dataset]]:
    """The datasets that a user gave, one or several for evaluation, with what they were given as.

    Raises:
        ValueError: the name of an evaluation dataset cannot be part of a file's name.
    """
    evaluations = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    for name in evaluations:
        check_name(name, "The evaluation dataset's name", "give the dataset another name")
    named = [("train_dataset", train), *evaluations.items()]
    return [(name, dataset) for name, dataset in named if dataset is not None]


def check_dataset(dataset: datasets.Dataset, name: str = "train_dataset") -> None:
    """Refuses a dataset that has neither prompts nor embeddings of them.

    Args:
        dataset: what the user gave.
        name: what the user gave it as, for the message.

    Raises:
        ValueError: it is not a `datasets.Dataset`, has neither column `prompt` nor `prompt_embeds`, no rows, or a
            prompt that is not a string.
    """
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(f"{name} must be a datasets.Dataset with a column 'prompt', not a {type(dataset).__name__}.")
    if not {"prompt", EMBEDDED} & set(dataset.column_names):
        raise ValueError(
            f"{name} has no column 'prompt', only {dataset.column_names}; rename the one that holds the prompts "
            f"with rename_column, or give embeddings as '{EMBEDDED}'."
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty; give it at least one row with a prompt.")
    for row, prompt in enumerate(dataset["prompt"] if "prompt" in dataset.column_names else []):
        if not isinstance(prompt, str):
            raise ValueError(
                f"{name} has a prompt that is not a string in row {row} (the first is row 0): {prompt!r}, of type "
                f"{type(prompt).__name__}; make every prompt a string."
            )


class GroupSampler(torch.utils.data.Sampler[int]):
    """Dataset row indices in the order in which samples are rolled out (the order of TRL's `RepeatSampler`).

    Each chunk of prompts is laid out as `[p0] * num_generations + [p1] * num_generations + ...`, and the whole chunk
    is given `repeat_count` times in a row. The order depends on seed and epoch alone, so that a resumed run continues
    it. Where the rows do not fill the last chunk it is filled up from the start of the same order, so that no prompt
    is left out; a dataset smaller than one chunk goes round as often as needed.

    Args:
        num_rows: rows of the dataset.
        num_generations: samples of each prompt, side by side.
        prompts_per_rollout: prompts in a chunk; distinct ones unless the dataset has fewer.
        repeat_count: how often each chunk comes before the next one.
        processes: that part each chunk among themselves, in equal shares.
        copies: processes that get the same share.
        shuffle: a new permutation in each epoch, else the dataset's own order.
        seed: not negative.

    Raises:
        ValueError: a number that must be positive is not.
    """

    def __init__(
        self,
        num_rows: int,
        num_generations: int,
        prompts_per_rollout: int,
        repeat_count: int,
        shuffle: bool = True,
        seed: int = 0,
        processes: int = 1,
        copies: int = 1,
    ) -> None:
        sizes = {
            "num_rows": num_rows,
            "num_generations": num_generations,
            "prompts_per_rollout": prompts_per_rollout,
            "repeat_count": repeat_count,
        }
        for size, value in sizes.items():
            if value < 1:
                raise ValueError(f"{size} must be at least 1, not {value}.")
        self.num_rows = num_rows
        self.num_generations = num_generations
        self.prompts_per_rollout = prompts_per_rollout
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        self.seed = seed
        self.processes, self.copies = processes, copies
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        chunks = -(-self.num_rows // self.prompts_per_rollout)
        return chunks * self.prompts_per_rollout * self.num_generations * self.repeat_count * self.copies

    def __iter__(self) -> Iterator[int]:
        rows = np.arange(self.num_rows)
        if self.shuffle:
            rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
        chunks = -(-self.num_rows // self.prompts_per_rollout)
        chunks = np.resize(rows, (chunks, self.prompts_per_rollout))  # goes round where the rows do not suffice
        order = chunks.repeat(self.num_generations, axis=1).repeat(self.repeat_count, axis=0)
        yield from order.reshape(len(order) * self.processes, -1).repeat(self.copies, axis=0).flatten().tolist()


def pipeline_inputs(rows: list[dict[str, Any]], accepted: set[str], is_bare: bool = False) -> dict[str, Any]:
    """The keyword arguments of one pipeline call from the dataset rows of its samples.

    Args:
        rows: one dict a sample, all with the same columns; such as `groups_by_shape` puts together.
        accepted: names of the parameters of the pipeline's `__call__`.
        is_bare: the values of a single row as they are, not in lists.

    Returns:
        Each accepted column: a scalar where it holds numbers (`height`, `guidance_scale`), which a pipeline takes once
        a call (all but `class_labels`), else a list with one value a sample (`prompt`, `image`), or one tensor
        (batch, ...) where it holds tensors or arrays. A column that is None in all rows is left out.

    Raises:
        ValueError: the numbers of one call differ, or a column is None in some rows only.
    """
    inputs = {}
    replaced = texts_of_embeddings(rows[0], accepted)
    for name in rows[0]:
        if name not in accepted or name in replaced:
            continue
        values = [row[name] for row in rows]
        is_setting = name not in NUMBERS_OF_SAMPLES and all(isinstance(value, bool | int | float) for value in values)
        missing = sum(value is None for value in values)
        if missing == len(values):
            continue
        if missing:
            raise ValueError(
                f"The column '{name}' is None in {missing} of the {len(values)} rows of one pipeline call; fill it in "
                "all rows or in none."
            )
        if not is_setting:
            inputs[name] = values[0] if is_bare else _together(values)
            continue
        if len(set(values)) > 1:
            raise ValueError(
                f"The column '{name}' has different values in one pipeline call, {sorted(set(values))}, but a "
                "pipeline takes one; give all rows the same."
            )
        inputs[name] = values[0]
    return inputs


def texts_of_embeddings(row: dict[str, Any], accepted: set[str]) -> set[str]:
    """Arguments whose text is encoded already in the row, which a pipeline does not take beside the embeddings."""
    found: set[str] = set()
    for prefix in ("", "negative_"):
        if f"{prefix}{EMBEDDED}" in accepted and row.get(f"{prefix}{EMBEDDED}") is not None:
            found |= {f"{prefix}prompt", f"{prefix}prompt_2", f"{prefix}prompt_3"}
    return found


def groups_by_shape(rows: list[dict[str, Any]], accepted: set[str]) -> list[list[int]]:
    """Positions of the rows that may share a pipeline call, groups and rows in their order.

    They agree in every accepted column: in numbers and in None by value, in pictures by size and mode, in videos by
    length too, in tensors and arrays by shape. Text does not count.
    """
    groups: dict[tuple, list[int]] = {}
    for place, row in enumerate(rows):
        key = tuple(
            (name, _shape(value, is_item=name in NUMBERS_OF_SAMPLES))
            for name, value in row.items()
            if name in accepted
        )
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _shape(value: Any, is_item: bool = False) -> Any:
    """What values of one call have in common."""
    if value is None or isinstance(value, bool | int | float) and not is_item:
        return value
    if isinstance(value, Image.Image):
        return value.size, value.mode
    if isinstance(value, (list, tuple)):
        return tuple(_shape(item, is_item=True) for item in value)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def _together(values: list[Any]) -> Any:
    if all(torch.is_tensor(value) for value in values):
        return torch.stack(values)
    return np.stack(values) if all(isinstance(value, np.ndarray) for value in values) else values
