"""Sharpness and colourfulness against their formulas."""

import math

import numpy as np
import pytest
from PIL import Image, ImageFilter
from plain_images import RANDOM, flat, noise

from diffusion_grpo.rewards import REWARDS


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    pixels = RANDOM.integers(0, 256, (9, 11), dtype=np.uint8)
    luma = pixels / 255
    laplacian = [
        luma[y - 1, x] + luma[y + 1, x] + luma[y, x - 1] + luma[y, x + 1] - 4 * luma[y, x]
        for y in range(1, 8)
        for x in range(1, 10)
    ]
    assert REWARDS["sharpness"](images=[Image.fromarray(pixels)]) == pytest.approx([np.var(laplacian)])
    board = Image.fromarray((np.indices((8, 8)).sum(0) % 2 * 255).astype(np.uint8))
    ramp = Image.fromarray(np.tile(np.arange(32, dtype=np.uint8), (8, 1)))
    assert REWARDS["sharpness"](images=[board, ramp, flat(9), flat(9, (2, 2))]) == pytest.approx([16, 0, 0, 0])
    sharp = noise(64, 64)
    first, second = REWARDS["sharpness"](images=[sharp, sharp.filter(ImageFilter.GaussianBlur(2))])
    assert first > 10 * second


def test_colorfulness_of_known_images() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))  # rg = 255, yb = 127.5, no variance
    halves = red.copy()
    halves.paste((0, 0, 255), (0, 0, 4, 8))  # rg: 0 and 255; yb: -255 and 127.5
    spread = math.sqrt(127.5**2 + 191.25**2) + 0.3 * math.hypot(127.5, -63.75)
    wanted = [0.3 * math.hypot(255, 127.5), spread, 0]
    assert REWARDS["colorfulness"](images=[red, halves, flat(77)]) == pytest.approx(wanted)
