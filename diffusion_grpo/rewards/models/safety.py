"""The reward `nsfw_filter`: whether an image is safe to show; one reward among others, or a mask on all of them."""

from __future__ import annotations

import dataclasses

import torch
from PIL import Image
from torch import Tensor, nn

from ..needs import CONFIG, IMAGE_PROCESSOR, WEIGHTS, Source
from .base import ModelReward


@dataclasses.dataclass(eq=False)
class NsfwFilter(ModelReward):
    """1 - the probability of the unsafe classes, by an image classifier of transformers.

    To use it as a mask, set `threshold: 0.5` here and `multi_objective_aggregation: product_then_normalize`: the
    product of all rewards is then 0 for an unsafe image.
    """

    model: str = "Falconsai/nsfw_image_detection"
    unsafe_labels: list[str] = dataclasses.field(default_factory=lambda: ["nsfw"])

    def sources(self) -> list[Source]:
        return [Source("model", self.model, CONFIG + WEIGHTS + IMAGE_PROCESSOR, self.revision)]

    def load(self) -> nn.Module:
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        self.processor = AutoImageProcessor.from_pretrained(self.model, revision=self.revision, backend="pil")
        network = AutoModelForImageClassification.from_pretrained(
            self.model, revision=self.revision, dtype=self.torch_dtype
        )
        labels = list(network.config.id2label.values())
        unknown = [label for label in self.unsafe_labels if label not in labels]
        if unknown or not self.unsafe_labels:
            raise ValueError(
                f"{self.model} has the classes {', '.join(labels)}; unsafe_labels is {self.unsafe_labels}."
            )
        return network

    def __call__(self, images: list[Image.Image], **columns) -> list[float]:
        """Return one score per image, from 0 (unsafe) to 1 (safe)."""
        return self.in_batches(self._scores, images)

    def _scores(self, network: nn.Module, images: list) -> Tensor:
        pixels = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        logits = network(pixels["pixel_values"].to(network.device, network.dtype)).logits.float()
        # not label2id, whose numbers are strings in many published models
        unsafe = [number for number, label in network.config.id2label.items() if label in self.unsafe_labels]
        return 1 - torch.softmax(logits, -1)[:, unsafe].sum(-1)
