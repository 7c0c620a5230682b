"""Put dataset rows into one pipeline call: which rows fit together, in which form, as which keyword arguments."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image

from .embeddings import find_replaced_texts

BATCHED, SINGLE, LISTED = "batched", "single", "listed"
Result = TypeVar("Result")
NUMBERS_OF_SAMPLES = ("class_labels",)  # one per sample, like prompts; other numbers are one per call


@dataclasses.dataclass
class Form:
    """The form in which the inputs of a call are given."""

    name: str
    reason: str | None = None  # why not all samples of a call are given at once


class Unfit(Exception):
    """A form in which a pipeline can be called, but with other samples than those meant."""


def call_in_some_form(call: Callable[[str], Result]) -> tuple[Result, Form]:
    """Make a call in the first form that a pipeline takes; return its result and form, or raise its first error."""
    refusals: list[Exception] = []
    for form in (BATCHED, SINGLE, LISTED):
        try:
            result = call(form)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # any error of the pipeline is an answer
            refusals.append(error)
        else:
            return result, Form(form, " ".join(str(refusals[0]).split()).rstrip(".") if refusals else None)
    raise next(error for error in refusals if not isinstance(error, Unfit))


def build_arguments(rows: list[dict[str, Any]], accepted: set[str], is_bare: bool = False) -> dict[str, Any]:
    """Build the arguments of one pipeline call from rows: a number, a tensor (batch, ...) or a list per column."""
    inputs = {}
    replaced = find_replaced_texts(rows[0], accepted)
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
                f"The column '{name}' is None in {missing} of the {len(values)} rows of one pipeline call; give it a "
                "value in all rows or in none."
            )
        if not is_setting:
            inputs[name] = values[0] if is_bare else _stack(values)
            continue
        if len(set(values)) > 1:
            raise ValueError(
                f"The column '{name}' has different values in one pipeline call, {sorted(set(values))}, but a "
                "pipeline takes one; give all rows the same."
            )
        inputs[name] = values[0]
    return inputs


def group_by_shape(
    rows: list[dict[str, Any]], accepted: set[str], describe_prompt: Callable[[dict[str, Any]], Any] | None = None
) -> list[list[int]]:
    """Return groups of indices of rows that may share a pipeline call, in the order of the rows."""
    groups: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        key = tuple(
            (name, _shape(value, is_item=name in NUMBERS_OF_SAMPLES))
            for name, value in row.items()
            if name in accepted
        )
        own = None if describe_prompt is None else describe_prompt(row)
        groups.setdefault((key, own), []).append(index)
    return list(groups.values())


def _shape(value: Any, is_item: bool = False) -> Any:
    """Return what the values of one call must have in common."""
    if value is None or isinstance(value, bool | int | float) and not is_item:
        return value
    if isinstance(value, Image.Image):
        return value.size, value.mode
    if isinstance(value, (list, tuple)):
        return tuple(_shape(item, is_item=True) for item in value)
    return tuple(value.shape) if hasattr(value, "shape") else type(value).__name__


def _stack(values: list[Any]) -> Any:
    """Stack tensors or arrays; return anything else as it is."""
    if all(torch.is_tensor(value) for value in values):
        return torch.stack(values)
    return np.stack(values) if all(isinstance(value, np.ndarray) for value in values) else values
