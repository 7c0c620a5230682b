"""GenEval's models: object detectors from transformers, and CLIP or the pixels themselves for colours."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from .contract import check_package
from .models.base import CONFIG, IMAGE_PROCESSOR, TOKENIZER, WEIGHTS, ModelReward, Source
from .models.clip import ClipReward, normalize_features

PHRASES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
NEED_SCIPY = ("owlv2", "maskformer", "mask2former")  # transformers needs it to load or call these
# not supported; for EoMT, transformers returns one map, in which overlapping objects hide each other
REFUSED = ("omdet-turbo", "oneformer", "eomt", "eomt_dinov3", "videomt")
GREY = "#999999"  # fills the area outside an object's mask
SYNONYMS = (  # names of one class: GenEval's, COCO's, and those in `id2label` of published detectors
    ("computer mouse", "mouse"),
    ("computer keyboard", "keyboard"),
    ("tv remote", "remote", "remote control"),
    ("tv", "tv monitor", "television"),
    ("cell phone", "mobile phone"),
    ("couch", "sofa"),
    ("airplane", "aeroplane"),
    ("motorcycle", "motorbike"),
    ("donut", "doughnut"),
    ("hair drier", "hair dryer"),
)
# typical sRGB values of the named colours
NAMED = {
    "red": (215, 30, 35),
    "orange": (245, 140, 20),
    "yellow": (245, 225, 45),
    "green": (40, 150, 60),
    "blue": (40, 80, 210),
    "purple": (130, 50, 170),
    "pink": (245, 150, 190),
    "brown": (120, 75, 40),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}


@dataclasses.dataclass(frozen=True)
class Detection:
    """One object that a detector found.

    Attributes:
        label: class, as the requirements name it.
        score: confidence in [0, 1].
        box: (left, top, right, bottom) in pixels.
        mask: bool array `(height, width)` over the whole image, or None.

    Examples:
        >>> Detection("dog", 0.9, (0, 0, 32, 16)).label
        'dog'
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class TransformersDetector(ModelReward):
    """An object detector from transformers; not a reward itself, but loaded and offloaded like one."""

    batch_size: int = 8
    min_score: float = 0.1

    def sources(self) -> list[Source]:
        return [Source("detector", self.model, CONFIG + WEIGHTS + IMAGE_PROCESSOR, self.revision)]

    def check_needs(self) -> None:
        """Also raise ValueError if the model is no detector, and ImportError if it needs a missing package."""
        super().check_needs()
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model, revision=self.revision)
        if self._family(config) == "zero-shot":
            self.sources()[0]._replace(files=TOKENIZER).check()
        if config.model_type in NEED_SCIPY:
            check_package("scipy", 'pip install "diffusion-grpo[rewards]"')
        if getattr(getattr(config, "backbone_config", None), "model_type", None) == "timm_backbone":
            check_package("timm", "pip install timm")

    def _family(self, config: Any) -> str:
        from transformers.models.auto import modeling_auto as auto

        families = {
            "zero-shot": auto.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING,
            "segmenter": auto.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING,
            "detector": auto.MODEL_FOR_OBJECT_DETECTION_MAPPING,
        }
        if config.model_type == "detr":  # in both families, but trained on boxes
            del families["segmenter"]
        known = [name for name, mapping in families.items() if type(config) in mapping]
        if not known or config.model_type in REFUSED:
            raise ValueError(
                f"{self.model} is a {config.model_type}, which is not a supported detector; use OWLv2, Grounding "
                "DINO, DETR or Mask2Former, or pass a callable."
            )
        return known[0]

    def load(self) -> nn.Module:
        import transformers as tf

        config = tf.AutoConfig.from_pretrained(self.model, revision=self.revision)
        self.family, self.scores_tokens = self._family(config), "grounding-dino" in config.model_type
        loader = tf.AutoProcessor if self.family == "zero-shot" else tf.AutoImageProcessor
        self.processor = loader.from_pretrained(self.model, revision=self.revision, backend="pil")
        cls = {
            "zero-shot": tf.AutoModelForZeroShotObjectDetection,
            "segmenter": tf.AutoModelForUniversalSegmentation,
            "detector": tf.AutoModelForObjectDetection,
        }[self.family]
        return cls.from_pretrained(self.model, revision=self.revision, dtype=self.torch_dtype)

    def __call__(self, images: list[Image.Image], labels: list[str]) -> list[list[Detection]]:
        """Return the objects of the classes `labels` in each image."""
        return self.in_batches(lambda network, part: self._detect(network, part, labels), images)

    def _detect(self, network: nn.Module, images: list, labels: list[str]) -> list[list[Detection]]:
        chunk = [image.convert("RGB") for image in images]
        sizes = [(image.height, image.width) for image in chunk]
        if self.family == "zero-shot":
            # one image per call: all have the same texts, and padding would change an image's result
            return [self._ask(network, image, size, labels) for image, size in zip(chunk, sizes, strict=True)]
        names = self._find_classes(network.config.id2label, labels)
        outputs = _outputs(network, self.processor(images=chunk, return_tensors="pt"))
        read = self._masks if self.family == "segmenter" else self._boxes
        return read(outputs, sizes, names)

    def _find_classes(self, id2label: dict[int, str], labels: list[str]) -> dict[int, list[str]]:
        """Return the asked names of each id of the detector; raise ValueError for names that it does not know."""
        ids: dict[str, list[int]] = {}
        for number, name in id2label.items():
            ids.setdefault(_fold(name), []).append(number)
        names: dict[int, list[str]] = {}
        unknown = []
        for label in labels:
            numbers = next((ids[name] for name in _synonyms(label) if name in ids), [])
            if not numbers:
                unknown.append(label)
            for number in numbers:
                names.setdefault(number, []).append(label)
        if unknown:
            raise ValueError(
                f"geneval asks for {', '.join(map(repr, unknown))}, but {self.model} was trained on other classes "
                "(id2label in its config.json); rename the class in the dataset, or use a detector that finds objects "
                "by their names, such as OWLv2."
            )
        return names

    def _ask(self, network: nn.Module, image: Image.Image, size: tuple, labels: list[str]) -> list[Detection]:
        """Detect objects of these classes by their names."""
        inputs = self.processor(images=image, text=[labels], return_tensors="pt", padding=True)
        outputs = _outputs(network, inputs)
        if self.scores_tokens:
            outputs["logits"] = self._class_logits(outputs.logits, inputs["input_ids"][0].tolist(), labels)
        read = self.processor.image_processor.post_process_object_detection
        (result,) = read(outputs, threshold=self.min_score, target_sizes=[size])
        return _detections(result, {number: [label] for number, label in enumerate(labels)})

    def _class_logits(self, logits: torch.Tensor, ids: list[int], labels: list[str]) -> torch.Tensor:
        """Turn logits of tokens, `(1, queries, tokens)`, into those of classes, `(1, queries, classes)`."""
        # the text is `[CLS] first class . second class . [SEP]`
        stop = self.processor.tokenizer.convert_tokens_to_ids(".")
        ends = [place for place, token in enumerate(ids) if token == stop]
        starts = [1, *(end + 1 for end in ends[:-1])]
        parts = [logits[..., start:end] for start, end, _ in zip(starts, ends, labels, strict=True)]
        # the mean over the tokens of a class, as in mmdet
        return torch.stack([part.sigmoid().mean(-1) for part in parts], -1).logit()

    def _boxes(self, outputs: Any, sizes: list, names: dict[int, list[str]]) -> list[list[Detection]]:
        results = self.processor.post_process_object_detection(outputs, threshold=self.min_score, target_sizes=sizes)
        return [_detections(result, names) for result in results]

    def _masks(self, outputs: Any, sizes: list, names: dict[int, list[str]]) -> list[list[Detection]]:
        # binary maps, because in one map of all objects, overlapping ones would hide each other
        results = self.processor.post_process_instance_segmentation(
            outputs, threshold=self.min_score, target_sizes=sizes, return_binary_maps=True
        )
        masks: list[list[Detection]] = [[] for _ in results]
        for detections, result in zip(masks, results, strict=True):
            for number, part in enumerate(result["segments_info"]):  # without segments, there are no masks either
                for name in names.get(part["label_id"], ()):
                    mask = result["segmentation"][number].bool().cpu().numpy()
                    detections.append(Detection(name, float(part["score"]), _box(mask), mask))
        return masks


