"""The reward `brightness`: the simplest one, for a first run."""

from __future__ import annotations

import numpy as np
from PIL import Image


def brightness(images: list[Image.Image], **columns) -> list[float]:
    """Return the mean luma (ITU-R 601) per image: 0 for black, 1 for white."""
    return [float(np.asarray(image.convert("L"), dtype=np.float64).mean()) / 255 for image in images]
