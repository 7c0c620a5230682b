"""Rewards as a user would write them: a function with an option, and a class."""


def scaled(images, *, factor: float = 1.0, text_column: str | None = None, **columns):
    return [factor * image.getpixel((0, 0))[0] / 255 for image in images]


class Scorer:
    def __init__(self, model: str, size: int = 3):
        self.model, self.size = model, size

    def __call__(self, images, **columns):
        return [float(self.size)] * len(images)
