"""The reward `dino_similarity`: how closely an image resembles another one, by DINO's embeddings."""

from __future__ import annotations

import dataclasses

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import opens_images
from ..needs import CONFIG, WEIGHTS, Source
from .base import ModelReward
from .pixels import IMAGENET_MEAN, IMAGENET_STD, compare, crop_squares, open_image

RESIZE, CROP = 256, 224  # as in the evaluations of both DINO and DINOv2


@opens_images
@dataclasses.dataclass(eq=False)
class DinoSimilarity(ModelReward):
    """Cosine between the DINO [CLS] embeddings of an image and of its target in a column.

    This is the metric DINO of DreamBooth (https://arxiv.org/abs/2208.12242), which uses the default model. Images are
    resized to a shorter side of 256 pixels (bicubic), cropped to 224 and normalised with ImageNet's mean and standard
    deviation, as in DINO's own evaluation (https://arxiv.org/abs/2104.14294).
    """

    model: str = "facebook/dino-vits16"
    target_column: str = "target"

    def sources(self) -> list[Source]:
        return [Source("model", self.model, CONFIG + WEIGHTS, self.revision)]

    def load(self) -> nn.Module:
        from transformers import AutoModel

        return AutoModel.from_pretrained(self.model, revision=self.revision, dtype=self.torch_dtype)

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """Return one cosine in [-1, 1] per image: 1 if it equals its target, None if it has none."""
        return compare(lambda *pairs: self.in_batches(self._cosines, *pairs), images, columns[self.target_column])

    def _cosines(self, network: nn.Module, images: list, others: list) -> Tensor:
        pixels = crop_squares([*images, *map(open_image, others)], RESIZE, CROP, IMAGENET_MEAN, IMAGENET_STD)
        states = network(pixels.to(network.device, network.dtype)).last_hidden_state
        seen, expected = states[:, 0].float().chunk(2)
        return torch.nn.functional.cosine_similarity(seen, expected)
