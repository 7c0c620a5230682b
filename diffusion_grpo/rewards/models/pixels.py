"""Turn PIL images into tensors `(batch, 3, height, width)` with the preprocessing that networks were trained with.

Scorers were trained with torchvision's transforms. This module reproduces their rounding with Pillow alone: another
resize, or a crop that is off by one pixel, gives another score.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...media.samples import convert_image

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_image(image: Image.Image | str | Path) -> Image.Image:
    """Return an image with 8 bits per channel; read one at a path, rotated according to its EXIF data."""
    if isinstance(image, (str, Path)):
        with Image.open(image) as file:
            image = ImageOps.exif_transpose(file)
    return convert_image(image, None) if isinstance(image, Image.Image) else image


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Resize (bicubic, antialiased) so that the shorter side is `size`; round the longer one down."""
    width, height = image.size
    if min(width, height) == size:
        return image
    resized = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    return image.resize(resized, Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Cut out the square in the middle; round half a pixel to even."""
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def as_pixels(images: list[Image.Image]) -> Tensor:
    """Convert images of one size to `(batch, 3, height, width)` float32 in [0, 1]."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return `(pixels - mean) / std`, with one mean and one standard deviation per channel."""
    return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def crop_squares(
    images: list[Image.Image], resize: int, crop: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Resize the shorter side to `resize`, cut out the middle and normalise, to `(batch, 3, crop, crop)`."""
    cut = [center_crop(resize_short_side(image.convert("RGB"), resize), crop) for image in images]
    return normalize(as_pixels(cut), mean, std)


def compare(
    similarity: Callable[[list, list], list[float]], images: list[Image.Image], targets: list
) -> list[float | None]:
    """Return the similarity of each image to its target; None for an image without one.

    `similarity` opens the targets itself, a batch at a time, because all of them may be more than memory holds.
    """
    pairs = [(image, target) for image, target in zip(images, targets, strict=True) if target is not None]
    found = iter(similarity([image for image, _ in pairs], [other for _, other in pairs]))
    return [None if target is None else next(found) for target in targets]
