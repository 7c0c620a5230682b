"""Settings by name and type, and words that become values."""

import dataclasses

import pytest
from transformers import TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.fields import OF_TRANSFORMERS, list_fields, own_fields, read_value, script_fields


def test_names_that_are_known_before_transformers_is_imported():
    """After an update of transformers the table may lack one of its settings."""
    assert {field.name for field in dataclasses.fields(TrainingArguments) if field.init} == set(OF_TRANSFORMERS)
    assert list_fields(DiffusionGRPOConfig).keys() | script_fields().keys() == {*own_fields(), *OF_TRANSFORMERS}


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", "int", 3),
        ("1e-3", "float | None", 1e-3),
        ("Yes", "bool", True),
        ("f", "bool", False),
        (["1", "2"], "list[int] | None", [1, 2]),
        ("1", "list[int] | None", [1]),
        (5, "str | None", "5"),
        (None, "int | None", None),
        ("a", "str | dict", "a"),
    ],
)
def test_words_become_values_of_their_type(value, kind, expected):
    assert read_value("setting", value, kind) == expected


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("perhaps", "bool", "invalid bool value: 'perhaps'"),
        ("3.5", "int", "invalid int value"),
        (None, "int", "is None, expected one int"),
        (True, "int", "is True, expected one int"),
        ({"a": 1}, "str", "expected one str"),
    ],
)
def test_values_of_another_type_are_refused(value, kind, message):
    with pytest.raises(ValueError, match=message):
        read_value("setting", value, kind)
