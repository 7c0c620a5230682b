"""Rewards for how well or badly an image compresses as a JPEG.

These are the first rewards of DDPO (Black et al. 2023, "Training Diffusion Models with Reinforcement Learning",
https://huggingface.co/papers/2305.13301), but independent of the image's size.
"""

from __future__ import annotations

import io

from PIL import Image


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
