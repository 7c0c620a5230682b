"""Reward: does the image hold what a GenEval prompt asks for? The logic alone; a detector finds the objects.

In: detections (labels, scores, boxes, masks) and the requirements of a prompt in GenEval's form. Out: whether they
hold, and why not. After Ghosh et al. 2023, "GenEval: an object-focused framework for evaluating
text-to-image alignment" (https://huggingface.co/papers/2310.11513): its six tasks (single object, two objects,
counting, colours, position, attribution of colours) are all built from counts, colours and relative positions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import numpy as np
from PIL import Image

COUNTING = "counting"  # the task for which a detector must be surer


@dataclasses.dataclass(frozen=True)
class Detection:
    """One object that a detector found.

    Attributes:
        label: its class, as the requirements name it.
        score: confidence in [0, 1].
        box: (left, top, right, bottom) in pixels.
        mask: `(height, width)` bool of the whole image, or None.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an image comes to.

    Attributes:
        checks: one (held, sentence) for each single requirement: an object's count, its colour, its position.
    """

    checks: list[tuple[bool, str]]

    @property
    def is_correct(self) -> bool:
        """Whether everything held: GenEval's score."""
        return all(held for held, _ in self.checks)

    @property
    def share(self) -> float:
        """Share of the requirements that held, in [0, 1]."""
        return sum(held for held, _ in self.checks) / len(self.checks)

    @property
    def reason(self) -> str:
        """What did not hold."""
        return "; ".join(sentence for held, sentence in self.checks if not held)


