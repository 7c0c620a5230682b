"""Images that several tests of rewards share: grey ones, noise, and rendered words."""

import random
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.tiny import COLORS, make_prompt, words

RANDOM = np.random.default_rng(0)


def flat(shade: int, size: tuple[int, int] = (32, 24)) -> Image.Image:
    """Return an image of one grey."""
    return Image.new("RGB", size, (shade,) * 3)


def noise(width: int = 32, height: int = 24) -> Image.Image:
    """Return random pixels."""
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def draw_words(count: int, seed: int = 0) -> tuple[list, list, list, list]:
    """Draw held-out words cleanly; return images, prompts, words and colours."""
    generator = random.Random(seed)
    written = generator.sample(words("test"), count)
    named = [generator.choice(list(COLORS)) for _ in written]
    images = [draw_word(word, color, generator) for word, color in zip(written, named, strict=True)]
    return images, [make_prompt(*pair) for pair in zip(written, named, strict=True)], written, named


def make_video(*shades: int) -> list[Image.Image]:
    """Return a video of grey frames."""
    return [flat(shade, (8, 8)) for shade in shades]


THREE, THREE_PROMPTS = make_video(0, 100, 255), ["a", "b", "c"]
FOUR, FOUR_PROMPTS = make_video(0, 51, 102, 255), ["a", "b", "a", "b"]


def save_turned(image: Image.Image, path: Path) -> str:
    """Write an image lying on its side, with EXIF data that say how to turn it upright; return the path."""
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turn clockwise
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    return str(path)


def random_image(mode: str, size: tuple[int, int] = (5, 3)) -> Image.Image:
    """Return random pixels of a mode of PIL."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], len(mode)), dtype=np.uint8)
    return Image.fromarray(pixels if len(mode) > 1 else pixels[..., 0])


def are_alike(one, other) -> bool:
    """Whether two samples are of one type and hold the same."""
    if isinstance(one, Image.Image):
        return one.mode == other.mode and one.size == other.size and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(are_alike, one, other)) and len(one) == len(other)
    return type(one) is type(other) and one.dtype == other.dtype and (one == other).all()
