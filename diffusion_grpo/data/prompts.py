"""Datasets of prompts: loaded from a file, a folder or the Hub, and checked before any model is loaded."""

import contextlib
import csv
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute

from ..config.names import check_name
from .columns import drop_format, has_transform, make_paths_absolute
from .embeddings import EMBEDDED, is_embedding

TO_DATASET = {  # what to do about other types
    "str": "read it with diffusion_grpo.data.prompts.load_prompts",
    "IterableDataset": "load it without streaming=True, or make one with Dataset.from_generator",
    "DatasetDict": "choose one of its splits",
    "list": "make one with Dataset.from_list",
}
PLAIN = [  # patterns of a table's fields, and their types
    (r"^\s*[+-]?(0|[1-9]\d*)\s*$", pa.int64()),
    (r"^\s*[+-]?((0|[1-9]\d*)\.?|(0|[1-9]\d*)?\.\d+|inf)([eE][+-]?\d+)?\s*$", pa.float64()),
    (r"^\s*(True|TRUE|true|False|FALSE|false)\s*$", pa.bool_()),
]
BLANK = re.compile(r"\s*")
UNNAMED = "eval_dataset"  # name of an evaluation dataset that is not in a dict


def read_csv(path: Path) -> datasets.Dataset:
    """Read a table; only empty fields and `nan` count as missing, so that a text may say None or NA.

    A column becomes numbers or truth values if all its fields are such. Digits after a leading zero, as in `007`, are
    text. Lines without any text are skipped, and so are columns without a name and without any text.

    Raises:
        ValueError: a line has more fields than the header, the header has a name twice, or quotation marks are not in
            pairs.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        rows = _explain_quotes(lines)
        header = [name or f"Unnamed: {place}" for place, name in enumerate(next(rows, []))]  # as in pandas
        columns: dict[str, list[str | None]] = {name: [] for name in header}
        if len(columns) < len(header):
            raise ValueError("the header names a column twice; rename one of them.")
        for fields in rows:
            if not any(map(str.strip, fields)):
                continue
            if len(fields) > len(header):
                raise ValueError(
                    f"line {lines.line_num} has {len(fields)} fields, but the header has {len(header)}; put text that "
                    "contains a comma in double quotation marks."
                )
            for column, field in itertools.zip_longest(columns.values(), fields):
                column.append(None if field in (None, "", "nan", "NaN") else field)
    kept = {name: texts for name, texts in columns.items() if any(texts) or not name.startswith("Unnamed: ")}
    return datasets.Dataset(
        pa.table({name: _read_plain(pa.array(texts, pa.string())) for name, texts in kept.items()})
    )


def _explain_quotes(lines: Any) -> Iterator[list[str]]:
    """Yield the lines of a `csv.reader`; say what to do about quotation marks that are not in pairs."""
    try:
        yield from lines
    except csv.Error as error:
        is_quote = "expected after" in str(error) or "unexpected end" in str(error)
        advice = "; in a text within quotation marks, write each of its own marks twice." if is_quote else ""
        raise ValueError(f"line {lines.line_num}: {error}{advice}") from None


def _read_plain(texts: pa.Array) -> pa.Array:
    """Return texts as whole numbers, numbers or truth values if all are such."""
    for pattern, kind in PLAIN:
        if texts.null_count < len(texts) and pa.compute.all(pa.compute.match_substring_regex(texts, pattern)).as_py():
            plain = pa.compute.replace_substring_regex(pa.compute.utf8_trim_whitespace(texts), r"^\+", "")
            with contextlib.suppress(pa.ArrowInvalid):  # a number that is too large
                return plain.cast(kind)
    return texts


def read_json(path: Path) -> datasets.Dataset:
    """Read rows of JSON; texts that look like dates stay texts.

    Arrow takes them for dates. Such columns are read again; one of values that only Arrow can combine stays as it is.
    """
    found = datasets.Dataset.from_json(str(path))
    dates = [name for name, kind in found.features.items() if "timestamp" in str(kind)]
    rows = list(_decode_values(path.read_text(encoding="utf-8-sig"))) if dates else []
    for name in dates if len(rows) == len(found) else []:
        with contextlib.suppress(pa.ArrowException, TypeError):
            texts = datasets.Dataset.from_dict({name: [row.get(name) for row in rows]})
            others = found.remove_columns(name)
            found = datasets.concatenate_datasets([others, texts], axis=1).select_columns(found.column_names)
    return found


def _decode_values(text: str) -> Iterator[Any]:
    """Yield the values of a JSON text one after the other: rows, or the rows of a list."""
    decoder, place = json.JSONDecoder(), 0
    while (start := BLANK.match(text, place).end()) < len(text):
        value, place = decoder.raw_decode(text, start)
        yield from value if isinstance(value, list) else [value]


READERS = {
    ".txt": lambda path: datasets.Dataset.from_dict({"prompt": read_lines(path)}),
    ".jsonl": read_json,
    ".json": read_json,
    ".parquet": lambda path: datasets.Dataset.from_parquet(str(path)),
    ".csv": read_csv,
}
SPLITS = ("train", "validation", "val", "test")  # names of files that hold a split


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank, without the white space around them."""
    return [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]


