"""Rows become the keyword arguments of one pipeline call, where they can share one."""

import pytest

from diffusion_grpo.data.calls import build_arguments, group_by_shape


def test_accepted_columns_become_keyword_arguments():
    rows = [
        {"prompt": "a", "negative_prompt": "x", "height": 64, "image": [1, 2], "color": "red", "image_2": None},
        {"prompt": "b", "negative_prompt": "", "height": 64, "image": [3, 4], "color": "blue", "image_2": None},
    ]
    accepted = {"prompt", "negative_prompt", "height", "image", "image_2", "width"}
    assert build_arguments(rows, accepted) == {
        "prompt": ["a", "b"],
        "negative_prompt": ["x", ""],
        "height": 64,
        "image": [[1, 2], [3, 4]],
    }


def test_classes_are_one_per_sample_where_other_numbers_are_one_per_call():
    rows = [{"class_labels": label, "guidance_scale": 4.0} for label in (3, 7)]
    assert group_by_shape(rows, set(rows[0])) == [[0, 1]]
    assert build_arguments(rows, set(rows[0])) == {"class_labels": [3, 7], "guidance_scale": 4.0}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("height", [64, 32, 64], r"'height' has different values in one pipeline call, \[32, 64\]"),
        ("guidance_scale", [4.5, 4.5, 7.0], r"'guidance_scale' has different values .* \[4.5, 7.0\]"),
        ("height", [64, None, 64], "'height' is None in 1 of the 3 rows"),
        ("negative_prompt", [None, "x", None], "'negative_prompt' is None in 2 of the 3 rows"),
    ],
)
def test_columns_that_one_call_cannot_take(name, values, message):
    with pytest.raises(ValueError, match=message):
        build_arguments([{"prompt": "a", name: value} for value in values], {"prompt", name})
