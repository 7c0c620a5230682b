"""Draws the posters that posters.jsonl names, with and without their words, so that they come with no licence."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).with_name("pictures")
SIZE = 512
POSTERS = {"open": ("OPEN", "darkgreen", "ivory"), "sale": ("SALE", "crimson", "gold"), "tea": ("TEA", "navy", "pink")}


def poster(word: str, ground: str, ink: str) -> Image.Image:
    """A framed sheet with one word in its middle; without a word, the frame alone."""
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(picture)
    draw.rectangle([32, 32, SIZE - 32, SIZE - 32], outline=ink, width=8)
    draw.text((SIZE / 2, SIZE / 2), word, fill=ink, font=ImageFont.load_default(128), anchor="mm")
    return picture


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (word, ground, ink) in POSTERS.items():
        poster(word, ground, ink).save(FOLDER / f"poster_{name}.png", optimize=True)
        poster("", ground, ink).save(FOLDER / f"poster_{name}_empty.png", optimize=True)