@dataclasses.dataclass(eq=False)
class ClipColors(ClipReward):
    """Names the colour of objects with CLIP as GenEval does, comparing crops with phrases for each colour."""

    def sources(self) -> list[Source]:
        files = CONFIG + WEIGHTS + TOKENIZER + IMAGE_PROCESSOR
        return [Source("colors", self.model, files, self.revision)]

    def load(self) -> nn.Module:
        self._known: dict[str, torch.Tensor] = {}  # by label, on the CPU: each label comes again and again
        return super().load()

    def __call__(self, image: Image.Image, objects: list[Detection], label: str) -> list[str]:
        """Return one of the ten colours per object."""
        crops = [_crop(image.convert("RGB"), detection) for detection in objects]
        return self.in_batches(lambda network, part: self._name_colors(network, part, label), crops)

    def _name_colors(self, network: nn.Module, crops: list, label: str) -> list[str]:
        nearest = (self.encode_images(network, crops) @ self._classes(network, label).T).argmax(1).tolist()
        return [list(NAMED)[index] for index in nearest]

    def _classes(self, network: nn.Module, label: str) -> torch.Tensor:
        """Return `(10, features)` float32: per colour, the normalised mean of its phrases' unit embeddings."""
        if label not in self._known:
            phrases = [phrase.format(color=color, label=label) for color in NAMED for phrase in PHRASES]
            texts = self.encode_prompts(network, phrases).reshape(len(NAMED), len(PHRASES), -1).mean(1)
            self._known[label] = normalize_features(texts).cpu()
        return self._known[label].to(network.device)


