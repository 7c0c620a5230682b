"""Datasets of prompts: loaded from a file, a folder or the Hub, named, hashed, checked before a model is loaded."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.csv

from .. import tiny
from ..config.files import read_text
from ..config.names import check_name
from .columns import drop_format, has_transform, is_string, make_paths_absolute
from .embeddings import EMBEDDED, is_embedding

TO_DATASET = {  # what to do about other types
    "IterableDataset": "load it without streaming=True, or make one with Dataset.from_generator",
    "DatasetDict": "choose one of its splits",
}
UNNAMED = "eval_dataset"  # name of an evaluation dataset that is not in a dict
SPLITS = ("train", "validation", "val", "test")  # names of files that hold a split


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank, without the white space around them."""
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def _read_csv(path: Path) -> datasets.Dataset:
    """Read a table, and refuse lines with too many fields, as of a comma that is not in quotation marks."""
    prompts = pyarrow.csv.ConvertOptions(column_types={"prompt": pa.string()})
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    reading = pyarrow.csv.ReadOptions(block_size=path.stat().st_size + 1)  # types are those of all rows
    return datasets.Dataset(pyarrow.csv.read_csv(path, reading, parsing, prompts))


def _read_json(path: Path) -> datasets.Dataset:
    """Read rows of JSON, or the rows in the only field of an object, as in FastVideo's `{"data": [...]}`."""
    dataset = datasets.Dataset.from_json(str(path))
    if len(dataset) == 1 and len(dataset.column_names) == 1:
        (value,) = dataset[0].values()
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" not in value[0]:
            return datasets.Dataset.from_list(value)
    return dataset


READERS = {
    ".txt": lambda path: datasets.Dataset.from_dict({"prompt": read_lines(path)}),
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": lambda path: datasets.Dataset.from_parquet(str(path)),
    ".csv": _read_csv,
}


def load_prompts(source: Any, split: str = "train", prompt_column: str | None = None) -> Any:
    """Load a dataset of prompts; [`check_dataset`] says whether it is one."""
    if isinstance(source, (str, Path)):
        source = _load(str(source), split)
    elif isinstance(source, (list, tuple)) and all(isinstance(item, str) for item in source):
        source = datasets.Dataset.from_dict({"prompt": list(source)})
    elif isinstance(source, list) and all(isinstance(item, dict) for item in source):
        source = datasets.Dataset.from_list(source)
    if not isinstance(source, datasets.Dataset) or has_transform(source):
        return source
    return _take_messages(_fill_prompts(source, prompt_column))


def load_given(source: Any, split: str, prompt_column: str | None) -> Any:
    """Load what a trainer was given for one or, in a dict, for several datasets; see [`load_prompts`]."""
    if isinstance(source, dict) and not isinstance(source, datasets.DatasetDict):
        return {name: load_prompts(each, split, prompt_column) for name, each in source.items()}
    return load_prompts(source, split, prompt_column)


def _fill_prompts(dataset: datasets.Dataset, prompt_column: str | None) -> datasets.Dataset:
    """Return the dataset with the column `prompt`, copied from the one that holds the prompts."""
    names = dataset.column_names
    if prompt_column is not None and prompt_column not in names:
        raise ValueError(f"prompt_column: there is no column {prompt_column!r}; there are {', '.join(names)}.")
    texts = [name for name in names if is_string(dataset.features[name])]
    if prompt_column is None:
        if "prompt" in names or any(is_embedding(name) for name in names if name not in texts):
            return dataset
        known = [name for name in texts if name.lower() == "prompt"] + [name for name in texts if name == "caption"]
        prompt_column = known[0] if known else texts[0] if len(texts) == 1 else "prompt"
    if prompt_column == "prompt" or prompt_column not in names:
        return dataset
    files = [name for name in texts if is_embedding(name)]  # DanceGRPO's embeddings, which are encoded anew
    others = dataset.remove_columns([*files, *({"prompt"} & set(names))])
    return others.add_column("prompt", drop_format(dataset)[prompt_column][:])


