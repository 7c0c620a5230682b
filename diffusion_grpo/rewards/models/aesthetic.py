"""The rewards `aesthetic` (LAION's score, by a small network on CLIP's embedding) and `nsfw_filter` (safe to show)."""

from __future__ import annotations

import dataclasses

import torch
from PIL import Image
from torch import Tensor, nn

from .base import (
    CLIP_MEAN,
    CLIP_STD,
    CONFIG,
    IMAGE_PROCESSOR,
    WEIGHTS,
    ModelReward,
    Source,
    crop_squares,
    read_weights,
    weights_path,
)

WIDTHS = (1024, 128, 64, 16, 1)
DROPPED = (0, 1, 2)  # layers followed by a dropout, which takes a number in the weights' names


@dataclasses.dataclass(eq=False)
class Aesthetic(ModelReward):
    """LAION's aesthetic score: https://github.com/christophschuhmann/improved-aesthetic-predictor."""

    has_gradient = True
    # `sac+logos+ava1-l14-linearMSE`, as in DDPO (https://arxiv.org/abs/2305.13301) and Flow-GRPO
    model: str = "trl-lib/ddpo-aesthetic-predictor"
    filename: str = "aesthetic-model.pth"
    backbone: str = "openai/clip-vit-large-patch14"
    backbone_revision: str = "main"

    def sources(self) -> list[Source]:
        return [
            Source("model", self.model, ((self.filename,),), self.revision),
            Source("backbone", self.backbone, CONFIG + WEIGHTS, self.backbone_revision),
        ]

    def load(self) -> nn.Module:
        from transformers import CLIPConfig, CLIPVisionModelWithProjection

        revision = self.backbone_revision
        config = CLIPConfig.from_pretrained(self.backbone, revision=revision)
        config.vision_config.projection_dim = config.projection_dim  # some checkpoints set only the joint one
        network = nn.Module()
        network.clip = CLIPVisionModelWithProjection.from_pretrained(
            self.backbone, revision=revision, config=config.vision_config, dtype=self.torch_dtype
        )
        network.predictor = build_predictor(config.projection_dim)
        weights = read_weights(weights_path(self.model, self.filename, self.revision))
        network.predictor.load_state_dict({name.removeprefix("layers."): each for name, each in weights.items()})
        return network

    def __call__(self, images: list[Image.Image], **columns) -> list[float]:
        """Return one score per image."""
        return self.in_batches(self._scores, images)

    def _scores(self, network: nn.Module, images: list) -> Tensor:
        size = network.clip.config.image_size
        pixels = crop_squares(images, size, size, CLIP_MEAN, CLIP_STD).to(network.clip.device, network.clip.dtype)
        embeddings = torch.nn.functional.normalize(network.clip(pixels).image_embeds.float(), dim=-1)
        return network.predictor(embeddings)[:, 0]


@dataclasses.dataclass(eq=False)
class NsfwFilter(ModelReward):
    """1 - the probability of the unsafe classes, by an image classifier of transformers."""

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


def build_predictor(width: int) -> nn.Sequential:
    """Build linear layers from `width` to 1, with dropouts but no activations, as ImageReward uses them too."""
    layers: list[nn.Module] = []
    for place, (inner, outer) in enumerate(zip((width, *WIDTHS), WIDTHS)):
        layers.append(nn.Linear(inner, outer))
        if place in DROPPED:
            layers.append(nn.Dropout())
    return nn.Sequential(*layers)
