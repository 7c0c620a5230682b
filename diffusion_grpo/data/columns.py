"""Columns that hold pictures, videos or sound: a dataset goes in, rows with the decoded things in them come out.

A module of its own because the pipeline and the rewards are given the same objects, decoded once for all samples of a
prompt, and because a missing file or an address on the network is refused here, before a model is loaded. What a
column holds is told by its type; a column of strings is read as files where the pipeline's parameter of that name does
not take text.
"""

import dataclasses
import inspect
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute
import torch
from datasets.utils.file_utils import is_remote_url, xopen
from PIL import Image

from ..media import files as media

Media = datasets.Image | datasets.Video | datasets.Audio
KINDS = {"image": datasets.Image(mode="RGB"), "video": datasets.Video(), "audio": datasets.Audio()}
VIDEOS = {".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"}
SOUNDS = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"}
NOT_TEXT = ("Image", "Tensor", "ndarray", "Any")  # of these an annotation names one where a parameter takes files


class Columns:
    """One dataset's rows, with pictures, videos and sound decoded.

    Pictures come as PIL images, videos as lists of them, sound as float32 tensors (channels, time). Types are those of
    `datasets`: `Image`, `Video`, `Audio` and lists of them; `{"bytes", "path"}` without a type is a picture. Strings
    are read by the ending of the file's name, and their pictures converted to RGB. Embeddings of prompts and their
    masks, lists of numbers, come as tensors.

    Args:
        dataset: the user's. One with a format of its own (`set_format`, `set_transform`) gives what it gives.
        parameters: of the pipeline's `__call__`, by name: those that the pipeline may be given.
    """

    def __init__(self, dataset: datasets.Dataset, parameters: Mapping[str, inspect.Parameter]):
        self.files = {}
        self.tensors: list[str] = []
        if dataset.format["type"] is None:
            features = dataset.features
            self.tensors = [name for name in parameters.keys() & features.keys() if _is_tensor(name, features[name])]
            for name, feature in dataset.features.items():
                found = _media(feature)
                if found is None and name in parameters:
                    found = _files_of(feature, parameters[name])
                if found is not None:
                    self.files[name] = found
        self.typed = {name for name in self.files if _media(dataset.features[name])}
        for name in self.typed:
            dataset = dataset.cast_column(name, _undecoded(dataset.features[name]))
        self.dataset = dataset

    def check(self, name: str) -> None:
        """Refuses files that cannot be read without the network.

        Args:
            name: what the user gave the dataset as, for the message.

        Raises:
            ValueError: a file does not exist, is an address, or is of no known kind; the message says where.
        """
        for column, feature in self.files.items():
            for row, path in self._paths(column):
                problem = _problem(path, feature)
                if problem:
                    raise ValueError(f"{name}, row {row} (the first is row 0), column '{column}': {problem}")

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """The rows of these indices; equal indices give one and the same dict.

        Raises:
            ValueError: a file cannot be decoded; the message names row and column.
        """
        found = {index: self._row(index) for index in dict.fromkeys(indices)}
        return [found[index] for index in indices]

    def _row(self, index: int) -> dict[str, Any]:
        row = dict(self.dataset[index])
        for name in self.tensors:
            row[name] = None if row[name] is None else torch.tensor(row[name])
        for name, feature in self.files.items():
            try:
                row[name] = _read(row[name], feature)
            except Exception as error:  # of whatever library decodes it
                raise ValueError(f"Row {index} (the first is row 0), column '{name}': {error}") from error
        return row

    def _paths(self, column: str) -> Iterator[tuple[int, str]]:
        """Row and path of every file that is not held in the dataset itself."""
        batches = self.dataset.select_columns(column).with_format("arrow").iter(1000)
        for number, batch in enumerate(batches):
            for row, value in enumerate(_references(batch[column]), start=1000 * number):
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, dict):
                        item = item["path"] if item["bytes"] is None else None
                    if item is not None:
                        yield row, item


