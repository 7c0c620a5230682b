"""The rewards from pixels, against formulas."""

import io
import math
import random

import numpy as np
import pytest
from PIL import Image, ImageFilter
from plain_images import RANDOM, THREE, draw_words, flat, noise

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS
from diffusion_grpo.rewards.pixels import find_color_name
from diffusion_grpo.tiny import COLORS, make_prompt


def test_brightness_is_mean_luma() -> None:
    assert REWARDS["brightness"](images=THREE) == pytest.approx([0, 100 / 255, 1])


def test_color_is_high_for_the_named_color_alone() -> None:
    images, wanted, written, named = draw_words(36)
    right = REWARDS["color"](images=images, prompts=wanted)
    assert min(right) > 0.9
    for other in COLORS:
        scores = REWARDS["color"](images=images, prompts=[make_prompt(word, other) for word in written])
        assert all(value < 0.3 for value, color in zip(scores, named, strict=True) if color != other)


def test_color_survives_blur_and_counts_blank_as_nothing() -> None:
    blurred = draw_word("RAINS", "blue", random.Random(0)).filter(ImageFilter.GaussianBlur(1))
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    scores = REWARDS["color"](images=[blurred, blank, blank], prompts=["in blue", "in blue", "in mauve"])
    assert scores[0] > 0.3 and scores[1:] == [0.0, None]


def test_a_color_inside_the_quotes_is_not_the_wish() -> None:
    image = draw_word("GREEN", "red", random.Random(0))
    (value,) = REWARDS["color"](images=[image], prompts=['the word "GREEN" in red'])
    assert value > 0.9
    for quotes in ('""', "“”", "„“"):
        assert find_color_name(f"the word {quotes[0]}GREEN{quotes[1]} in blue") == "blue"
    assert find_color_name('the word "" and "GREEN" in red') == "red"


def test_jpeg_incompressibility_is_the_other_side() -> None:
    images = [noise(64, 64), flat(90, (64, 64))]
    rough, smooth = REWARDS["jpeg_incompressibility"](images=images)
    buffer = io.BytesIO()
    images[1].save(buffer, format="JPEG", quality=95)
    assert rough > 0.4 and smooth == pytest.approx(len(buffer.getvalue()) / (3 * 64 * 64))
    assert REWARDS["jpeg_compressibility"](images=images) == pytest.approx([max(0, 1 - rough), 1 - smooth])


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    for height in (3, 9):
        pixels = RANDOM.integers(0, 256, (height, 11), dtype=np.uint8)
        luma = pixels / 255
        laplacian = [
            luma[y - 1, x] + luma[y + 1, x] + luma[y, x - 1] + luma[y, x + 1] - 4 * luma[y, x]
            for y in range(1, height - 1)
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
    weak = Image.fromarray((3 * RANDOM.integers(0, 2, (200, 200))).astype(np.uint8))  # 1.5 off where it was before
    assert REWARDS["motion"](videos=[moving(weak, 3, 0, 4)]) == pytest.approx([100 * 3 / 128], rel=0.12)
