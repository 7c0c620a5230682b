"""The rows of a dataset that a pipeline encodes differently: by their texts, and numbers that may affect these."""

from typing import Any

import pyarrow as pa
from datasets import Dataset

from .columns import has_transform
from .inputs import PipelineInputs

Key = tuple[tuple[str, Any], ...]
PLAIN = (str, int, float, bool)


def find_distinct(dataset: Dataset, inputs: PipelineInputs) -> dict[Key, int]:
    """Return the index of the first row with each set of texts and numbers, and of other columns that hold values."""
    columns, keys = inputs.columns(dataset), []
    if has_transform(dataset):  # the transform decides what a row holds
        for index in range(len(dataset)):
            row = {name: value for name, value in columns.rows([index])[0].items() if name in inputs.accepted}
            keys.append(tuple((k, v if isinstance(v, PLAIN) else v is not None) for k, v in row.items()))
    elif names := [name for name in dataset.column_names if name in inputs.accepted]:
        for batch in columns.dataset.select_columns(names).with_format("arrow").iter(1000):
            values = [_describe(batch[name], name in columns.files) for name in names]
            keys += [tuple(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    first: dict[Key, int] = {}
    for index, key in enumerate(keys or [()] * len(dataset)):
        first.setdefault(key, index)
    return first


def _describe(column: pa.ChunkedArray, is_file: bool) -> list[Any]:
    """Return texts and numbers themselves; of other values, whether there is one."""
    is_plain = pa.types.is_primitive(column.type) or pa.types.is_string(column.type)
    return (column if is_plain and not is_file else column.is_valid()).to_pylist()


def describe_text(row: dict[str, Any], accepted: set[str]) -> Key:
    """Return the texts and numbers of a row; rows with equal ones have equal prompts."""
    return tuple((k, v) for k, v in row.items() if k in accepted and isinstance(v, PLAIN))
