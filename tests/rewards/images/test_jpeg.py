"""Flat images compress well, noise does not."""

import io

import numpy as np
import pytest
from PIL import Image
from plain_images import flat, noise

from diffusion_grpo.rewards import REWARDS


def test_jpeg_compressibility_prefers_flat_images() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    flat = Image.new("RGB", (64, 64), (90, 90, 90))
    rough, smooth = REWARDS["jpeg_compressibility"](images=[noise, flat])
    buffer = io.BytesIO()
    flat.save(buffer, format="JPEG", quality=95)
    assert smooth == pytest.approx(1 - len(buffer.getvalue()) / (3 * 64 * 64))
    assert 0 <= rough < smooth < 1


def test_jpeg_incompressibility_is_the_other_side() -> None:
    images = [noise(64, 64), flat(90, (64, 64))]
    rough, smooth = REWARDS["jpeg_incompressibility"](images=images)
    assert rough > 0.4 and 0 < smooth < 0.1
    assert REWARDS["jpeg_compressibility"](images=images) == pytest.approx([max(0, 1 - rough), 1 - smooth])
