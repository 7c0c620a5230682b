"""Qwen2-VL with a reward head at marked tokens: the network of HPSv3 and VideoAlign.

Both were trained with plain positions 0, 1, 2, ... for all tokens instead of Qwen2-VL's three-dimensional ones,
because their code calls the language model with embeddings and leaves the positions at their default. This module uses
the same positions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from .base import CLIP_MEAN, CLIP_STD, CONFIG, TOKENIZER, ModelReward, Source, read_weights, weights_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2VLConfig

# Qwen2-VL's chat template, filled in for one user turn with one image or video before the text
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{vision}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
PAD = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
MARK = re.compile(r"<\|\w+\|>")
LONGEST_SIDE = 200  # in multiples of the shorter side


class RewardNetwork(nn.Module):
    """A Qwen2-VL with a float32 reward head on the hidden states of the tokens `marks`, not its language head."""

    def __init__(self, backbone: nn.Module, head: nn.Module, marks: list[int]):
        super().__init__()
        self.backbone, self.head, self.marks = backbone, head.float(), marks

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **vision: Tensor) -> Tensor:
        """Return `(batch, marks, outputs)` float32 for texts padded on the right."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, len(input_ids), -1)
        hidden = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False, **vision
        ).last_hidden_state
        places = torch.stack([(input_ids == mark).int().argmax(1) for mark in self.marks], dim=1)
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        return self.head(hidden[rows, places].float())


@dataclasses.dataclass(eq=False)
class QwenReward(ModelReward):
    """Base class of the rewards by such a network, whose checkpoint holds all weights; `base` has the rest."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    base_revision: str = "main"

    marks = ()  # tokens at which the head reads

    def find_sources(self, *files: str) -> list[Source]:
        """Return the sources of a checkpoint of these files."""
        return [
            Source("model", self.model, tuple((file,) for file in files), self.revision),
            Source("base", self.base, CONFIG + TOKENIZER, self.base_revision),
        ]

    def load_checkpoint(
        self,
        filename: str,
        make_head: Callable[[dict[str, Tensor], int], nn.Module],
        prepare: Callable[[nn.Module, dict[str, Tensor]], None] = lambda backbone, weights: None,
    ) -> RewardNetwork:
        """Load the weights of a checkpoint; LoRAs stay in float32, as in PEFT and the authors' code."""
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoTokenizer, Qwen2VLModel

        body, head = rename_weights(read_weights(weights_path(self.model, filename, self.revision)))
        config = AutoConfig.from_pretrained(self.base, revision=self.base_revision)
        config.text_config.vocab_size = len(body["language_model.embed_tokens.weight"])
        with init_empty_weights(include_buffers=False):
            backbone = Qwen2VLModel(config)
        prepare(backbone, body)
        dtypes = {name: torch.float32 if ".lora_" in name else self.torch_dtype for name in body}
        assign(backbone, {name: value.to(dtypes[name]) for name, value in body.items()}, self.model)
        linear = make_head(head, config.text_config.hidden_size)
        assign(linear, {name: value.float() for name, value in head.items()}, self.model)
        self._tokenizer = AutoTokenizer.from_pretrained(self.base, revision=self.base_revision)
        self._tokenizer.padding_side = "right"
        self._tokenizer.add_tokens(self.marks, special_tokens=True)
        return RewardNetwork(backbone, linear, self._tokenizer.convert_tokens_to_ids(self.marks))

    def run(
        self, network: RewardNetwork, template: str, prompts: list[str], frames: list[Tensor], kind: str
    ) -> Tensor:
        """Return the head's outputs, `(batch, marks, outputs)`, for images or videos; see `build_batch`."""
        texts = [read_template(template).format(text_prompt=prompt) for prompt in prompts]
        inputs = build_batch(texts, frames, kind, network.backbone.config, self._tokenizer)
        return network(**{name: value.to(self.torch_device) for name, value in inputs.items()})