def with_absolute_paths(dataset: datasets.Dataset, folder: Path) -> datasets.Dataset:
    """The dataset with the paths in it, which are relative to `folder`, made absolute.

    A column holds paths where each of its strings ends as the name of a picture, video or sound file does; `prompt`
    is never one.
    """
    order = dataset.column_names
    for name, feature in dataset.features.items():
        if (
            name == "prompt"
            or not isinstance(feature, datasets.Value)
            or feature.dtype not in ("string", "large_string")
        ):
            continue
        values = dataset[name][:]
        given = [value for value in values if value is not None]
        if given and all(_kind(value) for value in given):
            values = [value if value is None or "://" in value else str(folder / value) for value in values]
            dataset = dataset.remove_columns(name).add_column(name, values)
    return dataset.select_columns(order)


def _is_tensor(name: str, feature: Any) -> bool:
    """Whether a column holds embeddings of prompts, or which tokens of them count."""
    is_embedding = "prompt" in name and ("embed" in name or "mask" in name)
    if isinstance(feature, (datasets.List, datasets.LargeList, datasets.Array2D, datasets.Array3D)):
        return is_embedding and "string" not in str(feature)
    return False


def is_media(feature: Any) -> bool:
    """Whether a column's type is a picture, a video or sound, or a list of them."""
    return _media(feature) is not None


def _media(feature: Any) -> Media | None:
    """The type of what a column holds, also of what its lists hold."""
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return _media(feature.feature)
    return feature if isinstance(feature, Media) else None


def _files_of(feature: Any, parameter: inspect.Parameter) -> Media | str | None:
    """How a column without such a type is read for a parameter: strings by their endings; None: not at all."""
    if isinstance(feature, datasets.List):
        return _files_of(feature.feature, parameter)
    if isinstance(feature, dict) and set(feature) == {"bytes", "path"}:
        return datasets.Image()
    is_string = isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")
    annotation = str(parameter.annotation)
    takes_files = "str" not in annotation and any(word in annotation for word in NOT_TEXT)
    return "by ending" if is_string and takes_files else None


def _undecoded(feature: Any) -> Any:
    """The column's type with its files left as they are."""
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return dataclasses.replace(feature, feature=_undecoded(feature.feature))
    return dataclasses.replace(feature, decode=False)


def _references(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column with paths in them; of files held in the dataset None, and none of their bytes."""
    if not pa.types.is_struct(column.type):
        return column.to_pylist()
    paths = pa.compute.struct_field(column, "path").to_pylist()
    is_held = pa.compute.is_valid(pa.compute.struct_field(column, "bytes")).to_pylist()
    return [None if held else path for path, held in zip(paths, is_held, strict=True)]


def _problem(path: str, feature: Media | str) -> str | None:
    source = path.split("::")[-1]
    if is_remote_url(source):
        return f"{path} is an address, and nothing is downloaded here; fetch the files first and give their paths."
    if not Path(source).is_file():
        start = "" if Path(source).is_absolute() else " (paths are relative to the working directory)"
        return f"there is no file {source}{start}."
    if feature == "by ending" and _kind(path) is None:
        return f"{source} does not end as the name of a picture, a video or a sound file does."
    return None


def _kind(path: str) -> str | None:
    """image, video or audio, by the ending of a file's name."""
    ending = Path(path).suffix.lower()
    kind = "video" if ending in VIDEOS else "audio" if ending in SOUNDS else None
    return kind or ("image" if ending in Image.registered_extensions() else None)


def _read(value: Any, feature: Media | str) -> Any:
    """What a stored value stands for. None stays None."""
    if isinstance(value, list):
        return [_read(item, feature) for item in value]
    if value is None:
        return None
    if isinstance(value, str):
        value = {"bytes": None, "path": value}
    if value["bytes"] is None and value["path"] is None:
        return None
    feature = KINDS[_kind(value["path"])] if feature == "by ending" else feature
    if isinstance(feature, datasets.Image):
        return dataclasses.replace(feature, decode=True).decode_example(value)
    source = io.BytesIO(value["bytes"]) if value["bytes"] is not None else xopen(value["path"], "rb")
    with source:
        if isinstance(feature, datasets.Video):
            return media.read_video(source)
        samples, _ = media.read_sound(source, feature.sampling_rate, feature.num_channels)
        return torch.from_numpy(samples)
