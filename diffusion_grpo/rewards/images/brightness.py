"""Reward: how bright an image is. In: images. Out: mean luma in [0, 1]. The smallest reward, for first runs."""

from __future__ import annotations

import numpy as np
from PIL import Image


def brightness(images: list[Image.Image], **columns) -> list[float]:
    """Mean luma (ITU-R 601) of each image: 0 for black, 1 for white."""
    return [float(np.asarray(image.convert("L"), dtype=np.float64).mean()) / 255 for image in images]
