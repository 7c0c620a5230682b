"""The reward `color`: whether the writing has the colour that the prompt names.

It is for images of something drawn on a plain background, with prompts that name one of the six colours of
`tiny.COLORS`. Use it with the OCR rewards, because a model trained on spelling alone forgets the colour.
"""

from __future__ import annotations

import math
import re

import numpy as np
from PIL import Image

from ...tiny import COLORS

SCALE = 80.0  # RGB distance at which the score is 1/e; the two nearest named colours are 112 apart
FAINT = 40.0  # RGB distance to the background below which nothing counts as ink


def color(images: list[Image.Image], prompts: list[str], **columns) -> list[float | None]:
    """Return exp(-(d / 80)^2), where d is the RGB distance (0 to 442) from the ink's mean colour to the named one.

    The background is the median pixel. Ink is every pixel whose distance to it is at least 0.7 of the largest (98th
    percentile). An image without ink scores 0. A prompt that names no known colour outside quotes gives `None`.
    """
    scores: list[float | None] = []
    for image, prompt in zip(images, prompts, strict=True):
        name, ink = find_color_name(prompt), ink_color(image)
        if name is None:
            scores.append(None)
        else:
            scores.append(0.0 if ink is None else math.exp(-((math.dist(ink, COLORS[name]) / SCALE) ** 2)))
    return scores


def find_color_name(prompt: str) -> str | None:
    """Return the first colour name outside double quotes, straight or typographic, or `None`."""
    outside = re.sub(r'"[^"]*"|[“„][^“”„]*[“”]', " ", prompt)
    for found in re.findall(r"[a-z]+", outside.lower()):
        if found in COLORS:
            return found
    return None


def ink_color(image: Image.Image) -> tuple[float, float, float] | None:
    """Return the mean RGB (0 to 255) of the pixels that stand out from the background, or `None` if none does."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64).reshape(-1, 3)
    contrast = np.linalg.norm(pixels - np.median(pixels, axis=0), axis=1)
    strongest = np.quantile(contrast, 0.98)
    if strongest < FAINT:
        return None
    return tuple(pixels[contrast >= 0.7 * strongest].mean(axis=0).tolist())


def nearest_color(image: Image.Image) -> str | None:
    """Return the name of the colour nearest to the ink's, or `None` if there is no ink."""
    ink = ink_color(image)
    return None if ink is None else min(COLORS, key=lambda name: math.dist(ink, COLORS[name]))
