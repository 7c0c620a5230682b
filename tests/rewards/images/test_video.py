"""Flicker, smoothness and motion of known videos."""

import math

import numpy as np
import pytest
from PIL import Image, ImageFilter
from plain_images import RANDOM, flat, noise

from diffusion_grpo.rewards import REWARDS


def moving(image: Image.Image, right: int, down: int, frames: int, side: int = 128) -> list[Image.Image]:
    """A window over a larger image: the scene moves by (right, down) pixels a frame."""
    start = max(0, right * frames), max(0, down * frames)
    corners = [(start[0] - right * turn, start[1] - down * turn) for turn in range(frames)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


def test_flicker_and_smoothness_of_known_videos() -> None:
    still, fading, blinking = [[flat(shade) for shade in s] for s in ([9, 9, 9], [0, 51, 102], [0, 255, 0])]
    assert REWARDS["flicker"](videos=[still, fading, blinking, still[:1]]) == [
        1, pytest.approx(0.8), pytest.approx(0), None,
    ]  # fmt: skip
    assert REWARDS["smoothness"](videos=[still, fading, blinking, still[:2]]) == [
        1, pytest.approx(1, abs=1e-6), pytest.approx(0), None,
    ]  # fmt: skip


@pytest.mark.parametrize(("right", "down"), [(3, 0), (0, -2), (4, 3), (0, 0)])
def test_motion_finds_a_known_displacement(right, down) -> None:
    scene = noise(200, 200).filter(ImageFilter.GaussianBlur(1))
    (value,) = REWARDS["motion"](videos=[moving(scene, abs(right), abs(down), 4)])
    # blocks at the border show what was not in the frame before, so a few of them are off
    assert value == pytest.approx(100 * math.hypot(right, down) / 128, rel=0.12)


def test_light_and_faint_noise_are_no_motion() -> None:
    scene = np.asarray(noise(128, 128).filter(ImageFilter.GaussianBlur(3)), dtype=np.int16)
    faint = [Image.fromarray((scene // 2 + RANDOM.integers(0, 3, scene.shape)).astype(np.uint8)) for _ in range(3)]
    brighter = [Image.fromarray((scene // 2 + 20 * turn).astype(np.uint8)) for turn in range(3)]
    assert REWARDS["motion"](videos=[faint, brighter, faint[:1]]) == [0, 0, None]


def test_motion_does_not_depend_on_the_resolution() -> None:
    scene = noise(200, 200).filter(ImageFilter.GaussianBlur(1))
    small = moving(scene, 4, 0, 3)
    large = [frame.resize((384, 384), Image.Resampling.BICUBIC) for frame in small]
    first, second = REWARDS["motion"](videos=[small, large])
    assert first == pytest.approx(second, rel=0.05)