def _outputs(network: nn.Module, inputs: Any) -> Any:
    """Call the network, and return its outputs in float32 on the CPU."""
    for name, value in inputs.items():
        kind = network.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None
        inputs[name] = value.to(network.device, kind) if isinstance(value, torch.Tensor) else value
    outputs = network(**inputs)
    # transformers' post-processing uses the masks as indices of maps that are on the CPU
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            outputs[name] = value.float().cpu()
        elif isinstance(value, (list, tuple)):
            outputs[name] = type(value)(
                each.float().cpu() if isinstance(each, torch.Tensor) else each for each in value
            )
    return outputs


def _synonyms(label: str) -> list[str]:
    """Return the names of a class, folded, its own first."""
    folded = _fold(label)
    groups = [[_fold(name) for name in group] for group in SYNONYMS]
    return [folded, *(name for group in groups if folded in group for name in group if name != folded)]


def _fold(name: str) -> str:
    return "".join(name.lower().split())


def _detections(result: dict[str, torch.Tensor], names: dict[int, list[str]]) -> list[Detection]:
    rows = zip(*(result[key].tolist() for key in ("labels", "scores", "boxes")), strict=True)
    return [Detection(name, score, tuple(box)) for label, score, box in rows for name in names.get(label, ())]


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _crop(image: Image.Image, detection: Detection) -> Image.Image:
    if detection.mask is not None:
        blank = Image.new("RGB", image.size, GREY)
        image = Image.composite(image, blank, Image.fromarray((detection.mask * 255).astype(np.uint8)))
    left, top, right, bottom = (round(side) for side in detection.box)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


def name_pixel_colors(image: Image.Image, objects: list[Detection], label: str) -> list[str]:
    """Return the named colour nearest (in CIELAB) to each object's median colour; "" for a box outside the image."""
    pixels, names = np.asarray(image.convert("RGB")), list(NAMED)
    known = _lab(np.array(list(NAMED.values())))
    pixel_names = []
    for detection in objects:
        left, top, right, bottom = detection.box
        width, height = (right - left) / 4, (bottom - top) / 4
        rows, columns = _pixels_between(top + height, bottom - height), _pixels_between(left + width, right - width)
        inside = pixels[rows, columns].reshape(-1, 3) if detection.mask is None else pixels[detection.mask]
        if not len(inside):
            pixel_names.append("")
            continue
        distance = np.linalg.norm(known - _lab(np.median(inside, axis=0)), axis=1)
        pixel_names.append(names[int(distance.argmin())])
    return pixel_names


def _pixels_between(low: float, high: float) -> slice:
    """Return the slice from `low` to `high`: at least one pixel, but none that lies before the first."""
    return slice(max(0, int(low)), max(0, int(low) + 1, math.ceil(high)))


def _lab(rgb: np.ndarray) -> np.ndarray:
    """Convert sRGB in 0 to 255, `(..., 3)`, to CIELAB under D65 (IEC 61966-2-1, CIE 15)."""
    linear = rgb / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = linear @ np.array(to_xyz).T / (0.9505, 1.0, 1.089)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)
