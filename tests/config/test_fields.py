"""Settings by name and type, and words that become values."""

import dataclasses
from typing import Any

import pytest
from transformers import TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.declare import NotNegative
from diffusion_grpo.config.fields import OF_TRANSFORMERS, Setting, list_fields, own_fields, read_value, script_fields


def test_names_that_are_known_before_transformers_is_imported():
    """After an update of transformers the table may lack one of its settings."""
    assert {field.name for field in dataclasses.fields(TrainingArguments) if field.init} == set(OF_TRANSFORMERS)
    assert list_fields(DiffusionGRPOConfig).keys() | script_fields().keys() == {*own_fields(), *OF_TRANSFORMERS}


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("3", int, 3),
        ("1e-3", float | None, 1e-3),
        (1, NotNegative, 1.0),
        ("Yes", bool, True),
        ("f", bool, False),
        (["1", "2"], list[int] | None, [1, 2]),
        ("1", list[int] | None, [1]),
        ("4", int | str | None, 4),
        ("group", int | str | None, "group"),
        (5, str | None, "5"),
        (None, int | None, None),
        ("a", str | dict, "a"),
        ({"a": 1}, list[str] | dict[str, Any], {"a": 1}),
        ("perhaps", bool, "perhaps"),  # which the check refuses
    ],
)
def test_words_become_values_of_their_type(value, hint, expected):
    read = read_value(value, Setting.of(hint, None))
    assert read == expected and type(read) is type(expected)