class GenEval:
    """The reward: 1 where an image holds everything that its prompt requires, else 0.

    The dataset has GenEval's columns `include`, `exclude` and `tag` (lists, or the same as JSON), or one column
    `metadata` with a mapping of them. `include` is a list of `{"class", "count"}`, with `"color"` and `"position":
    [relation, index of the other entry]` where asked for; `exclude` a list of `{"class", "count"}`: fewer than that.
    A row without requirements gets `None`.

    Args:
        detector: Hub id or folder of a detector for transformers (`detectors.TransformersDetector`), or, from Python,
            a callable from images and labels to a list of `Detection`s each.
        colors: "pixels" compares the object's median colour with ten named ones; otherwise the Hub id or folder of a
            CLIP model that names it, as GenEval does with ViT-L/14.
        score: of an image that lacks something: "correct" is 0, "partial" the share of the requirements that hold,
            "dense" what Flow-GRPO trains on (`dense_score`).
        partial: the same as `score="partial"`.
        min_score: detections below it do not count; `min_score_counting` in the task "counting". GenEval's numbers are
            for its Mask2Former; other detectors are calibrated otherwise.
        max_objects: of one class.
        max_overlap: of two boxes of a class with a higher intersection over union the surer counts; 1 keeps all.
        margin: how far apart centres must be, in shares of the summed sizes, to count as left, right, above or below.
        device: of the models; by default the accelerator, if there is one.
        dtype: of the models.
        revision: branch, tag or commit of the detector's Hub id; `colors_revision` of that of `colors`.
        offload: the models lie in the host's memory between calls.

    Two with equal settings are equal, so that a reward may be trained on and named as a judge.

    Raises:
        ValueError: `min_score`, `min_score_counting` or `max_overlap` outside [0, 1], an unknown `score`, or `partial`
            beside another one.
    """

    def __init__(
        self,
        detector: str | Callable,
        colors: str = "pixels",
        partial: bool = False,
        min_score: float = 0.3,
        min_score_counting: float = 0.9,
        max_objects: int = 16,
        max_overlap: float = 1.0,
        margin: float = 0.1,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        revision: str = "main",
        colors_revision: str = "main",
        offload: bool = False,
        score: Literal["correct", "partial", "dense"] = "correct",
    ):
        for name, value in (
            ("min_score", min_score),
            ("min_score_counting", min_score_counting),
            ("max_overlap", max_overlap),
        ):
            if not 0 <= value <= 1:
                raise ValueError(f"geneval: {name} is {value}; it lies in [0, 1].")
        if score not in ("correct", "partial", "dense"):
            raise ValueError(f"geneval: score is {score!r}; use correct, partial or dense.")
        if partial and score == "dense":
            raise ValueError("geneval: partial is set beside score: dense; take one of the two out.")
        self.score = "partial" if partial else score
        self.detector, self.colors, self.device = detector, colors, device
        self.min_score, self.min_score_counting = min_score, min_score_counting
        self.max_objects, self.max_overlap, self.margin = max_objects, max_overlap, margin
        self.dtype, self.revision, self.colors_revision, self.offload = dtype, revision, colors_revision, offload

    def settings(self) -> dict[str, Any]:
        """What it was made with, under its names."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash((type(self), self.colors))

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """One score an image; see the class."""
        rows = [read_requirements(columns, row) for row in range(len(images))]
        labels = [tuple(sorted({part["class"] for part in row["include"] + row["exclude"]})) for row in rows]
        scores: list[float | None] = [None] * len(images)
        try:
            self._judge(images, rows, labels, scores)
        finally:
            self._rest()
        return scores

    def check_needs(self) -> None:
        """Raises FileNotFoundError or ImportError where the detector, or CLIP for colours, cannot be loaded."""
        from ..models.base import ModelReward

        for model in (self._detect, self._name):
            if isinstance(model, ModelReward):
                model.check_needs()

    def _judge(self, images: list[Image.Image], rows: list[dict], labels: list[tuple], scores: list) -> None:
        # a detector that is asked by name sees the classes of its own prompt alone, whatever else is in the batch
        for asked in sorted(set(labels) - {()}):
            places = [row for row, own in enumerate(labels) if own == asked]
            found = self._detect([images[row] for row in places], list(asked))
            for row, detections in zip(places, found, strict=True):
                scores[row] = self._value(images[row], detections, rows[row])

    def _value(self, image: Image.Image, detections: list[Detection], wanted: dict[str, Any]) -> float:
        if self.score == "dense":
            objects = self._objects(detections, wanted)
            return dense_score(objects, wanted["include"], lambda *what: self._name(image, *what), self.margin)
        verdict = self.verdict(image, detections, wanted)
        return verdict.share if self.score == "partial" else float(verdict.is_correct)

    def _rest(self) -> None:
        """Not after each of the many calls of a model, but after the last."""
        from ..models.base import ModelReward

        for model in (vars(self).get(name) for name in ("_detect", "_name")):
            if self.offload and isinstance(model, ModelReward):
                model.rest()

    def verdict(self, image: Image.Image, detections: list[Detection], wanted: dict[str, Any]) -> Verdict:
        """Judges one image by its detections and requirements."""
        objects = self._objects(detections, wanted)
        return judge(
            objects, wanted["include"], wanted["exclude"], lambda *what: self._name(image, *what), self.margin
        )

    def _objects(self, detections: list[Detection], wanted: dict[str, Any]) -> dict[str, list[Detection]]:
        least = self.min_score_counting if wanted["tag"] == COUNTING else self.min_score
        return group_by_class(detections, least, self.max_objects, self.max_overlap)

    @cached_property
    def _detect(self) -> Callable:
        if callable(self.detector):
            return self.detector
        from .detectors import TransformersDetector

        least = min(self.min_score, self.min_score_counting)
        return TransformersDetector(self.detector, self.device, self.dtype, revision=self.revision, min_score=least)

    @cached_property
    def _name(self) -> Callable:
        if self.colors == "pixels":
            return name_pixel_colors
        from .detectors import ClipColors

        return ClipColors(self.colors, self.device, self.dtype, revision=self.colors_revision)


def read_requirements(columns: dict[str, list], row: int) -> dict[str, Any]:
    """`{"include", "exclude", "tag"}` of a row, from columns that hold lists or JSON; empty where there is nothing.

    Raises:
        ValueError: an entry is not of GenEval's form.
    """
    values = {name: columns[name][row] for name in ("include", "exclude", "tag") if name in columns}
    if "metadata" in columns:
        values = _parsed(columns["metadata"][row]) or {}
    wanted = {"tag": values.get("tag")}
    for name in ("include", "exclude"):
        wanted[name] = [
            {key: value for key, value in part.items() if value is not None}
            for part in _parsed(values.get(name)) or []
        ]
        for place, part in enumerate(wanted[name]):
            position = part.get("position", ["", -1])
            if not {"class", "count"} <= part.keys() or not -1 <= int(position[1]) < place:
                raise ValueError(
                    f"geneval: row {row} has {part!r} in {name}; an entry is a mapping with class and count, and a "
                    "position names an entry before it."
                )
    return wanted


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def group_by_class(
    detections: list[Detection], min_score: float, max_objects: int, max_overlap: float
) -> dict[str, list[Detection]]:
    """The detections above `min_score` by label, the surest first, at most `max_objects` of one label."""
    objects: dict[str, list[Detection]] = {}
    sure = sorted((d for d in detections if d.score > min_score), key=lambda detection: -detection.score)
    for label in {detection.label for detection in sure}:
        kept: list[Detection] = []
        for detection in [d for d in sure if d.label == label][:max_objects]:
            if max_overlap == 1 or all(iou(detection.box, other.box) < max_overlap for other in kept):
                kept.append(detection)
        objects[label] = kept
    return objects


def iou(a: tuple, b: tuple) -> float:
    """Intersection over union of two boxes (left, top, right, bottom)."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (area - shared) if area > shared else 0.0


