"""Read a dataset's rows: which columns it has and what they hold, paths, and images, videos and sound, decoded.

The pipeline and the rewards get the same objects, decoded once for all samples of a prompt. The type of a column says
what it holds; a column of strings is read as files if the pipeline's parameter of that name does not take text. Images
for the pipeline are converted to the mode that it takes: some pipelines would mistake an RGBA image for latents, and
others fail on a grey one. Missing files and URLs are refused before a model is loaded.
"""

import dataclasses
import inspect
import io
import os
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
from ..media.samples import convert_image
from .embeddings import is_embedding

Media = datasets.Image | datasets.Video | datasets.Audio
LISTS = (datasets.List, datasets.LargeList)
VIDEOS = {".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg"}
SOUNDS = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"}
LONGEST_NAME = 255  # of a file
NOT_TEXT = ("Image", "Tensor", "ndarray", "Any")  # parameters annotated with one of these take files


class RowError(ValueError):
    """A row of a dataset cannot be read; the message names the row and, for a file, the column."""


class Columns:
    """Reads the rows of one dataset: PIL images, lists of them for videos, and sound as float32 (channels, time)."""

    def __init__(
        self, dataset: datasets.Dataset, parameters: Mapping[str, inspect.Parameter], image_mode: str | None = "RGB"
    ):
        self._taken, self._mode = frozenset(parameters), image_mode
        self.files: dict[str, Media] = {}
        self.tensors: list[str] = []
        if not has_transform(dataset):
            dataset = drop_format(dataset)
            for name, feature in dataset.features.items():
                kind = _media_type(feature)
                if name in parameters:
                    is_list = isinstance(feature, (*LISTS, datasets.Array2D, datasets.Array3D))
                    if is_list and is_embedding(name) and "string" not in str(feature):
                        self.tensors.append(name)
                    kind = kind or _file_type(dataset, name, parameters[name])
                if kind is not None:
                    self.files[name] = kind
                    if "large_string" in str(feature):  # of which `datasets` makes no videos and no sound
                        feature = _with_items(feature, datasets.Value("string"))
                        dataset = dataset.cast_column(name, feature)
                    stored = _with_items(feature, dataclasses.replace(kind, decode=False))
                    dataset = dataset if stored == feature else dataset.cast_column(name, stored)
        self.dataset = dataset

    def check(self, name: str) -> None:
        """Refuse files that cannot be read without the network."""
        for column in self.files:
            for row, path in self._paths(column):
                if problem := _find_problem(path):
                    raise ValueError(f"{name}, row {row} (the first is row 0), column '{column}': {problem}")

    def list_media(self) -> list[str]:
        """Return the columns of images, videos or sound: by their type, or because the first row names such files."""
        first = {} if has_transform(self.dataset) else self.dataset[0]
        features = self.dataset.features.items()
        return [name for name, kind in features if _media_type(kind) or _names_files(name, first.get(name))]

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """Return the rows at `indices`; equal indices give one and the same dict."""
        rows = {index: self._row(index) for index in dict.fromkeys(indices)}
        return [rows[index] for index in indices]

    def _row(self, index: int) -> dict[str, Any]:
        try:
            row = dict(self.dataset[index])
        except Exception as error:  # of the user's transform
            if not has_transform(self.dataset):
                raise
            cause = f"{type(error).__name__}: {error}"
            raise RowError(f"Row {index} (the first is row 0): the dataset's transform failed with {cause}") from error
        for name in self.tensors:
            row[name] = None if row[name] is None else torch.tensor(row[name])
        for name in row:
            try:
                row[name] = self._decode(name, row[name])
            except Exception as error:  # decoding libraries may raise any error
                raise RowError(f"Row {index} (the first is row 0), column '{name}': {error}") from error
        return row

    def _decode(self, name: str, value: Any) -> Any:
        """Return a value of a column as the pipeline and the rewards get it."""
        feature = self.files.get(name)
        value = value if feature is None else _read(value, feature)
        if name not in self._taken:
            return value
        has_own_mode = "mask" in name or getattr(feature, "mode", None) is not None
        return fit_images(value, None if has_own_mode else self._mode)

    def _paths(self, column: str) -> Iterator[tuple[int, str]]:
        """Yield row and path of every file that is not stored in the dataset itself."""
        batches = self.dataset.select_columns(column).with_format("arrow").iter(1000)
        for number, batch in enumerate(batches):
            for row, value in enumerate(_read_paths(batch[column]), start=1000 * number):
                for item in _flatten(value):
                    path = item if isinstance(item, str) else item["path"] if item["bytes"] is None else None
                    if path is not None:
                        yield row, path


def fit_images(value: Any, mode: str | None) -> Any:
    """Convert an image, or each one in a list, to what a pipeline takes; return anything else as it is."""
    if isinstance(value, list):
        return [fit_images(item, mode) for item in value]
    return convert_image(value, mode) if isinstance(value, Image.Image) else value


def has_transform(dataset: datasets.Dataset) -> bool:
    """Return whether the rows of a dataset come from a function of the user (`set_transform`)."""
    return dataset.format["type"] == "custom"


