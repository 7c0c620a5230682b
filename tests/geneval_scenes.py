"""Images of rectangles whose boxes are known, and GenEval's verdicts on them."""

from PIL import Image, ImageDraw

from diffusion_grpo.rewards.geneval import GenEval
from diffusion_grpo.rewards.geneval_detectors import NAMED, Detection

SIZE = 200


class Scene:
    """An image of rectangles, and a detector that knows where they are."""

    def __init__(self, *objects):
        self.image, self.detections = Image.new("RGB", (SIZE, SIZE), (128, 128, 128)), []
        for index, (label, color, (left, top, width, height), *certainty) in enumerate(objects):
            box = (left, top, left + width, top + height)
            ImageDraw.Draw(self.image).rectangle(box, fill=NAMED[color])
            self.detections.append(Detection(label, certainty[0] if certainty else 0.99 - index / 1000, box))


def verdicts(scenes, rows, **options) -> list[float]:
    asked = []

    def detector(images, labels):
        asked.append(labels)
        found = {scene.image.tobytes(): scene.detections for scene in scenes}
        return [[d for d in found[image.tobytes()] if d.label in labels] for image in images]

    columns = {name: [row.get(name) for row in rows] for name in ("include", "exclude", "tag")}
    return GenEval(detector, **options)(images=[scene.image for scene in scenes], **columns)