def find_relations(a: Detection, b: Detection, margin: float = 0.1) -> set[str]:
    """Where A lies as seen from B: any of "left of", "right of", "above", "below"; none where they are too near.

    The offset of the centres is shortened along each axis by `margin` times the summed sizes; a side counts where what
    is left is more than half of the whole offset.
    """
    offset, rest = [], []
    for low, high in ((0, 2), (1, 3)):
        apart = (a.box[low] + a.box[high] - b.box[low] - b.box[high]) / 2
        sizes = abs(a.box[high] - a.box[low]) + abs(b.box[high] - b.box[low])
        offset.append(apart)
        rest.append(math.copysign(max(abs(apart) - margin * sizes, 0), apart))
    if max(map(abs, rest)) < 1e-3:
        return set()
    right, down = (part / math.hypot(*offset) for part in rest)
    sides = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {side for side, holds in sides.items() if holds}


def judge(
    objects: dict[str, list[Detection]],
    include: list[dict[str, Any]],
    exclude: list[dict[str, Any]],
    name_colors: Callable[[list[Detection], str], list[str]],
    margin: float = 0.1,
) -> Verdict:
    """Checks every requirement against the objects that were found.

    Of each class the surest `count` objects are looked at. A colour must be that of all of them; a position must hold
    between each of them and each of the other entry's, and fails where that entry's own requirements did.

    Args:
        objects: by class, the surest first (`group_by_class`).
        include, exclude: see `GenEval`.
        name_colors: from objects and their class to one colour's name each.
    """
    checks: list[tuple[bool, str]] = []
    matched: list[list[Detection] | None] = []
    for part in include:
        label, count = part["class"], part["count"]
        found = objects.get(label, [])[:count]
        own = [(len(found) >= count, f"expected {count} or more {label}, found {len(found)}")]
        if "color" in part:
            named = name_colors(found, label) if found else []
            right = named.count(part["color"])
            what = f"expected {count} {part['color']} {label}, found {', '.join(named) or 'none'}"
            own.append((right >= count, what))
        if "position" in part:
            side, other = part["position"]
            holds = all(held for held, _ in own) and matched[int(other)] is not None
            sides = [find_relations(a, b, margin) for a in found for b in matched[int(other)] or []] if holds else []
            seen = " and ".join(sorted(set().union(*sides))) or "neither side"
            own.append((holds and all(side in some for some in sides), f"expected {label} {side}, found {seen}"))
        checks += own
        matched.append(found if all(held for held, _ in own) else None)
    for part in exclude:
        count = len(objects.get(part["class"], []))
        checks.append((count < part["count"], f"expected fewer than {part['count']} {part['class']}, found {count}"))
    return Verdict(checks)


