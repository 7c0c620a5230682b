"""Rewards are found by name, by dotted path, or are given."""

import math

import pytest

from diffusion_grpo.rewards import REWARDS, get_reward


def test_get_reward_takes_names_paths_and_callables() -> None:
    assert get_reward("text") is REWARDS["text"]
    assert get_reward("math.sqrt") is math.sqrt
    assert get_reward(len) is len


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("tesseracct", "Did you mean 'tesseract'"),
        ("zzz", "use one of text, .*color, tesseract, brightness, jpeg_compressibility"),
        ("no_such_package.reward", "no_such_package"),
        ("math.no_such_function", "no_such_function"),
        ("math.pi", "cannot be called"),
    ],
)
def test_get_reward_refuses_what_it_does_not_know(wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_reward(wrong)
