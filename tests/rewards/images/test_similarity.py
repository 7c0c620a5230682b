"""SSIM and PSNR against their published formulas."""

import numpy as np
import pytest
from PIL import Image, ImageFilter
from plain_images import flat, noise, save_turned

from diffusion_grpo.rewards import REWARDS, RewardError, score


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
    image = noise().filter(ImageFilter.GaussianBlur(1))
    other = image.filter(ImageFilter.GaussianBlur(2))
    luma, smooth = (np.asarray(p.convert("L"), dtype=np.float64) for p in (image, other))
    wanted = reference_ssim(luma, smooth)
    assert 0 < wanted < 0.95
    targets = [other, image, noise(), None]
    values = REWARDS["ssim"](images=[image] * 4, target=targets)
    assert values[:2] == pytest.approx([wanted, 1], abs=1e-12) and values[2] < 0.3 and values[3] is None
    (grey,) = REWARDS["ssim"](images=[flat(100)], goal=[flat(150)], target_column="goal")
    assert grey == pytest.approx((2 * 100 * 150 + 6.5025) / (100**2 + 150**2 + 6.5025))


def test_psnr_of_known_errors() -> None:
    values = REWARDS["psnr"](images=[flat(100)] * 4, target=[flat(101), flat(110), flat(100), None])
    assert values == [pytest.approx(48.1308, abs=1e-4), pytest.approx(28.1308, abs=1e-4), 100.0, None]


@pytest.mark.parametrize("name", ["ssim", "psnr"])
def test_a_target_may_be_a_file_of_another_size(name, tmp_path) -> None:
    image = noise().filter(ImageFilter.GaussianBlur(3))
    image.resize((64, 48), Image.Resampling.LANCZOS).save(tmp_path / "large.png")
    (near,) = REWARDS[name](images=[image], target=[str(tmp_path / "large.png")])
    (far,) = REWARDS[name](images=[image], target=[noise()])
    assert near > far and near > {"ssim": 0.98, "psnr": 35}[name]


@pytest.mark.parametrize("name", ["ssim", "psnr"])
def test_a_target_in_a_file_is_turned_upright(name, tmp_path) -> None:
    """As `datasets.Image` does with targets in a typed column."""
    image = noise()
    values = REWARDS[name](images=[image] * 2, target=[save_turned(image, tmp_path / "turned.png"), image])
    assert values[0] == values[1]


def test_ssim_refuses_what_is_smaller_than_its_window() -> None:
    tiny = flat(1, (10, 24))
    with pytest.raises(RewardError, match="at least 11 x 11 pixels, got 10 x 24"):
        score([REWARDS["ssim"]], images=[tiny], prompts=["a"], columns={"target": [tiny]})