def dense_score(
    objects: dict[str, list[Detection]],
    include: list[dict[str, Any]],
    name_colors: Callable[[list[Detection], str], list[str]],
    margin: float = 0.1,
) -> float:
    """The reward that Flow-GRPO trains on with GenEval's prompts: how far off the counts are, in (-inf, 1].

    The mean over the parts of all entries in `include`. Of an entry with `count` c, and n objects found:

    * 1 - |c - n| / c, also where there are too many, so below 0 for n > 2c;
    * where n differs from c, 0 once more if a colour or a position is asked for;
    * otherwise, for a colour that m of them have, 1 - |c - m| / c;
    * and for a position, if the colour held: 1 where it holds for all pairs; 0 where the other entry failed; 0 and 1
      where it does not hold (its server adds the 1 in either case, so that a wrong position counts a half).

    `exclude` has no say. After `evaluate_reward` of https://github.com/yifan123/reward-server.

    Args:
        objects, include, name_colors, margin: as of `judge`; all objects of a class count, not the surest alone.
    """
    parts: list[float] = []
    matched: list[list[Detection] | None] = []
    for part in include:
        label, count = part["class"], part["count"]
        found = objects.get(label, [])
        parts.append(1 - abs(count - len(found)) / count)
        holds = len(found) == count
        if not holds and part.keys() & {"color", "position"}:
            parts.append(0.0)
        if holds and "color" in part:
            right = name_colors(found, label).count(part["color"])
            parts.append(1 - abs(count - right) / count)
            holds = right == count
        if holds and "position" in part:
            side, others = part["position"][0], matched[int(part["position"][1])]
            holds = others is not None and all(side in find_relations(a, b, margin) for a in found for b in others)
            parts += [1.0] if holds else [0.0] if others is None else [0.0, 1.0]
        matched.append(found if holds else None)
    return sum(parts) / len(parts) if parts else 0.0


# Colours as pixels have them: sRGB of what people call so
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


def name_pixel_colors(image: Image.Image, objects: list[Detection], label: str) -> list[str]:
    """The named colour nearest (in CIELAB) to each object's median: in its mask, or the middle of its box; "" where
    that lies outside of the image."""
    pixels, names = np.asarray(image.convert("RGB")), list(NAMED)
    known = _lab(np.array(list(NAMED.values())))
    found = []
    for detection in objects:
        left, top, right, bottom = detection.box
        width, height = (right - left) / 4, (bottom - top) / 4
        rows, columns = _pixels_between(top + height, bottom - height), _pixels_between(left + width, right - width)
        inside = pixels[rows, columns].reshape(-1, 3) if detection.mask is None else pixels[detection.mask]
        if not len(inside):
            found.append("")
            continue
        distance = np.linalg.norm(known - _lab(np.median(inside, axis=0)), axis=1)
        found.append(names[int(distance.argmin())])
    return found


def _pixels_between(low: float, high: float) -> slice:
    """At least one pixel; none where they lie before the first."""
    return slice(max(0, int(low)), max(0, int(low) + 1, math.ceil(high)))


def _lab(rgb: np.ndarray) -> np.ndarray:
    """sRGB in 0 to 255, `(..., 3)`, to CIELAB under D65 (IEC 61966-2-1, CIE 15)."""
    linear = rgb / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = linear @ np.array(to_xyz).T / (0.9505, 1.0, 1.089)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)
