"""Rewards without a model: light, colour, JPEG size and sharpness of images, and the motion of videos.

`color` compares the ink with the colour that the prompt names.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..tiny import COLORS
from .contract import has_gradient

SCALE = 80.0  # RGB distance at which the score is 1/e; the two nearest named colours are 112 apart
FAINT = 40.0  # RGB distance to the background below which nothing counts as ink
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601
LONG_SIDE = 128  # pixels to which frames are reduced before the search for motion
BLOCK, REACH = 8, 8  # side of a block and largest displacement to try, in those pixels


@has_gradient
def brightness(images: list[Image.Image] | Tensor, **columns) -> list[float] | Tensor:
    """Return the mean luma (ITU-R 601) per image: 0 for black, 1 for white."""
    if isinstance(images, Tensor):
        return _luma(images).mean((1, 2))
    return [float(np.asarray(image.convert("L"), dtype=np.float64).mean()) / 255 for image in images]


def _luma(pixels: Tensor) -> Tensor:
    return (pixels * pixels.new_tensor(LUMA)[:, None, None]).sum(1)


def jpeg_compressibility(images: list[Image.Image], **columns) -> list[float]:
    """Return 1 - (bytes as a JPEG of quality 95) / (bytes uncompressed, 3 per pixel) per image, at least 0."""
    return [max(0.0, 1 - share) for share in jpeg_incompressibility(images)]


def jpeg_incompressibility(images: list[Image.Image], **columns) -> list[float]:
    """Return (bytes as a JPEG of quality 95) / (bytes uncompressed, 3 per pixel) per image; noise gives 0.44."""
    return [_jpeg_bytes(image) / (3 * image.width * image.height) for image in images]


def _jpeg_bytes(image: Image.Image) -> int:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=95)
    return buffer.tell()


@has_gradient
def sharpness(images: list[Image.Image] | Tensor, **columns) -> list[float] | Tensor:
    """Return the variance of the Laplacian of the luma in [0, 1] per image: 0 if flat, at most 16."""
    # Pech-Pacheco et al. 2000, https://doi.org/10.1109/ICPR.2000.903548
    if isinstance(images, Tensor):
        return _laplacian(_luma(images)).flatten(1).var(1, correction=0)
    return [_laplacian_variance(np.asarray(image.convert("L"), dtype=np.float64) / 255) for image in images]


def _laplacian_variance(luma: np.ndarray) -> float:
    if min(luma.shape) < 3:
        return 0.0
    return float(_laplacian(luma).var())


def _laplacian(luma: Any) -> Any:
    """Return the Laplacian of an array or tensor (..., height, width)."""
    around = luma[..., :-2, 1:-1] + luma[..., 2:, 1:-1] + luma[..., 1:-1, :-2] + luma[..., 1:-1, 2:]
    return around - 4 * luma[..., 1:-1, 1:-1]


def colorfulness(images: list[Image.Image], **columns) -> list[float]:
    """Return M3 (https://doi.org/10.1117/12.477378): 0 is grey, 15 slightly, 59 quite, 109 extremely colourful."""
    return [_colorfulness(np.asarray(image.convert("RGB"), dtype=np.float64)) for image in images]


def _colorfulness(pixels: np.ndarray) -> float:
    red, green, blue = np.moveaxis(pixels, 2, 0)
    rg, yb = red - green, (red + green) / 2 - blue
    return float(np.sqrt(rg.var() + yb.var()) + 0.3 * np.hypot(rg.mean(), yb.mean()))


@has_gradient
def color(images: list[Image.Image] | Tensor, prompts: list[str], **columns) -> list[float | None] | Tensor:
    """Return exp(-(d / 80)^2), where d is the RGB distance (0 to 442) from the ink's mean colour to the named one."""
    if isinstance(images, Tensor):
        return torch.stack([_color(255 * image.flatten(1), prompt) for image, prompt in zip(images, prompts)])
    scores: list[float | None] = []
    for image, prompt in zip(images, prompts, strict=True):
        name, ink = find_color_name(prompt), ink_color(image)
        if name is None:
            scores.append(None)
        else:
            scores.append(0.0 if ink is None else math.exp(-((math.dist(ink, COLORS[name]) / SCALE) ** 2)))
    return scores


def _color(pixels: Tensor, prompt: str) -> Tensor:
    """Score (3, pixels) of an image, with gradient; NaN without a colour in the prompt."""
    name = find_color_name(prompt)
    contrast = (pixels - pixels.quantile(0.5, dim=1, keepdim=True)).norm(dim=0).detach()
    strongest = contrast.quantile(0.98)
    if name is None or strongest < FAINT:
        return pixels.new_tensor(math.nan if name is None else 0.0)
    ink = pixels[:, contrast >= 0.7 * strongest].mean(1)
    return torch.exp(-(ink - pixels.new_tensor(COLORS[name])).square().sum() / SCALE**2)


def find_color_name(prompt: str) -> str | None:
    """Return the first colour name outside double quotes, straight or typographic, or `None`."""
    outside = re.sub(r'"[^"]*"|[“„][^“”„]*[“”]', " ", prompt)
    for word in re.findall(r"[a-z]+", outside.lower()):
        if word in COLORS:
            return word
    return None


def ink_color(image: Image.Image) -> tuple[float, float, float] | None:
    """Return the mean RGB (0 to 255) of the pixels that stand out from the background, or `None` if none does."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64).reshape(-1, 3)
    contrast = np.linalg.norm(pixels - np.median(pixels, axis=0), axis=1)
    strongest = np.quantile(contrast, 0.98)
    if strongest < FAINT:
        return None
    return tuple(pixels[contrast >= 0.7 * strongest].mean(axis=0).tolist())


def flicker(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return VBench's temporal flickering (https://huggingface.co/papers/2311.17982) in [0, 1]; high means steady."""
    return [None if len(video) < 2 else 1 - float(np.abs(np.diff(_rgb(video), axis=0)).mean()) for video in videos]


def smoothness(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return 1 - mean |x[t] - (x[t-1] + x[t+1]) / 2| / 255 over RGB per video: how well neighbours predict a frame."""
    return [None if len(video) < 3 else 1 - _unevenness(_rgb(video)) for video in videos]


def motion(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return the mean displacement between frames per video, in percent of the longer side: 0 if still, at most 9."""
    return [None if len(video) < 2 else _motion(video) for video in videos]


def _rgb(video: list[Image.Image]) -> np.ndarray:
    """Convert a video to `(frames, height, width, 3)` float32 in [0, 1]."""
    return np.stack([np.asarray(frame.convert("RGB"), dtype=np.float32) for frame in video]) / 255


def _unevenness(frames: np.ndarray) -> float:
    return float(np.abs(frames[1:-1] - (frames[:-2] + frames[2:]) / 2).mean())


def _motion(video: list[Image.Image]) -> float:
    scale = LONG_SIDE / max(video[0].size)
    size = [max(BLOCK, round(side * scale)) for side in video[0].size]
    frames = [np.asarray(frame.convert("L").resize(size, Image.Resampling.BOX), dtype=np.float32) for frame in video]
    frames = [frame - frame.mean() for frame in frames]  # so that changes of light are no motion
    lengths = [_displacements(before, after) for before, after in zip(frames[:-1], frames[1:])]
    return float(100 * np.mean(lengths) / LONG_SIDE)


def _displacements(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the length of each block's displacement from `before` to `after`, in pixels."""
    rows, cols = (side // BLOCK for side in after.shape)
    after = after[: rows * BLOCK, : cols * BLOCK]
    padded = np.pad(before, REACH, mode="edge")
    steps = sorted(np.ndindex(2 * REACH + 1, 2 * REACH + 1), key=lambda step: np.hypot(*(np.array(step) - REACH)))
    best, length = None, np.zeros((rows, cols))
    for down, right in steps:  # from no displacement outwards
        shifted = padded[down : down + after.shape[0], right : right + after.shape[1]]
        cost = np.abs(after - shifted).reshape(rows, BLOCK, cols, BLOCK).mean(axis=(1, 3))
        if best is None:
            best = cost - 1  # still unless another place fits better by 1/255: faint noise is no motion
            continue
        is_better = cost < best
        best = np.where(is_better, cost, best)
        length[is_better] = np.hypot(down - REACH, right - REACH)
    return length
