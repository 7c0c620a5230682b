"""The reward `brightness` is the mean luma."""

import pytest
from plain_images import THREE

from diffusion_grpo.rewards import REWARDS


def test_brightness_is_mean_luma() -> None:
    assert REWARDS["brightness"](images=THREE) == pytest.approx([0, 100 / 255, 1])
