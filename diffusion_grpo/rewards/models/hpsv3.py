"""The reward `hpsv3`: a score of human preference by a vision-language model.

Qwen2-VL 7B reads the image, an instruction and the prompt. A small head at the token <|Reward|> gives the mean of
the score and the logarithm of its standard deviation. https://huggingface.co/papers/2508.03789
"""

import dataclasses
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from .base import Source
from .qwen_vl import QwenReward, RewardNetwork, as_frame, check_prompts, fit_size

FILE = "HPSv3.safetensors"
PIXELS = 256 * 28 * 28  # every image is resized to about this many
LAYERS = ("0", "3", "5")  # the head's layers with weights; ReLU and dropout lie between them


@dataclasses.dataclass(eq=False)
class HPSv3(QwenReward):
    """HPSv3's score of an image: about 0 to 15, higher is better."""

    model: str = "MizzenAI/HPSv3"
    batch_size: int = 8
    output: Literal["mean", "sigma"] = "mean"

    marks = ["<|Reward|>"]

    def sources(self) -> list[Source]:
        return self.find_sources(FILE)

    def load(self) -> RewardNetwork:
        return self.load_checkpoint(FILE, make_head)

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
        mean, log_sigma = self.run(network, "hpsv3", prompts, frames, "image")[:, 0].T
        return torch.stack([mean, log_sigma.exp()], dim=1)


def _resize(image: Image.Image) -> Image.Image:
    size = fit_size(*image.size, min_pixels=PIXELS, max_pixels=PIXELS)
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def make_head(weights: dict[str, Tensor], width: int) -> nn.Module:
    """Build the reward head of three layers with the sizes of its weights."""
    missing = [f"rm_head.{layer}.weight" for layer in LAYERS if f"{layer}.weight" not in weights]
    if missing:
        raise ValueError(f"the checkpoint contains no {missing[0]}, so it is not one of HPSv3.")
    first, second, third = (nn.Linear(*reversed(weights[f"{layer}.weight"].shape)) for layer in LAYERS)
    return nn.Sequential(first, nn.ReLU(), nn.Identity(), second, nn.ReLU(), third)
