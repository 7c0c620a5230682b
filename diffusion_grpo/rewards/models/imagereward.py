"""The reward `imagereward`: a BLIP, converted here from the original checkpoint to transformers' port."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .aesthetic import build_predictor
from .base import (
    CLIP_MEAN,
    CLIP_STD,
    TOKENIZER,
    ModelReward,
    Source,
    build_model,
    crop_squares,
    read_weights,
    weights_path,
)

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores on the authors' data
TOKENS = 35
HEAD_WIDTH = 64
VISION_EPS = 1e-6
VISION = {  # from BLIP's names to transformers'
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


@dataclasses.dataclass(eq=False)
class ImageReward(ModelReward):
    """ImageReward v1.0 (https://arxiv.org/abs/2304.05977): BLIP on image and prompt, then linear layers."""

    has_gradient = True
    model: str = "THUDM/ImageReward"
    filename: str = "ImageReward.pt"
    tokenizer: str = "google-bert/bert-base-uncased"
    tokenizer_revision: str = "main"

    def sources(self) -> list[Source]:
        return [
            Source("model", self.model, ((self.filename,), ("med_config.json",)), self.revision),
            Source("tokenizer", self.tokenizer, TOKENIZER, self.tokenizer_revision),
        ]

    def load(self) -> nn.Module:
        from transformers import AutoTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        weights = read_weights(weights_path(self.model, self.filename, self.revision))
        written = json.loads(weights_path(self.model, "med_config.json", self.revision).read_text(encoding="utf-8"))
        seeing = vision_weights(_under(weights, "blip.visual_encoder."))
        reading = _under(weights, "blip.text_encoder.")
        reading.pop("embeddings.position_ids", None)  # a plain count from 0, only in older checkpoints
        vision = BlipVisionConfig(**vision_sizes(seeing))
        text = BlipTextConfig(**text_sizes(written), encoder_hidden_size=vision.hidden_size, is_decoder=True)
        self.text_tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, revision=self.tokenizer_revision)
        network = nn.Module()
        network.vision = build_model(BlipVisionModel, vision, seeing, self.torch_dtype)
        network.text = build_model(_without_pooling(BlipTextModel), text, reading, self.torch_dtype)
        network.scorer = build_predictor(text.hidden_size)
        network.scorer.load_state_dict(_under(weights, "mlp.layers."))
        return network

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float]:
        """Return one score per image, about -2 to 2."""
        return self.in_batches(self._scores, images, prompts)

    def _scores(self, network: nn.Module, images: list, prompts: list) -> Tensor:
        size, device = network.vision.config.image_size, network.vision.device
        pixels = crop_squares(images, size, size, CLIP_MEAN, CLIP_STD).to(device, network.vision.dtype)
        seen = network.vision(pixels).last_hidden_state
        tokens = self.text_tokenizer(
            prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(device)
        states = network.text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=device),
        ).last_hidden_state
        return (network.scorer(states[:, 0].float())[:, 0] - MEAN) / STD


def vision_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of BLIP's visual encoder to the names of transformers' `BlipVisionModel`."""
    converted = {}
    for name, weight in weights.items():
        layer, module, kind = re.fullmatch(r"(blocks\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups(default="")
        converted[layer.replace("blocks", "encoder.layers") + VISION[module] + kind] = weight
    return converted


def vision_sizes(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Read the arguments of `BlipVisionConfig` off the weights; heads are 64 wide, as in every BLIP."""
    width, _, patch, _ = weights["embeddings.patch_embedding.weight"].shape
    places = weights["embeddings.position_embedding"].shape[1] - 1
    return {
        "hidden_size": width,
        "num_attention_heads": width // HEAD_WIDTH,
        "num_hidden_layers": sum(name.endswith("mlp.fc1.weight") for name in weights),
        "intermediate_size": weights["encoder.layers.0.mlp.fc1.weight"].shape[0],
        "patch_size": patch,
        "image_size": patch * round(places**0.5),
        "hidden_act": "gelu",
        "layer_norm_eps": VISION_EPS,
    }


def text_sizes(written: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `BlipTextConfig` from BLIP's `med_config.json`."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    names += ("max_position_embeddings", "hidden_act", "layer_norm_eps", "pad_token_id")
    return {name: written[name] for name in names}


def _under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _without_pooling(cls: type) -> type:
    """Return the text model's class without its pooling layer, for which the checkpoint has no weights."""

    class Unpooled(cls):
        def __init__(self, config: Any):
            super().__init__(config, add_pooling_layer=False)

    return Unpooled
