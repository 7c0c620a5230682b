"""Preprocessing rounds as torchvision's transforms do."""

import numpy as np
import pytest
import torch
from formulas import torchvision_square
from PIL import Image
from plain_images import flat, noise, save_turned

from diffusion_grpo.rewards.models.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    as_pixels,
    center_crop,
    compare,
    crop_squares,
    normalize,
    open_image,
    resize_short_side,
)


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 50), (64, 32)), ((50, 101), (32, 64)), ((32, 99), (32, 99)), ((33, 47), (32, 45))]
)
def test_the_shorter_side_is_set_and_the_longer_one_rounded_down(size, expected):
    assert resize_short_side(flat(9, size), 32).size == expected


def test_the_middle_is_cut_out_and_half_a_pixel_rounded_to_even():
    image = Image.new("L", (8, 5))
    image.putdata([column + 10 * row for row in range(5) for column in range(8)])
    assert center_crop(image, 3).getpixel((0, 0)) == 2 + 10 * 1  # (8 - 3) / 2 = 2.5, rounded to 2
    assert center_crop(image, 5).getpixel((0, 0)) == 2  # 1.5, rounded to 2


def test_images_of_16_bits_are_scaled():
    deep = Image.fromarray(np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16))
    assert as_pixels([open_image(deep)]).mean().item() == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match="holds floats"):
        open_image(Image.new("F", (8, 8)))


def test_squares_are_those_of_torchvision():
    images = [noise(50, 33), noise(20, 61), noise(24, 24).convert("L")]
    found = crop_squares(images, 26, 24, CLIP_MEAN, CLIP_STD)
    expected = torch.stack([torchvision_square(image, 26, 24, CLIP_MEAN, CLIP_STD) for image in images])
    assert found.shape == (3, 3, 24, 24) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_pixels_and_their_normalisation():
    pixels = as_pixels([Image.new("RGB", (4, 2), (255, 51, 0))])
    assert pixels.shape == (1, 3, 2, 4) and pixels[0, :, 0, 0].tolist() == pytest.approx([1, 0.2, 0])
    assert normalize(pixels, (0.5, 0.2, 0.0), (0.5, 1.0, 2.0))[0, :, 1, 3].tolist() == pytest.approx([1, 0, 0])


def test_an_image_is_read_upright_and_its_file_closed(tmp_path):
    image = noise()
    for path in (save_turned(image, tmp_path / "turned.png"), tmp_path / "turned.png"):
        found = open_image(path)
        assert found.size == image.size and found.tobytes() == image.tobytes()
        assert getattr(found, "fp", None) is None
    assert open_image(image) is image


def test_samples_without_a_target_are_left_out():
    """And nothing is opened but by the similarity, which takes a batch at a time."""
    seen = []

    def similarity(images, targets):
        seen.extend(zip([image.getpixel((0, 0))[0] for image in images], targets))
        return [float(number) for number in range(len(images))]

    images, targets = [flat(1), flat(2), flat(3)], ["no such file.png", None, "nor this.png"]
    assert compare(similarity, images, targets) == [0.0, None, 1.0]
    assert seen == [(1, "no such file.png"), (3, "nor this.png")]
