"""Stand-ins for two of GLM-Image's four rewards, LPIPS and an aesthetic score, that need no weights.

Both have the form that those have: higher is better, in [0, 1], `None` where there is nothing to compare with.
"""

import numpy as np
from PIL import Image

from diffusion_grpo.rewards.pictures import colorfulness, sharpness

SCALES = (1, 2, 4, 8)
VIVID = 59.0  # "quite colourful" on Hasler and Suesstrunk's scale


def perceptual(images: list[Image.Image], target: list, **columns) -> list[float | None]:
    """1 - mean absolute difference to the target over four resolutions. Stands in for 1 - LPIPS."""
    pairs = zip(images, target, strict=True)
    return [None if other is None else 1 - _distance(image, _opened(other)) for image, other in pairs]


def aesthetic(images: list[Image.Image], **columns) -> list[float]:
    """Half for colours up to quite colourful, half for edges. Stands in for an aesthetic predictor."""
    scores = zip(colorfulness(images), sharpness(images), strict=True)
    return [min(1.0, color / VIVID) / 2 + min(1.0, 20 * edges) / 2 for color, edges in scores]


def _opened(picture: Image.Image | str) -> Image.Image:
    return Image.open(picture) if isinstance(picture, str) else picture


def _distance(image: Image.Image, other: Image.Image) -> float:
    distances = []
    for scale in SCALES:
        size = (max(1, image.width // scale), max(1, image.height // scale))
        one, two = (np.asarray(part.convert("RGB").resize(size), dtype=np.float64) / 255 for part in (image, other))
        distances.append(np.abs(one - two).mean())
    return float(np.mean(distances))
