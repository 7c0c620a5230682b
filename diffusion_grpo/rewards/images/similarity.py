"""The rewards `ssim` and `psnr`: how closely an image resembles a target in a dataset column.

The target is a PIL image or a path. If its size differs, it is resized (Lanczos) to the sample's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from ...media.samples import convert_image
from ..contract import opens_images
from ..models.pixels import open_image

WINDOW, SIGMA = 11, 1.5  # the Gaussian window of SSIM: side and standard deviation in pixels
K1, K2 = 0.01, 0.03


@opens_images
def ssim(images: list[Image.Image], target_column: str = "target", **columns) -> list[float | None]:
    """Return the mean structural similarity of the lumas in 0 to 255 per image: in [-1, 1], 1 if equal to its target.

    Follows Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity",
    https://doi.org/10.1109/TIP.2003.819861: windows of 11 x 11 pixels that lie inside the image, Gaussian of standard
    deviation 1.5, K1 = 0.01, K2 = 0.03, without the authors' optional downsampling. `None` for an image without a
    target.
    """
    pairs = zip(images, columns[target_column], strict=True)
    return [None if other is None else _ssim(_luma(image), _luma(_like(other, image))) for image, other in pairs]


@opens_images
def psnr(images: list[Image.Image], target_column: str = "target", **columns) -> list[float | None]:
    """Return the peak signal-to-noise ratio per image, in dB: 10 log10(255^2 / MSE) over RGB in 0 to 255.

    It is at most 100, the value for equal images. `None` for an image without a target.
    """
    pairs = zip(images, columns[target_column], strict=True)
    return [None if other is None else _psnr(_rgb(image), _rgb(_like(other, image))) for image, other in pairs]


def _like(other: Image.Image | str | Path, image: Image.Image) -> Image.Image:
    other = open_image(other)
    if other.size == image.size:
        return other
    return convert_image(other, "RGB").resize(image.size, Image.Resampling.LANCZOS)


def _luma(image: Image.Image) -> np.ndarray:
    return np.asarray(convert_image(image, "L"), dtype=np.float64)


def _rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(convert_image(image, "RGB"), dtype=np.float64)


def _psnr(x: np.ndarray, y: np.ndarray) -> float:
    error = ((x - y) ** 2).mean()
    return 100.0 if error == 0 else min(100.0, float(10 * np.log10(255**2 / error)))


def _ssim(x: np.ndarray, y: np.ndarray) -> float:
    if min(x.shape) < WINDOW:
        raise ValueError(f"ssim needs images of at least {WINDOW} x {WINDOW} pixels, got {x.shape[1]} x {x.shape[0]}.")
    mean_x, mean_y = _smooth(x), _smooth(y)
    var_x, var_y = _smooth(x * x) - mean_x**2, _smooth(y * y) - mean_y**2
    covariance = _smooth(x * y) - mean_x * mean_y
    c1, c2 = (K1 * 255) ** 2, (K2 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((luminance * (2 * covariance + c2) / (var_x + var_y + c2)).mean())


def _smooth(pixels: np.ndarray) -> np.ndarray:
    """Return the Gaussian means of all windows that lie inside, one axis after the other."""
    offsets = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-(offsets**2) / (2 * SIGMA**2))
    weights /= weights.sum()
    rows = np.lib.stride_tricks.sliding_window_view(pixels, WINDOW, axis=0) @ weights
    return np.lib.stride_tricks.sliding_window_view(rows, WINDOW, axis=1) @ weights
