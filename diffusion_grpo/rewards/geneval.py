"""The reward `geneval`: whether the detected objects meet the requirements of a prompt.

After Ghosh et al. 2023, "GenEval: an object-focused framework for evaluating text-to-image alignment"
(https://huggingface.co/papers/2310.11513): its six tasks (single object, two objects, counting, colours, position,
attribution of colours) are all built from counts, colours and relative positions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any, Literal

from PIL import Image

from .geneval_detectors import ClipColors, Detection, TransformersDetector, name_pixel_colors
from .models.base import ModelReward

COUNTING = "counting"  # the task that requires a higher score of detections


@dataclasses.dataclass
class GenEval:
    """GenEval's reward: 1 if an image shows everything that its prompt requires, else 0.

    The dataset has GenEval's columns `include`, `exclude` and `tag` (lists, or the same as JSON), or one column
    `metadata` with a mapping of them. `include` is a list of `{"class", "count"}`, with `"color"` and `"position":
    [relation, index of the other entry]` where required. `exclude` is a list of `{"class", "count"}`: there must be
    fewer than that. A row without requirements gets `None`. Rewards with equal settings are equal, so a reward may be
    both trained on and evaluated.
    """

    detector: str | Callable
    colors: str = "pixels"
    partial: bool = False
    min_score: float = 0.3
    min_score_counting: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    margin: float = 0.1
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    revision: str = "main"
    colors_revision: str = "main"
    offload: bool = False
    score: Literal["correct", "partial", "dense"] = "correct"

    def __post_init__(self):
        for name in ("min_score", "min_score_counting", "max_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"geneval: {name} is {getattr(self, name)}; it must lie in [0, 1].")
        if self.partial and self.score == "dense":
            raise ValueError("geneval: partial and score: dense are both set; leave one of them out.")
        if self.partial:
            self.score, self.partial = "partial", False

    def __hash__(self) -> int:
        return hash((type(self), self.colors))

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """Return one score per image; see the class."""
        rows = [read_requirements(columns, row) for row in range(len(images))]
        labels = [tuple(sorted({part["class"] for part in row["include"] + row["exclude"]})) for row in rows]
        scores: list[float | None] = [None] * len(images)
        for model in self._models:  # including models that these rows do not use: see `load_once`
            model.load_once()
        try:
            # ask a zero-shot detector only for the classes in the image's own prompt, not others in the batch
            for asked in sorted(set(labels) - {()}):
                places = [row for row, label in enumerate(labels) if label == asked]
                detections = self._detect([images[row] for row in places], list(asked))
                for row, objects in zip(places, detections, strict=True):
                    scores[row] = self._value(images[row], objects, rows[row])
        finally:
            for model in self._models if self.offload else ():  # once, after the last of their many calls
                model.rest()
        return scores

    def check_needs(self) -> None:
        """Raise FileNotFoundError or ImportError if the detector, or CLIP for colours, cannot be loaded."""
        for model in self._models:
            model.check_needs()

    def _value(self, image: Image.Image, detections: list[Detection], wanted: dict[str, Any]) -> float:
        least = self.min_score_counting if wanted["tag"] == COUNTING else self.min_score
        objects = group_by_class(detections, least, self.max_objects, self.max_overlap)
        name_colors = functools.partial(self._name, image)
        if self.score == "dense":
            return dense_score(objects, wanted["include"], name_colors, self.margin)
        checks = check_objects(objects, wanted["include"], wanted["exclude"], name_colors, self.margin)
        return sum(checks) / len(checks) if self.score == "partial" else float(all(checks))

    @property
    def _models(self) -> list[ModelReward]:
        """The detector and the model that names colours, if they have weights."""
        return [model for model in (self._detect, self._name) if isinstance(model, ModelReward)]

    @functools.cached_property
    def _detect(self) -> Callable:
        if callable(self.detector):
            return self.detector
        least = min(self.min_score, self.min_score_counting)
        return TransformersDetector(self.detector, self.device, self.dtype, revision=self.revision, min_score=least)

    @functools.cached_property
    def _name(self) -> Callable:
        if self.colors == "pixels":
            return name_pixel_colors
        return ClipColors(self.colors, self.device, self.dtype, revision=self.colors_revision)


def read_requirements(columns: dict[str, list], row: int) -> dict[str, Any]:
    """Read a row's `{"include", "exclude", "tag"}` from columns with lists or JSON; empty if there are none."""
    values = {name: columns[name][row] for name in ("include", "exclude", "tag") if name in columns}
    if "metadata" in columns:
        values = _parse(columns["metadata"][row]) or {}
    wanted = {"tag": values.get("tag")}
    for name in ("include", "exclude"):
        wanted[name] = [
            {key: value for key, value in part.items() if value is not None} for part in _parse(values.get(name)) or []
        ]
        for place, part in enumerate(wanted[name]):
            position = part.get("position", ["", -1])
            if not {"class", "count"} <= part.keys() or not -1 <= int(position[1]) < place:
                raise ValueError(
                    f"geneval: row {row} has {part!r} in {name}; an entry must be a mapping with class and count, and "
                    "a position must name an earlier entry."
                )
    return wanted


