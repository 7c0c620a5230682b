"""The reward `geneval`: whether an image shows what a GenEval prompt asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from PIL import Image

from ..models.base import ModelReward
from .detectors import ClipColors, TransformersDetector
from .scoring import (
    Detection,
    Verdict,
    check_objects,
    dense_score,
    group_by_class,
    name_pixel_colors,
    read_requirements,
)

COUNTING = "counting"  # the task that requires a higher score of detections


class GenEval:
    """GenEval's reward: 1 if an image shows everything that its prompt requires, else 0.

    The dataset has GenEval's columns `include`, `exclude` and `tag` (lists, or the same as JSON), or one column
    `metadata` with a mapping of them. `include` is a list of `{"class", "count"}`, with `"color"` and `"position":
    [relation, index of the other entry]` where required. `exclude` is a list of `{"class", "count"}`: there must be
    fewer than that. A row without requirements gets `None`. Rewards with equal settings are equal, so a reward may be
    both trained on and evaluated.
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
                raise ValueError(f"geneval: {name} is {value}; it must lie in [0, 1].")
        if score not in ("correct", "partial", "dense"):
            raise ValueError(f"geneval: score is {score!r}; use correct, partial or dense.")
        if partial and score == "dense":
            raise ValueError("geneval: partial and score: dense are both set; leave one of them out.")
        self.score = "partial" if partial else score
        self.detector, self.colors, self.device = detector, colors, device
        self.min_score, self.min_score_counting = min_score, min_score_counting
        self.max_objects, self.max_overlap, self.margin = max_objects, max_overlap, margin
        self.dtype, self.revision, self.colors_revision, self.offload = dtype, revision, colors_revision, offload

    def settings(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()

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
            self._score_images(images, rows, labels, scores)
        finally:
            self._rest()
        return scores

    def check_needs(self) -> None:
        """Raise FileNotFoundError or ImportError if the detector, or CLIP for colours, cannot be loaded."""
        for model in self._models:
            model.check_needs()

    def _score_images(self, images: list[Image.Image], rows: list[dict], labels: list[tuple], scores: list) -> None:
        # ask a zero-shot detector only for the classes in the image's own prompt, not others in the batch
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
        """Offload the models once, after the last of their many calls."""
        if self.offload:
            for model in self._models:
                model.rest()

    def verdict(self, image: Image.Image, detections: list[Detection], wanted: dict[str, Any]) -> Verdict:
        """Check one image's detections against its requirements."""
        objects = self._objects(detections, wanted)
        return check_objects(
            objects, wanted["include"], wanted["exclude"], lambda *what: self._name(image, *what), self.margin
        )

    def _objects(self, detections: list[Detection], wanted: dict[str, Any]) -> dict[str, list[Detection]]:
        least = self.min_score_counting if wanted["tag"] == COUNTING else self.min_score
        return group_by_class(detections, least, self.max_objects, self.max_overlap)

    @property
    def _models(self) -> list[ModelReward]:
        """The detector and the model that names colours, if they have weights."""
        return [model for model in (self._detect, self._name) if isinstance(model, ModelReward)]

    @cached_property
    def _detect(self) -> Callable:
        if callable(self.detector):
            return self.detector
        least = min(self.min_score, self.min_score_counting)
        return TransformersDetector(self.detector, self.device, self.dtype, revision=self.revision, min_score=least)

    @cached_property
    def _name(self) -> Callable:
        if self.colors == "pixels":
            return name_pixel_colors
        return ClipColors(self.colors, self.device, self.dtype, revision=self.colors_revision)
