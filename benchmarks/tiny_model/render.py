"""Images of words, which the embedded model is trained on: 32x96 RGB, bold monospaced capitals on near-white.

The tests of the rewards draw their clean images with it too.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from diffusion_grpo.tiny import COLORS

HEIGHT, WIDTH = 32, 96
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@cache
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), 23)


def draw_word(word: str, color: str, generator: random.Random) -> Image.Image:
    """Draw `word` (up to six capitals) in a named colour, centred, with slight variations of place, ground and ink."""
    ground = generator.randint(238, 255)
    ink = tuple(max(0, min(255, channel + generator.randint(-8, 8))) for channel in COLORS[color])
    image = Image.new("RGB", (WIDTH, HEIGHT), (ground, ground, ground))
    x = WIDTH / 2 + generator.randint(-1, 1)
    y = HEIGHT / 2 + generator.randint(-1, 1)
    ImageDraw.Draw(image).text((x, y), word, font=_font(), fill=ink, anchor="mm")
    return image


def random_word(generator: random.Random, known: list[str], held_out: set[str]) -> str:
    """Draw a training word: a known one 30 % of the time, else three to six random letters; never a held-out word."""
    if generator.random() < 0.3:
        return generator.choice(known)
    length = generator.choices((3, 4, 5, 6), weights=(1, 2, 3, 3))[0]
    word = "".join(generator.choices(LETTERS, k=length))
    return random_word(generator, known, held_out) if word in held_out else word


def corrupt(
    word: str, color: str, wrong_letters: float, wrong_colors: float, generator: random.Random
) -> tuple[str, str]:
    """Return a partly wrong word and colour: each letter, and the colour, is replaced with the given probability."""
    letters = [generator.choice(LETTERS) if generator.random() < wrong_letters else letter for letter in word]
    if generator.random() < wrong_colors:
        color = generator.choice([name for name in COLORS if name != color])
    return "".join(letters), color
