"""The rows of a dataset that a pipeline encodes differently: by their texts, and numbers that may affect these."""

from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset

from .columns import Columns, has_transform
from .inputs import PipelineInputs

Key = tuple[tuple[str, Any], ...]


def find_distinct(dataset: Dataset, inputs: PipelineInputs) -> dict[Key, int]:
    """Return the index of the first row of each kind, by the key of the kind.

    Rows are of the same kind if they have equal texts and numbers, and files in the same columns. Every row with
    embeddings of prompts is a kind of its own.
    """
    columns = inputs.columns(dataset)
    if has_transform(dataset):  # the transform decides what a row holds
        rows = (columns.rows([index])[0] for index in range(len(dataset)))
        keys = [
            tuple((name, _reduce(value, index)) for name, value in row.items() if name in inputs.accepted)
            for index, row in enumerate(rows)
        ]
    else:
        names = [name for name in dataset.column_names if name in inputs.accepted]
        values = [_read_column(columns, name) for name in names]
        keys = [tuple(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [()] * len(dataset)
    found: dict[Key, int] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, index)
    return found


def _read_column(columns: Columns, name: str) -> list[Any]:
    """Return what identifies each row's value: a text or number itself; for other values, whether there is one."""
    table = columns.dataset.select_columns([name]).with_format("arrow")
    values: list[Any] = []
    for batch in table.iter(1000):
        column = batch[name]
        kind = column.type
        if name not in columns.files and (pa.types.is_primitive(kind) or pa.types.is_string(kind)):
            values += column.to_pylist()
        elif name in columns.files or "prompt" not in name:
            values += [bool(valid) for valid in column.is_valid().to_pylist()]
        else:
            start = len(values)
            values += [start + i if valid else None for i, valid in enumerate(column.is_valid().to_pylist())]
    return values


def _reduce(value: Any, index: int) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if torch.is_tensor(value) and value.ndim == 0:
        return value.item()
    return index if torch.is_tensor(value) else True


def describe_text(row: dict[str, Any], accepted: set[str]) -> Key:
    """Return the texts and numbers of a row; rows with equal ones have equal prompts."""
    return tuple((k, v) for k, v in row.items() if k in accepted and isinstance(v, str | int | float | bool))
