"""The rewards `sharpness` and `colorfulness`."""

from __future__ import annotations

import numpy as np
from PIL import Image


def sharpness(images: list[Image.Image], **columns) -> list[float]:
    """Return the variance of the Laplacian of the luma in [0, 1] per image: 0 if flat, at most 16.

    The Laplacian uses four neighbours and is computed inside the border.

    Pech-Pacheco et al. 2000, "Diatom autofocusing in brightfield microscopy: a comparative study",
    https://doi.org/10.1109/ICPR.2000.903548. Noise counts as sharp. A scene scores lower at a higher resolution.
    """
    return [_laplacian_variance(np.asarray(image.convert("L"), dtype=np.float64) / 255) for image in images]


def _laplacian_variance(luma: np.ndarray) -> float:
    if min(luma.shape) < 3:
        return 0.0
    around = luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:]
    return float((around - 4 * luma[1:-1, 1:-1]).var())


def colorfulness(images: list[Image.Image], **columns) -> list[float]:
    """Return Hasler and Suesstrunk's M3 per image: 0 is grey, 15 slightly, 59 quite, 109 extremely colourful.

    With RGB in 0 to 255, rg = R - G and yb = (R + G) / 2 - B, M3 is sqrt(var(rg) + var(yb)) + 0.3 sqrt(mean(rg)^2 +
    mean(yb)^2). "Measuring colourfulness in natural images", 2003, https://doi.org/10.1117/12.477378.
    """
    return [_colorfulness(np.asarray(image.convert("RGB"), dtype=np.float64)) for image in images]


def _colorfulness(pixels: np.ndarray) -> float:
    red, green, blue = np.moveaxis(pixels, 2, 0)
    rg, yb = red - green, (red + green) / 2 - blue
    return float(np.sqrt(rg.var() + yb.var()) + 0.3 * np.hypot(rg.mean(), yb.mean()))