def _parse(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def group_by_class(
    detections: list[Detection], min_score: float, max_objects: int, max_overlap: float
) -> dict[str, list[Detection]]:
    """Group detections above `min_score` by label, highest score first, at most `max_objects` per label."""
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
    """Return the intersection over union of two boxes (left, top, right, bottom)."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (area - shared) if area > shared else 0.0


def find_relations(a: Detection, b: Detection, margin: float = 0.1) -> set[str]:
    """Return where A lies relative to B: any of "left of", "right of", "above", "below"; none if too close."""
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


def check_objects(
    objects: dict[str, list[Detection]],
    include: list[dict[str, Any]],
    exclude: list[dict[str, Any]],
    name_colors: Callable[[list[Detection], str], list[str]],
    margin: float = 0.1,
) -> list[bool]:
    """Return whether each requirement is met by the objects that were found: a count, a colour or a position."""
    checks: list[bool] = []
    matched: list[list[Detection] | None] = []
    for part in include:
        label, count = part["class"], part["count"]
        best = objects.get(label, [])[:count]
        held = [len(best) >= count]
        if "color" in part:
            held.append(bool(best) and name_colors(best, label).count(part["color"]) >= count)
        if "position" in part:
            side, others = part["position"][0], matched[int(part["position"][1])]
            is_there = all(held) and others is not None
            held.append(is_there and all(side in find_relations(a, b, margin) for a in best for b in others))
        checks += held
        matched.append(best if all(held) else None)
    return checks + [len(objects.get(part["class"], [])) < part["count"] for part in exclude]


def dense_score(
    objects: dict[str, list[Detection]],
    include: list[dict[str, Any]],
    name_colors: Callable[[list[Detection], str], list[str]],
    margin: float = 0.1,
) -> float:
    """Return the reward that Flow-GRPO trains on with GenEval's prompts, in (-inf, 1]: how far off the counts are."""
    # after `evaluate_reward` of https://github.com/yifan123/reward-server; `exclude` is ignored
    parts: list[float] = []
    matched: list[list[Detection] | None] = []
    for part in include:
        label, count = part["class"], part["count"]
        labelled = objects.get(label, [])
        parts.append(1 - abs(count - len(labelled)) / count)
        holds = len(labelled) == count
        if not holds and part.keys() & {"color", "position"}:
            parts.append(0.0)
        if holds and "color" in part:
            right = name_colors(labelled, label).count(part["color"])
            parts.append(1 - abs(count - right) / count)
            holds = right == count
        if holds and "position" in part:
            side, others = part["position"][0], matched[int(part["position"][1])]
            holds = others is not None and all(side in find_relations(a, b, margin) for a in labelled for b in others)
            # a wrong position counts half, because Flow-GRPO's server adds a 1 in either case
            parts += [1.0] if holds else [0.0] if others is None else [0.0, 1.0]
        matched.append(labelled if holds else None)
    return sum(parts) / len(parts) if parts else 0.0