@functools.cache
def read_template(name: str) -> str:
    """Read a text in `templates/`, as its authors wrote it."""
    return (Path(__file__).parent / "templates" / f"{name}.txt").read_text(encoding="utf-8")


def rename_weights(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a checkpoint into the weights of today's `Qwen2VLModel` and those of the reward head."""
    body, head = {}, {}
    # names of every version of transformers since 4.45, with or without PEFT's prefix
    for key, value in weights.items():
        name = key.removeprefix("base_model.model.")
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = value
        elif not name.startswith("lm_head.") and not name.endswith(".inv_freq"):
            inner = name.removeprefix("model.")
            is_placed = inner.startswith(("visual.", "language_model."))
            body[inner if is_placed else f"language_model.{inner}"] = value
    return body, head


def assign(network: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Give `network` exactly these weights."""
    try:
        network.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{source} does not hold the weights of this architecture: {error}") from error


def fit_size(width: int, height: int, min_pixels: int, max_pixels: int, factor: int = 28) -> tuple[int, int]:
    """Round width and height to multiples of `factor`, within limits of the pixel count, at about the same ratio."""
    if max(width, height) > LONGEST_SIDE * min(width, height):
        raise ValueError(
            f"An image of {width} x {height} is too elongated; one side may be at most {LONGEST_SIDE} times as long "
            "as the other."
        )
    # as qwen-vl-utils' `smart_resize`, operation by operation: another order gives 272 x 272 another size for HPSv3
    sides = [max(factor, round(side / factor) * factor) for side in (width, height)]
    if math.prod(sides) > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)]
    elif math.prod(sides) < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        sides = [math.ceil(side * grow / factor) * factor for side in (width, height)]
    return sides[0], sides[1]


def cut_patches(frames: Tensor, config: Qwen2VLConfig) -> tuple[Tensor, Tensor]:
    """Cut `(frames, 3, height, width)` into patches, `(count, values)`, on a grid `(frames, rows, columns)`."""
    size, time = config.vision_config.patch_size, config.vision_config.temporal_patch_size
    merge = config.vision_config.spatial_merge_size
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    pixels = (frames.float() / 255 - mean) / std
    missing = -len(pixels) % time
    pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    grid = torch.tensor([len(pixels) // time, pixels.shape[2] // size, pixels.shape[3] // size])
    moments, rows, columns = grid.tolist()
    cut = pixels.reshape(moments, time, 3, rows // merge, merge, size, columns // merge, merge, size)
    # patches that become one token are neighbours
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(grid.prod(), -1), grid


def build_batch(
    texts: list[str], frames: list[Tensor], kind: str, config: Qwen2VLConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Build the arguments of `RewardNetwork` for texts with frames, `(frames, 3, height, width)` each."""
    cut = [cut_patches(clip, config) for clip in frames]
    merged = config.vision_config.spatial_merge_size**2
    chats = [
        CHAT.format(vision=PAD[kind] * (int(grid.prod()) // merged), text=text)
        for text, (_, grid) in zip(texts, cut, strict=True)
    ]
    tokens = tokenizer(chats, padding=True, return_tensors="pt")
    grids = torch.stack([grid for _, grid in cut])
    pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
    return {
        "input_ids": tokens["input_ids"],
        "attention_mask": tokens["attention_mask"],
        pixels: torch.cat([clip for clip, _ in cut]),
        f"{kind}_grid_thw": grids,
    }


def check_prompts(prompts: list[str]) -> list[str]:
    """Return the prompts if none contains a special token, which the model would not read as text."""
    for prompt in prompts:
        if token := MARK.search(prompt):
            raise ValueError(f"The prompt {prompt!r} contains {token[0]!r}, a special token of the model; remove it.")
    return prompts


def as_frame(image: Image.Image) -> Tensor:
    """Convert an image to `(3, height, width)` uint8."""
    rgb = image.convert("RGB")
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)
