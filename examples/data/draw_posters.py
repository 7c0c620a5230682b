"""Draw the posters of posters.jsonl and posters_test.jsonl, with and without words, so that they need no licence."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).with_name("pictures")
SIZE = 512
POSTERS = {"open": ("OPEN", "darkgreen", "ivory"), "sale": ("SALE", "crimson", "gold"), "tea": ("TEA", "navy", "pink")}
POSTERS |= {"cafe": ("CAFE", "saddlebrown", "white"), "exit": ("EXIT", "teal", "orange")}  # of posters_test.jsonl
POSTERS |= {"jam": ("JAM", "purple", "yellow")}


def draw_poster(word: str, ground: str, ink: str) -> Image.Image:
    """Draw a framed sheet with one word in the middle; without a word, only the frame."""
    image = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(image)
    draw.rectangle([32, 32, SIZE - 32, SIZE - 32], outline=ink, width=8)
    draw.text((SIZE / 2, SIZE / 2), word, fill=ink, font=ImageFont.load_default(128), anchor="mm")
    return image


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (word, ground, ink) in POSTERS.items():
        draw_poster(word, ground, ink).save(FOLDER / f"poster_{name}.png", optimize=True)
        draw_poster("", ground, ink).save(FOLDER / f"poster_{name}_empty.png", optimize=True)