def _take_messages(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return the dataset with prompts of one chat message each, as in verl's files, as texts."""
    feature = dataset.features.get("prompt")
    message = feature.feature if isinstance(feature, (datasets.List, datasets.LargeList)) else None
    if not isinstance(message, dict) or "content" not in message:
        return dataset
    prompts = drop_format(dataset)["prompt"][:]
    if any(prompt is None or len(prompt) != 1 for prompt in prompts):
        return dataset  # `check_dataset` names the row
    return dataset.remove_columns("prompt").add_column("prompt", [prompt[0]["content"] for prompt in prompts])


def _load(source: str, split: str) -> datasets.Dataset:
    source = os.path.expanduser(source)
    path = Path(source)
    if source == "tiny":
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
    if (path / "dataset_info.json").is_file():
        return datasets.load_from_disk(source)
    is_saved = (path / "dataset_dict.json").is_file()
    if splits := datasets.load_from_disk(source) if is_saved else _find_splits(path):
        if split not in splits:
            raise ValueError(f"{source} has no split '{split}'; it has {', '.join(splits)}.")
        return splits[split] if is_saved else _load(str(splits[split]), split)
    try:
        return datasets.load_dataset(source, split=split)
    except datasets.exceptions.DatasetGenerationError as error:
        for file in sorted(path.rglob("*")) if path.is_dir() else []:
            if file.suffix in READERS:
                _read_file(file)  # names the broken file
        raise ValueError(f"{source} cannot be read: {_find_reason(error)}") from error


def _read_file(path: Path) -> datasets.Dataset:
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; write prompts into it.")
    if path.suffix != ".parquet":
        read_text(path)  # refuses other encodings
    try:
        return READERS[path.suffix](path)
    except (datasets.exceptions.DatasetsError, pa.ArrowException, StopIteration, ValueError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {_find_reason(error)}") from error


def _find_reason(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split()) or "it contains no rows"


def _find_splits(folder: Path) -> dict[str, Path]:
    """Find the files of a folder in Flow-GRPO's layout: `train.txt` or `train_metadata.jsonl`, and likewise `test`."""
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        split = file.stem.removesuffix("_metadata")
        if file.suffix not in READERS or split not in SPLITS:
            continue
        if split in files:
            raise ValueError(f"{folder} holds {files[split].name} and {file.name} for '{split}'; keep one of them.")
        files[split] = file
    return files


def read_prompts(dataset: datasets.Dataset) -> Iterator[Any]:
    """Yield each row's value in the column `prompt`, whatever the dataset's format."""
    is_made = has_transform(dataset)  # a transform may need all columns and decode images
    texts = dataset if is_made else drop_format(dataset).select_columns(["prompt"])
    for batch in texts.iter(32 if is_made else 1000):  # one by one, 300,000 prompts would take up to two minutes
        yield from batch["prompt"]


def hash_prompts(dataset: datasets.Dataset | None) -> str | None:
    """Return a hash of the prompts in their order; None without prompts, or if a transform makes them."""
    if dataset is None or has_transform(dataset) or "prompt" not in dataset.column_names:
        return None
    digest = hashlib.sha256()
    for prompt in read_prompts(dataset):
        digest.update(json.dumps(prompt, default=str).encode() + b"\n")
    return digest.hexdigest()


def name_datasets(train: Any, evaluation: Any) -> list[tuple[str, datasets.Dataset]]:
    """Return the datasets that a user gave, one or several for evaluation, with the names used in messages."""
    evaluations = evaluation if isinstance(evaluation, dict) else {UNNAMED: evaluation}
    for name in evaluations:
        check_name(name, "The evaluation dataset's name", "give the dataset another name")
    named = [("train_dataset", train), *evaluations.items()]
    return [(name, dataset) for name, dataset in named if dataset is not None]


def choose_evaluated(given: Any, own: Any) -> dict[str, datasets.Dataset]:
    """Return the datasets of one evaluation by name, checked."""
    if isinstance(given, str):
        names = list(own) if isinstance(own, dict) else []
        if given not in names:
            raise ValueError(f"There is no evaluation dataset {given!r}; there are {', '.join(names) or 'none'}.")
        given = own[given]
    given = own if given is None else given
    chosen = dict(name_datasets(None, given))
    if not chosen:
        raise ValueError(f"eval_dataset={given!r} has nothing to evaluate; pass a dataset with a column 'prompt'.")
    for name, dataset in chosen.items():
        check_dataset(dataset, name)
    return chosen


def check_dataset(dataset: datasets.Dataset, name: str = "train_dataset") -> None:
    """Refuse a dataset that has neither prompts nor embeddings of them."""
    if not isinstance(dataset, datasets.Dataset):
        kind = type(dataset).__name__
        raise ValueError(
            f"{name} is of type {kind}, but must be a datasets.Dataset with a column 'prompt'; "
            f"{TO_DATASET.get(kind, 'or a path, or a list of prompts')}."
        )
    if "prompt" not in dataset.column_names and not any(map(is_embedding, dataset.column_names)):
        raise ValueError(
            f"{name} has no column 'prompt', only {dataset.column_names}; set prompt_column to the one that holds "
            f"the prompts, give embeddings as '{EMBEDDED}', or add empty prompts if the pipeline takes none."
        )
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty; give it at least one row with a prompt.")
    for row, prompt in enumerate(read_prompts(dataset) if "prompt" in dataset.column_names else []):
        if not isinstance(prompt, str):
            raise ValueError(
                f"{name} has a prompt that is not a string in row {row} (the first is row 0): {prompt!r}, of type "
                f"{type(prompt).__name__}; make every prompt a string."
            )