def list_given(dataset: datasets.Dataset) -> list[str]:
    """Return the columns that the rows of a dataset have; with a transform they may differ from the stored ones."""
    return list(dataset[0]) if has_transform(dataset) else dataset.column_names


def list_types(dataset: datasets.Dataset) -> dict[str, str]:
    """Return the types of the columns that hold plain values; none with a transform, whose rows may differ."""
    features = {} if has_transform(dataset) else dataset.features
    return {name: kind.dtype for name, kind in features.items() if isinstance(kind, datasets.Value)}


def drop_format(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return the dataset with rows of plain Python values, whatever its format ("torch", ...); a transform stays."""
    return dataset if has_transform(dataset) else dataset.with_format(None)


def make_paths_absolute(dataset: datasets.Dataset, folder: Path) -> datasets.Dataset:
    """Return the dataset with paths of images, videos and sound relative to `folder` made absolute."""
    order = dataset.column_names
    for name, feature in dataset.features.items():
        if _is_text(feature) and _names_files(name, values := dataset[name][:]):
            dataset = dataset.remove_columns(name).add_column(name, [_move(value, folder) for value in values])
    return dataset.select_columns(order)


def is_string(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")


def _is_text(feature: Any) -> bool:
    """Return whether a column holds strings or lists of them."""
    return _is_text(feature.feature) if isinstance(feature, LISTS) else is_string(feature)


def _names_files(column: str, value: Any) -> bool:
    """Return whether a value of a column is a path of an image, video or sound file, or a list of such paths."""
    if column == "prompt":
        return False
    items = list(_flatten(value))
    return bool(items) and all(isinstance(item, str) and _kind(item) is not None for item in items)


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the items of lists within lists, without None."""
    if isinstance(value, list):
        for item in value:
            yield from _flatten(item)
    elif value is not None:
        yield value


def _move(value: Any, folder: Path) -> Any:
    """Make a path, or each path in a list, absolute; addresses and None are returned as they are."""
    if isinstance(value, list):
        return [_move(item, folder) for item in value]
    return value if value is None or "://" in value else str(folder / value)


def _media_type(feature: Any) -> Media | None:
    """Return the media type of a column, or of the items of its lists; None for anything else."""
    if isinstance(feature, LISTS):
        return _media_type(feature.feature)
    if isinstance(feature, dict) and set(feature) == {"bytes", "path"}:
        return datasets.Image()
    return feature if isinstance(feature, Media) else None


def _file_type(dataset: datasets.Dataset, name: str, parameter: inspect.Parameter) -> Media | None:
    """Return the type of the first file of a column of texts whose parameter takes files; None for other columns."""
    annotation = str(parameter.annotation)
    takes_files = "str" not in annotation and any(word in annotation for word in NOT_TEXT)
    if not takes_files or not _is_text(dataset.features[name]):
        return None
    first = next((path for row in dataset.select_columns(name) for path in _flatten(row[name])), "")
    return _kind(first) or datasets.Image()


def _with_items(feature: Any, item: Media | datasets.Value) -> Any:
    """Return the column's type with another type of its values, or of the items of its lists."""
    is_list = isinstance(feature, LISTS)
    return dataclasses.replace(feature, feature=_with_items(feature.feature, item)) if is_list else item


def _read_paths(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column that may hold paths; None for files stored in the dataset, without their bytes."""
    if not pa.types.is_struct(column.type):
        return column.to_pylist()
    paths = pa.compute.struct_field(column, "path").to_pylist()
    is_held = pa.compute.is_valid(pa.compute.struct_field(column, "bytes")).to_pylist()
    return [None if held else path for path, held in zip(paths, is_held, strict=True)]


def _find_problem(path: str) -> str | None:
    """Return why a file cannot be read, or None."""
    source = path.split("::")[-1]
    if is_remote_url(source):
        return f"{path} is a network address, and nothing is downloaded; fetch the files first and give their paths."
    if not os.path.isfile(source):
        if len(path) > LONGEST_NAME:
            return f"{path[:40]}... is no path; write a picture that is given as base64 to a file, and give its path."
        start = "" if Path(source).is_absolute() else " (paths are relative to the working directory)"
        return f"there is no file {source}{start}."
    return None


def _kind(path: str) -> Media | None:
    """Return the type of an image, video or sound file, by its extension; None for other extensions."""
    extension = Path(path).suffix.lower()
    if extension in VIDEOS:
        return datasets.Video()
    if extension in SOUNDS:
        return datasets.Audio()
    return datasets.Image() if extension in Image.registered_extensions() else None


def _read(value: Any, feature: Media) -> Any:
    """Decode a stored value, or each one in a list; None stays None."""
    if isinstance(value, list):
        return [_read(item, feature) for item in value]
    if value is None or value["bytes"] is None and value["path"] is None:
        return None
    if isinstance(feature, datasets.Image):
        image = dataclasses.replace(feature, decode=True, mode=None).decode_example(value)
        return image if feature.mode is None else convert_image(image, feature.mode)
    source = io.BytesIO(value["bytes"]) if value["bytes"] is not None else xopen(value["path"], "rb")
    with source:
        if isinstance(feature, datasets.Video):
            return media.read_video(source)
        samples, _ = media.read_sound(source, feature.sampling_rate, feature.num_channels)
        return torch.from_numpy(samples)
