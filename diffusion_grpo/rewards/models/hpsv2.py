"""The reward `hpsv2`: Human Preference Score v2.

Unlike in transformers' CLIP, the weights have open_clip's names, and preprocessing pads images to squares.
"""

from __future__ import annotations

import dataclasses
import html
import re
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from .base import (
    CLIP_MEAN,
    CLIP_STD,
    CONFIG,
    TOKENIZER,
    Source,
    as_pixels,
    build_model,
    normalize,
    read_weights,
    weights_path,
)
from .clip import ClipReward, normalize_features

if TYPE_CHECKING:
    from transformers import CLIPModel

PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
NAMES = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "logit_scale": "logit_scale",
}
PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


@dataclasses.dataclass(eq=False)
class HPSv2(ClipReward):
    """HPSv2.1 (https://arxiv.org/abs/2306.09341): cos(image, prompt) by a CLIP ViT-H/14 trained on human choices."""

    has_gradient = True
    model: str = "xswu/HPSv2"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    filename: str | None = "HPS_v2.1_compressed.pt"
    antialias: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.filename is not None and self.processor is None:
            raise ValueError(
                f"hpsv2: {self.filename} contains neither a configuration nor a tokenizer; set processor."
            )

    def sources(self) -> list[Source]:
        if self.filename is None:
            return super().sources()
        return [
            Source("model", self.model, ((self.filename,),), self.revision),
            Source("processor", self.processor, CONFIG + TOKENIZER, self.processor_revision),
        ]

    def load(self) -> CLIPModel:
        if self.filename is None:
            return super().load()
        from transformers import AutoTokenizer, CLIPConfig, CLIPModel

        self.tokenizer = AutoTokenizer.from_pretrained(self.processor, revision=self.processor_revision)
        weights = convert_open_clip(read_weights(weights_path(self.model, self.filename, self.revision)))
        config = CLIPConfig.from_pretrained(self.processor, revision=self.processor_revision)
        return build_model(CLIPModel, config, weights, self.torch_dtype)

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float]:
        """Return one cosine per image, about 0.2 to 0.35; compare only scores for the same prompt."""
        return self.in_batches(self.compare_prompts, images, [clean_prompt(prompt) for prompt in prompts])

    def encode_images(self, network: CLIPModel, images: list[Image.Image]) -> Tensor:
        """Pad images to squares and return their unit embeddings, `(batch, features)` float32."""
        size = network.config.vision_config.image_size
        pixels = torch.cat([self._pad(image, size) for image in images])
        pixels = normalize(pixels, CLIP_MEAN, CLIP_STD).to(network.device, network.dtype)
        return normalize_features(network.visual_projection(network.vision_model(pixels).pooler_output))

    def _pad(self, image: Image.Image, size: int) -> Tensor:
        """Resize as a float tensor, which may leave [0, 1], and pad with 0 to `(1, 3, size, size)`."""
        pixels = as_pixels([image])
        height, width = pixels.shape[-2:]
        scale = size / max(height, width)
        if scale != 1.0:
            height, width = round(height * scale), round(width * scale)
            pixels = torch.nn.functional.interpolate(
                pixels, (height, width), mode="bicubic", align_corners=False, antialias=self.antialias
            )
        left, top = (size - width) // 2, (size - height) // 2
        return torch.nn.functional.pad(pixels, (left, size - width - left, top, size - height - top))


def clean_prompt(prompt: str) -> str:
    """Clean a prompt as open_clip does before tokenizing: repair Unicode, unescape HTML, collapse whitespace."""
    import ftfy

    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt)))).strip()


def convert_open_clip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an open_clip ViT to the names of transformers' `CLIPModel`."""
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)", name)
        if name in NAMES:
            converted[NAMES[name]] = weight
        elif name in PROJECTIONS:
            converted[PROJECTIONS[name]] = weight.T.contiguous()
        elif block is None:
            raise ValueError(f"The checkpoint has {name!r}, which is not a weight of an open_clip ViT.")
        else:
            tower, layer, part = block.groups()
            prefix = f"{'vision' if tower else 'text'}_model.encoder.layers.{layer}"
            converted |= _block(prefix, part, weight)
    return converted


def _block(prefix: str, part: str, weight: Tensor) -> dict[str, Tensor]:
    """Rename one weight of a transformer block; split the joint one of queries, keys and values."""
    if part.startswith("attn.in_proj_"):
        kind = part.removeprefix("attn.in_proj_")
        return {f"{prefix}.self_attn.{n}_proj.{kind}": own for n, own in zip("qkv", weight.chunk(3))}
    module, _, kind = part.rpartition(".")
    if module not in PARTS:
        raise ValueError(f"The checkpoint has {part!r} in a block, which is not a weight of an open_clip ViT.")
    return {f"{prefix}.{PARTS[module]}.{kind}": weight}
