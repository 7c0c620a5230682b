"""Draw the images and masks that the datasets next to this file use, so that they need no licence."""

from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).with_name("pictures")
SIZE = 512


def draw_scene(sky: str, ground: str, thing: str, shape: str) -> Image.Image:
    """Draw a horizon with one thing on it: a `house`, a `ball` or a `tree`."""
    image = Image.new("RGB", (SIZE, SIZE), sky)
    draw = ImageDraw.Draw(image)
    draw.rectangle([0, 340, SIZE, SIZE], fill=ground)
    if shape == "house":
        draw.rectangle([176, 220, 336, 380], fill=thing)
        draw.polygon([(156, 220), (356, 220), (256, 130)], fill="firebrick")
    elif shape == "ball":
        draw.ellipse([186, 240, 326, 380], fill=thing)
    else:
        draw.rectangle([242, 280, 270, 390], fill="saddlebrown")
        draw.ellipse([166, 120, 346, 300], fill=thing)
    return image


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    draw_scene("skyblue", "olivedrab", "linen", "house").save(FOLDER / "house.png", optimize=True)
    draw_scene("lightyellow", "sandybrown", "crimson", "ball").save(FOLDER / "ball.png", optimize=True)
    draw_scene("lightsteelblue", "darkseagreen", "forestgreen", "tree").save(FOLDER / "tree.png", optimize=True)
    # of the held-out prompts
    draw_scene("lightpink", "khaki", "sienna", "house").save(FOLDER / "barn.png", optimize=True)
    draw_scene("lightcyan", "darkkhaki", "mediumpurple", "ball").save(FOLDER / "balloon.png", optimize=True)
    draw_scene("thistle", "tan", "goldenrod", "tree").save(FOLDER / "willow.png", optimize=True)
    mask = Image.new("L", (SIZE, SIZE), 0)
    ImageDraw.Draw(mask).rectangle([140, 110, 372, 400], fill=255)
    mask.save(FOLDER / "mask.png", optimize=True)