def load_prompts(source: str, split: str = "train") -> datasets.Dataset:
    """Load a dataset of prompts; [`check_dataset`] says whether it is one.

    Args:
        source: a file (`.txt`, one prompt per line; `.jsonl`, `.json`, `.parquet`, `.csv`, with a column `prompt`), a
            folder with a file for each split (`train.txt` or `train_metadata.jsonl`, as in Flow-GRPO), a folder
            written by `save_to_disk`, any other folder or Hub id that `datasets.load_dataset` knows, or `"tiny"`, the
            prompts of the embedded model. Paths of images, videos and sound in a file are relative to its folder.
        split: which split of the dataset; a single file has none and is returned whole.

    Raises:
        ValueError: the file does not exist, is of another kind, is empty or cannot be read, or the folder has no such
            split.
    """
    source = os.path.expanduser(source)
    path = Path(source)
    if source == "tiny":
        from diffusion_grpo import tiny

        return tiny.prompts(split)
    if path.suffix in READERS and (path.is_file() or not path.exists()):
        if not path.exists():
            raise ValueError(f"There is no file {source}; give the path of an existing file with prompts.")
        return make_paths_absolute(_read_file(path), path.absolute().parent)
    if path.is_file():  # `datasets` would take its name for a Hub id
        *most, last = READERS
        raise ValueError(
            f"{source} is not a file of prompts; use a file whose name ends in {', '.join(most)} or {last}."
        )
    if (path / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(source)
        if split not in splits:
            raise ValueError(f"{source} has no split '{split}'; it has {', '.join(splits)}.")
        return splits[split]
    if (path / "dataset_info.json").is_file():
        return datasets.load_from_disk(source)
    if files := find_splits(path):
        if split not in files:
            raise ValueError(f"{source} has no split '{split}'; it has {', '.join(files)}.")
        return load_prompts(str(files[split]))
    try:
        loaded = datasets.load_dataset(source, split=split)
    except datasets.exceptions.DatasetGenerationError as error:
        for file in sorted(path.rglob("*")) if path.is_dir() else []:
            if file.suffix in READERS:
                _read_file(file)  # raises an error with the name of the broken file
        raise ValueError(f"{source} cannot be read: {_find_reason(error)}") from error
    if path.is_dir() and "prompt" not in loaded.column_names and "text" in loaded.column_names:
        loaded = loaded.rename_column("text", "prompt")
    return loaded


def _read_file(path: Path) -> datasets.Dataset:
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; write prompts into it.")
    try:
        return READERS[path.suffix](path)
    except (datasets.exceptions.DatasetsError, pa.ArrowException, StopIteration, ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {_find_reason(error)}") from error


def _find_reason(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split()) or "it contains no rows"


def find_splits(folder: Path) -> dict[str, Path]:
    """Find the files of a folder in Flow-GRPO's layout: `train.txt` or `train_metadata.jsonl`, and likewise `test`.

    Raises:
        ValueError: there are two files of one split.
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


def get_prompts(rows: list[dict[str, Any]]) -> list[str] | None:
    """Return the prompts of rows; None if there are only embeddings."""
    return [row["prompt"] for row in rows] if rows and "prompt" in rows[0] else None


def read_prompts(dataset: datasets.Dataset) -> Iterator[Any]:
    """Yield each row's value in the column `prompt`, whatever the dataset's format.

    Rows are read in batches: one by one, 300,000 prompts would take up to two minutes.
    """
    if has_transform(dataset):  # a transform may need all columns and decode images
        batches = dataset.iter(32)
    else:
        batches = _gather_texts(drop_format(dataset).select_columns(["prompt"])).iter(1000)
    for batch in batches:
        yield from batch["prompt"]


def hash_prompts(dataset: datasets.Dataset | None) -> str | None:
    """Return a hash of the prompts in their order; None without prompts, or if a transform makes them."""
    if dataset is None or has_transform(dataset) or "prompt" not in dataset.column_names:
        return None
    found = hashlib.sha256()
    for prompt in read_prompts(dataset):
        found.update(json.dumps(prompt, default=str).encode() + b"\n")
    return found.hexdigest()


def _gather_texts(dataset: datasets.Dataset) -> datasets.Dataset:
    """Store a shuffled or selected column of texts in the order of its rows; return anything else as it is.

    `datasets` would gather the rows one by one, which takes ten times as long.
    """
    (column,) = dataset.data.columns
    if dataset._indices is None or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return dataset
    texts = column.cast(pa.large_string()).take(dataset._indices.column(0))  # more than 2 GiB may need long offsets
    return datasets.Dataset(pa.table({"prompt": texts}))


def get_prompt_column(dataset: datasets.Dataset) -> Iterable[str]:
    """Return each row's prompt for tables; empty strings where there are only embeddings."""
    return read_prompts(dataset) if "prompt" in dataset.column_names else [""] * len(dataset)


def name_datasets(train: Any, evaluation: Any) -> list[tuple[str, datasets.Dataset]]:
    """Return the datasets that a user gave, one or several for evaluation, with the names used in messages.

    Raises:
        ValueError: the name of an evaluation dataset cannot be part of a file name.
    """
    evaluations = evaluation if isinstance(evaluation, dict) else {UNNAMED: evaluation}
    for name in evaluations:
        check_name(name, "The evaluation dataset's name", "give the dataset another name")
    named = [("train_dataset", train), *evaluations.items()]
    return [(name, dataset) for name, dataset in named if dataset is not None]


def choose_evaluated(given: Any, own: Any) -> dict[str, datasets.Dataset]:
    """Return the datasets of one evaluation by name, checked.

    Args:
        given: what this evaluation was given: a dataset, several by name, the name of one of `own`, or None for `own`.
        own: the trainer's dataset, or several by name.

    Raises:
        ValueError: there is no such dataset, or as in `check_dataset`.
    """
    if isinstance(given, str):
        names = list(own) if isinstance(own, dict) else []
        if given not in names:
            has = f"has {', '.join(names)}" if names else "has no datasets with names"
            raise ValueError(f"There is no evaluation dataset {given!r}; the trainer {has}.")
        given = own[given]
    chosen = dict(name_datasets(None, own if given is None else given))
    if not chosen:
        found = f"eval_dataset={own if given is None else given!r}"
        raise ValueError(f"{found} has nothing to evaluate; pass a dataset with a column 'prompt'.")
    for name, dataset in chosen.items():
        check_dataset(dataset, name)
    return chosen


def check_dataset(dataset: datasets.Dataset, name: str = "train_dataset") -> None:
    """Refuse a dataset that has neither prompts nor embeddings of them.

    Args:
        dataset: what the user gave.
        name: the argument that it was passed as, for the message.

    Raises:
        ValueError: the dataset is not a `datasets.Dataset`, has neither a column `prompt` nor `prompt_embeds`, has no
            rows, has a prompt that is not a string, or has a format or transform that hides columns.
    """
    if not isinstance(dataset, datasets.Dataset):
        found = type(dataset).__name__
        raise ValueError(
            f"{name} is of type {found}, but must be a datasets.Dataset with a column 'prompt'; "
            f"{TO_DATASET.get(found, 'make one with Dataset.from_dict')}."
        )
    if "prompt" not in dataset.column_names and not any(map(is_embedding, dataset.column_names)):
        raise ValueError(
            f"{name} has no column 'prompt', only {dataset.column_names}; rename the one that holds the prompts "
            f"with rename_column, give embeddings as '{EMBEDDED}', or add empty prompts if the pipeline takes none."
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty; give it at least one row with a prompt.")
    _check_shown(dataset, name)
    for row, prompt in enumerate(read_prompts(dataset) if "prompt" in dataset.column_names else []):
        if not isinstance(prompt, str):
            raise ValueError(
                f"{name} has a prompt that is not a string in row {row} (the first is row 0): {prompt!r}, of type "
                f"{type(prompt).__name__}; make every prompt a string."
            )


def _check_shown(dataset: datasets.Dataset, name: str) -> None:
    """Refuse a dataset with columns that its rows do not have."""
    if has_transform(dataset):
        found = list(dataset[0])
        if "prompt" in dataset.column_names and "prompt" not in found:
            raise ValueError(
                f"{name} has a transform (set_transform) whose rows have no 'prompt', only {found}; it must return "
                "the prompts too."
            )
        return
    hidden = sorted({*dataset.column_names} - {*dataset.format["columns"]})
    if hidden and not dataset.format["output_all_columns"]:
        raise ValueError(
            f"{name} has a format (set_format) that hides the columns {hidden}; remove them with remove_columns, or "
            "show them with reset_format."
        )
