"""Rewards by CLIP and DINO: how well an image fits the prompt, or how closely it resembles another image.

Preprocessing, tokens (truncated to the model's 77) and embeddings are those of transformers' port, but always with
Pillow's resize. If torchvision is installed, transformers would use its resize, which gives other scores.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import opens_images
from .base import (
    CONFIG,
    IMAGE_PROCESSOR,
    IMAGENET_MEAN,
    IMAGENET_STD,
    TOKENIZER,
    WEIGHTS,
    ModelReward,
    Source,
    compare,
    crop_squares,
    crop_tensor,
    normalize,
    open_image,
)

if TYPE_CHECKING:
    from transformers import CLIPModel

RESIZE, CROP = 256, 224  # as in the evaluations of both DINO and DINOv2


@dataclasses.dataclass(eq=False)
class ClipReward(ModelReward):
    """Base class of the rewards by a transformers CLIP: loads it, and embeds images and prompts."""

    model: str = "openai/clip-vit-large-patch14"
    processor: str | None = None
    processor_revision: str = "main"

    def sources(self) -> list[Source]:
        network, reader = Source("model", self.model, CONFIG + WEIGHTS, self.revision), self._reader
        if self.processor is None:
            return [network._replace(files=network.files + reader.files)]
        return [network, reader]

    @property
    def _reader(self) -> Source:
        """Where tokenizer and image processor come from."""
        files = TOKENIZER + IMAGE_PROCESSOR
        if self.processor is None:
            return Source("model", self.model, files, self.revision)
        return Source("processor", self.processor, files, self.processor_revision)

    def load(self) -> CLIPModel:
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        place, revision = self._reader.place, self._reader.revision
        self.tokenizer = AutoTokenizer.from_pretrained(place, revision=revision)
        self.image_processor = AutoImageProcessor.from_pretrained(place, revision=revision, backend="pil")
        return CLIPModel.from_pretrained(self.model, revision=self.revision, dtype=self.torch_dtype)

    def encode_images(self, network: CLIPModel, images: list[Image.Image]) -> Tensor:
        """Return the unit embeddings of images, `(batch, features)` float32."""
        reader = self.image_processor
        if isinstance(images, Tensor):
            cut = crop_tensor(images, reader.size["shortest_edge"], reader.crop_size["height"], math.floor)
            pixels = normalize(cut, reader.image_mean, reader.image_std)
        else:
            pixels = reader(images=[image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
        pixels = pixels.to(network.device, network.dtype)
        return normalize_features(network.visual_projection(network.vision_model(pixels).pooler_output))

    def embed(self, images: list[Image.Image]) -> list[list[float]]:
        """Return the embeddings of any number of images as lists, to measure how different the images are."""
        return self.in_batches(self.encode_images, images)

    def encode_prompts(self, network: CLIPModel, prompts: list[str]) -> Tensor:
        """Return the unit embeddings of prompts, `(batch, features)` float32; encode each distinct prompt once."""
        distinct = list(dict.fromkeys(prompts))
        length = network.config.text_config.max_position_embeddings
        tokens = self.tokenizer(distinct, padding=True, truncation=True, max_length=length, return_tensors="pt")
        tokens = tokens.to(network.device)
        states = network.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        embeddings = normalize_features(network.text_projection(states.pooler_output))
        return embeddings[[distinct.index(prompt) for prompt in prompts]]

    def compare_prompts(self, network: CLIPModel, images: list[Image.Image], prompts: list[str]) -> Tensor:
        """Return the cosine of each image and its prompt."""
        return (self.encode_images(network, images) * self.encode_prompts(network, prompts)).sum(-1)


@dataclasses.dataclass(eq=False)
class ClipScore(ClipReward):
    """CLIPScore (https://arxiv.org/abs/2104.08718): 100 max(cos(image, prompt), 0), as torchmetrics computes it."""

    has_gradient = True

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float]:
        """Return one score in [0, 100] per image and its prompt."""
        return self.in_batches(self._scores, images, prompts)

    def _scores(self, network: CLIPModel, images: list, prompts: list) -> Tensor:
        # the paper scales by 2.5 and puts "A photo depicts" before a caption
        return (100 * self.compare_prompts(network, images, prompts)).clamp(min=0)


@dataclasses.dataclass(eq=False)
class PickScore(ClipReward):
    """PickScore (https://arxiv.org/abs/2305.01569): exp(logit scale) cos(image, prompt) by a trained CLIP ViT-H/14."""

    has_gradient = True
    model: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float]:
        """Return one score per image; compare only scores for the same prompt."""
        return self.in_batches(self._scores, images, prompts)

    def _scores(self, network: CLIPModel, images: list, prompts: list) -> Tensor:
        return network.logit_scale.float().exp() * self.compare_prompts(network, images, prompts)


@opens_images
@dataclasses.dataclass(eq=False)
class ClipSimilarity(ClipReward):
    """CLIP-I of DreamBooth (https://arxiv.org/abs/2208.12242): cosine of an image and its target in a column."""

    target_column: str = "target"

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """Return one cosine in [-1, 1] per image: 1 if it equals its target, None if it has none."""
        return compare(lambda *pairs: self.in_batches(self._cosines, *pairs), images, columns[self.target_column])

    def _cosines(self, network: CLIPModel, images: list, others: list) -> Tensor:
        targets = self.encode_images(network, list(map(open_image, others)))
        return (self.encode_images(network, images) * targets).sum(-1)


@opens_images
@dataclasses.dataclass(eq=False)
class DinoSimilarity(ModelReward):
    """DINO of DreamBooth (https://arxiv.org/abs/2208.12242): cosine of an image and its target in a column."""

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


def normalize_features(embeddings: Tensor) -> Tensor:
    """Scale embeddings `(batch, features)` to length 1, in float32."""
    return torch.nn.functional.normalize(embeddings.float(), dim=-1)
