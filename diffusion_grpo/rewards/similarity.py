"""The rewards `ssim`, `psnr` and `lpips`: how closely an image resembles a target in a dataset column.

The target is a PIL image or a path. If its size differs, it is resized (Lanczos) to the sample's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from huggingface_hub import constants
from PIL import Image
from torch import Tensor, nn

from ..media.samples import convert_image
from .contract import check_package, needs, opens_images
from .models.base import ModelReward, Source, as_pixels, compare, open_image, read_weights, weights_path

# LPIPS. The layers are rebuilt here under torchvision's names, so that the official weights load without torchvision.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
SMALLEST = 32  # pixels; on smaller images, a network's last feature maps are empty
FEATURES = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}
OFFICIAL = {
    "features": "https://download.pytorch.org/models/{}",
    "linear": "https://raw.githubusercontent.com/richzhang/PerceptualSimilarity/master/lpips/weights/v0.1/{}",
}
VGG = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _check_metrics(**options) -> None:
    check_package("skimage", 'pip install "diffusion-grpo[metrics]"')


@opens_images
@needs(_check_metrics)
def ssim(images: list[Image.Image], target_column: str = "target", **columns) -> list[float | None]:
    """Return the mean structural similarity of the lumas in 0 to 255 per image: in [-1, 1], 1 if equal."""
    # https://doi.org/10.1109/TIP.2003.819861, without the authors' optional downsampling
    return compare(lambda *pairs: list(map(_ssim, *pairs)), images, columns[target_column])


@opens_images
@needs(_check_metrics)
def psnr(images: list[Image.Image], target_column: str = "target", **columns) -> list[float | None]:
    """Return the peak signal-to-noise ratio per image, in dB: 10 log10(255^2 / MSE) over RGB, at most 100."""
    return compare(lambda *pairs: list(map(_psnr, *pairs)), images, columns[target_column])


def _like(other: Image.Image | str | Path, size: tuple[int, int]) -> Image.Image:
    other = open_image(other)
    if other.size == tuple(size):
        return other
    return other.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _read_pair(image: Image.Image, target: Image.Image | str | Path, mode: str) -> list[np.ndarray]:
    return [np.asarray(convert_image(each, mode)) for each in (image, _like(target, image.size))]


def _psnr(image: Image.Image, target: Image.Image | str | Path) -> float:
    from skimage.metrics import peak_signal_noise_ratio

    with np.errstate(divide="ignore"):  # infinite if equal
        return min(100.0, float(peak_signal_noise_ratio(*_read_pair(image, target, "RGB"), data_range=255)))


def _ssim(image: Image.Image, target: Image.Image | str | Path) -> float:
    from skimage.metrics import structural_similarity

    # as published: Gaussian windows of 11 x 11 pixels, those inside the image
    published = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    return float(structural_similarity(*_read_pair(image, target, "L"), **published))


@opens_images
@dataclasses.dataclass(eq=False)
class LPIPS(ModelReward):
    """1 - LPIPS v0.1 (https://arxiv.org/abs/1801.03924) between an image and its target: 1 means equal."""

    has_gradient = True
    model: str = "official"
    net: Literal["alex", "vgg"] = "alex"
    target_column: str = "target"

    @property
    def _files(self) -> dict[str, str]:
        return {"features": FEATURES[self.net], "linear": f"{self.net}.pth"}

    def sources(self) -> list[Source]:
        files = tuple((filename,) for filename in self._files.values())
        return [] if self.model == "official" else [Source("model", self.model, files, self.revision)]

    def check_needs(self) -> None:
        """Raise FileNotFoundError also if the official files are missing and may not be downloaded."""
        super().check_needs()
        if self.model == "official" and constants.HF_HUB_OFFLINE:
            list(map(self._find, OFFICIAL))

    def load(self) -> nn.Module:
        features, linear = (read_weights(self._find(part)) for part in OFFICIAL)
        network = Features(self.net)
        kept = {name: weight for name, weight in features.items() if name.startswith("features.")}
        network.features.load_state_dict({name.removeprefix("features."): each for name, each in kept.items()})
        for place, layer in enumerate(network.linear):
            layer.load_state_dict({"weight": linear[f"lin{place}.model.1.weight"]})
        return network.to(self.torch_dtype)

    def _find(self, part: str) -> Path:
        """Return the path of a file with weights, downloaded if needed."""
        filename = self._files[part]
        if self.model != "official":
            return weights_path(self.model, filename, self.revision)
        path = Path(torch.hub.get_dir()) / "checkpoints" / f"lpips-{self.net}-{filename}"
        url = OFFICIAL[part].format(filename)
        try:
            if not path.is_file():
                if constants.HF_HUB_OFFLINE:
                    raise OSError("HF_HUB_OFFLINE is set")
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(url, str(path), progress=False)
        except OSError as error:
            raise FileNotFoundError(
                f"LPIPS needs {url}, which is not at {path} and cannot be downloaded ({error}); put it there, or name "
                "a folder with `model`."
            ) from error
        return path

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """Return 1 - distance per image, at most 1; None for an image without a target."""
        self.load_once()
        targets = columns[self.target_column]
        if isinstance(images, Tensor):
            rows, missing = zip(images.split(1), targets, strict=True), images.new_full((1,), torch.nan)
            scores = [missing if row[1] is None else self.in_batches(self._scores, row[0], row[1:]) for row in rows]
            return torch.cat(scores)
        return compare(self._pairs, images, targets)

    def _pairs(self, images: list, others: list) -> list[float]:
        """Score the images in batches of equal size."""
        values: dict[int, float] = {}
        for size in {image.size for image in images}:
            if min(size) < SMALLEST:
                raise ValueError(f"LPIPS needs images of at least {SMALLEST} x {SMALLEST} pixels, got {size}.")
            rows = [row for row, image in enumerate(images) if image.size == size]
            parts = ([images[row] for row in rows], [others[row] for row in rows])
            values |= zip(rows, self.in_batches(self._scores, *parts))
        return [values[row] for row in range(len(images))]

    def _scores(self, network: nn.Module, images: list, others: list) -> Tensor:
        sizes = [image.shape[:0:-1] if isinstance(image, Tensor) else image.size for image in images]
        fitted = [_like(other, size) for size, other in zip(sizes, others, strict=True)]
        weight = network.linear[0].weight
        one, two = (as_pixels(part).to(weight.device, weight.dtype) for part in (images, fitted))
        return 1 - network(2 * one - 1, 2 * two - 1)


class Features(nn.Module):
    """LPIPS' network, which computes the distance between images in [-1, 1]."""

    def __init__(self, net: str):
        super().__init__()
        self.features, self.taps, widths = _alexnet() if net == "alex" else _vgg16()
        self.linear = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in widths)
        self.register_buffer("shift", torch.tensor(SHIFT)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE)[:, None, None], persistent=False)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Return distances `(batch,)`: weighted squared differences, averaged over places and summed over layers."""
        distance = 0
        for layer, seen, expected in zip(self.linear, self._maps(one), self._maps(two), strict=True):
            squares = (seen - expected) ** 2
            distance = distance + nn.functional.conv2d(squares, layer.weight.float()).mean((1, 2, 3))
        return distance

    def _maps(self, pixels: Tensor) -> list[Tensor]:
        """Return the maps after the tapped layers in float32, scaled to length 1 over channels."""
        states, maps = (pixels - self.shift) / self.scale, []
        for place, layer in enumerate(self.features):
            states = layer(states)
            if place in self.taps:
                seen = states.float()  # in float16, the sum of squares would be infinite and 1e-10 would be 0
                maps.append(seen / (seen.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return maps


def _alexnet() -> tuple[nn.Sequential, tuple[int, ...], tuple[int, ...]]:
    """Return torchvision's `alexnet().features`, the indices of the tapped layers and their widths."""
    layers = [nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for inner, outer in ((192, 384), (384, 256), (256, 256)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers), (1, 4, 7, 9, 11), (64, 192, 384, 256, 256)


def _vgg16() -> tuple[nn.Sequential, tuple[int, ...], tuple[int, ...]]:
    """Return torchvision's `vgg16().features` up to the last tapped layer, the tapped indices and their widths."""
    layers: list[nn.Module] = []
    taps, inner = [], 3
    for stage in VGG:
        if layers:
            layers.append(nn.MaxPool2d(2, 2))
        for outer in stage:
            layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()]
            inner = outer
        taps.append(len(layers) - 1)
    return nn.Sequential(*layers), tuple(taps), tuple(stage[-1] for stage in VGG)
