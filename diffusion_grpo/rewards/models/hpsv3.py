"""The reward `hpsv3`: a score of human preference by a vision-language model.

Qwen2-VL 7B reads the image, an instruction and the prompt. A small head at the token <|Reward|> gives the mean of
the score and the logarithm of its standard deviation. https://huggingface.co/papers/2508.03789
"""

import dataclasses
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from .base import CONFIG, TOKENIZER, ModelReward, Source, read_weights, weights_path
from .qwen_vl import (
    RewardNetwork,
    as_frame,
    assign,
    build_batch,
    build_empty_backbone,
    check_prompts,
    fit_size,
    load_tokenizer,
    read_template,
    rename_weights,
)

FILE = "HPSv3.safetensors"
MARKS = ["<|Reward|>"]
PIXELS = 256 * 28 * 28  # every image is resized to about this many
LAYERS = ("0", "3", "5")  # the head's layers with weights; ReLU and dropout lie between them


@dataclasses.dataclass(eq=False)
class HPSv3(ModelReward):
    """HPSv3's score of an image: about 0 to 15, higher is better.

    The mean standard deviation is logged as `hpsv3/sigma`.
    """

    model: str = "MizzenAI/HPSv3"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    batch_size: int = 8
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    base_revision: str = "main"
    output: Literal["mean", "sigma"] = "mean"

    def sources(self) -> list[Source]:
        return [
            Source("model", self.model, ((FILE,),), self.revision),
            Source("base", self.base, CONFIG + TOKENIZER, self.base_revision),
        ]

    def load(self) -> RewardNetwork:
        """Load the network from `HPSv3.safetensors` alone; the weights of `base` are not needed."""
        from transformers import AutoConfig

        path = weights_path(self.model, FILE, self.revision)
        body, head = rename_weights(read_weights(path))
        config = AutoConfig.from_pretrained(self.base, revision=self.base_revision)
        self._tokenizer = load_tokenizer(self.base, MARKS, self.base_revision)
        backbone = build_empty_backbone(config, len(body["language_model.embed_tokens.weight"]))
        assign(backbone, {name: value.to(self.torch_dtype) for name, value in body.items()}, str(path))
        return RewardNetwork(backbone, _head(head, str(path)), self._tokenizer.convert_tokens_to_ids(MARKS))

    def __call__(self, images: list[Image.Image], prompts: list[str], log_metric=None) -> list[float]:
        """Return one score per image."""
        answers = self.in_batches(self._score, images, check_prompts(prompts))
        means, sigmas = [mean for mean, _ in answers], [sigma for _, sigma in answers]
        if log_metric is not None and sigmas:
            log_metric("hpsv3/sigma", sum(sigmas) / len(sigmas))
        return means if self.output == "mean" else sigmas

    def _score(self, network: RewardNetwork, images: list[Image.Image], prompts: list[str]) -> Tensor:
        """Return mean and standard deviation, `(batch, 2)`."""
        frames = [as_frame(_resize(image))[None] for image in images]
        texts = [read_template("hpsv3").format(text_prompt=prompt) for prompt in prompts]
        inputs = build_batch(texts, frames, "image", network.backbone.config, self._tokenizer)
        mean, log_sigma = network(**{name: value.to(self.torch_device) for name, value in inputs.items()})[:, 0].T
        return torch.stack([mean, log_sigma.exp()], dim=1)


def _resize(image: Image.Image) -> Image.Image:
    size = fit_size(*image.size, min_pixels=PIXELS, max_pixels=PIXELS)
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _head(weights: dict[str, Tensor], source: str) -> nn.Module:
    """Build the reward head of three layers with the sizes of its weights."""
    missing = [f"rm_head.{layer}.weight" for layer in LAYERS if f"{layer}.weight" not in weights]
    if missing:
        raise ValueError(f"{source} contains no {missing[0]}, so it is not a checkpoint of HPSv3.")
    first, second, third = (nn.Linear(*reversed(weights[f"{layer}.weight"].shape)) for layer in LAYERS)
    head = nn.Sequential(first, nn.ReLU(), nn.Identity(), second, nn.ReLU(), third)
    assign(head, {name: value.float() for name, value in weights.items()}, source)
    return head
