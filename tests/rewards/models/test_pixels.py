"""Rewards without weights, against values known in advance or written out in float64."""

import math

import numpy as np
import pytest
from PIL import Image, ImageFilter

from diffusion_grpo.rewards import REWARDS, RewardError, score

RANDOM = np.random.default_rng(0)


def noise(width: int = 32, height: int = 24) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def flat(shade: int, size: tuple[int, int] = (32, 24)) -> Image.Image:
    return Image.new("RGB", size, (shade,) * 3)


# pictures


def test_jpeg_incompressibility_is_the_other_side() -> None:
    pictures = [noise(64, 64), flat(90, (64, 64))]
    rough, smooth = REWARDS["jpeg_incompressibility"](images=pictures)
    assert rough > 0.4 and 0 < smooth < 0.1
    assert REWARDS["jpeg_compressibility"](images=pictures) == pytest.approx([max(0, 1 - rough), 1 - smooth])


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


def test_colorfulness_of_known_pictures() -> None:
    red = Image.new("RGB", (8, 8), (255, 0, 0))  # rg = 255, yb = 127.5, no variance
    halves = red.copy()
    halves.paste((0, 0, 255), (0, 0, 4, 8))  # rg: 0 and 255; yb: -255 and 127.5
    spread = math.sqrt(127.5**2 + 191.25**2) + 0.3 * math.hypot(127.5, -63.75)
    wanted = [0.3 * math.hypot(255, 127.5), spread, 0]
    assert REWARDS["colorfulness"](images=[red, halves, flat(77)]) == pytest.approx(wanted)


def reference_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """The formula window by window, as in the paper."""
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2, values = (0.01 * 255) ** 2, (0.03 * 255) ** 2, []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
            cov = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
            )
    return float(np.mean(values))


def test_ssim_is_the_published_formula() -> None:
    picture = noise().filter(ImageFilter.GaussianBlur(1))
    other = picture.filter(ImageFilter.GaussianBlur(2))
    luma, smooth = (np.asarray(p.convert("L"), dtype=np.float64) for p in (picture, other))
    wanted = reference_ssim(luma, smooth)
    assert 0 < wanted < 0.95
    targets = [other, picture, noise(), None]
    values = REWARDS["ssim"](images=[picture] * 4, target=targets)
    assert values[:2] == pytest.approx([wanted, 1], abs=1e-12) and values[2] < 0.3 and values[3] is None
    (grey,) = REWARDS["ssim"](images=[flat(100)], goal=[flat(150)], target_column="goal")
    assert grey == pytest.approx((2 * 100 * 150 + 6.5025) / (100**2 + 150**2 + 6.5025))


def test_psnr_of_known_errors() -> None:
    values = REWARDS["psnr"](images=[flat(100)] * 4, target=[flat(101), flat(110), flat(100), None])
    assert values == [pytest.approx(48.1308, abs=1e-4), pytest.approx(28.1308, abs=1e-4), 100.0, None]


@pytest.mark.parametrize("name", ["ssim", "psnr"])
def test_a_target_may_be_a_file_of_another_size(name, tmp_path) -> None:
    picture = noise().filter(ImageFilter.GaussianBlur(3))
    picture.resize((64, 48), Image.Resampling.LANCZOS).save(tmp_path / "large.png")
    (near,) = REWARDS[name](images=[picture], target=[str(tmp_path / "large.png")])
    (far,) = REWARDS[name](images=[picture], target=[noise()])
    assert near > far and near > {"ssim": 0.98, "psnr": 35}[name]


def test_ssim_refuses_what_is_smaller_than_its_window() -> None:
    tiny = flat(1, (10, 24))
    with pytest.raises(RewardError, match="at least 11 x 11 pixels, got 10 x 24"):
        score([REWARDS["ssim"]], images=[tiny], prompts=["a"], columns={"target": [tiny]})


# videos


def moving(picture: Image.Image, right: int, down: int, frames: int, side: int = 128) -> list[Image.Image]:
    """A window over a larger picture: the scene moves by (right, down) pixels a frame."""
    start = max(0, right * frames), max(0, down * frames)
    corners = [(start[0] - right * turn, start[1] - down * turn) for turn in range(frames)]
    return [picture.crop((x, y, x + side, y + side)) for x, y in corners]


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
