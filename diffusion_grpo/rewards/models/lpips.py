"""The reward `lpips`: 1 - the perceptual distance to an image in a column.

The features are those of torchvision's AlexNet or VGG-16. The layers are rebuilt here under torchvision's names, so
that the official weights load without torchvision.
"""

from __future__ import annotations

import dataclasses
import urllib.error
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor, nn

from ..contract import opens_images
from ..needs import Source
from .base import ModelReward, read_weights, weights_path
from .pixels import as_pixels, compare, open_image

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
SMALLEST = 32  # pixels; on smaller images, a network's last feature maps are empty
FEATURES = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth"}
OFFICIAL = {
    "features": "https://download.pytorch.org/models/{}",
    "linear": "https://raw.githubusercontent.com/richzhang/PerceptualSimilarity/master/lpips/weights/v0.1/{}",
}
VGG = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@opens_images
@dataclasses.dataclass(eq=False)
class LPIPS(ModelReward):
    """1 - LPIPS (v0.1) between an image and its target in a column: higher is more alike, 1 means equal.

    Zhang et al. 2018, https://arxiv.org/abs/1801.03924, https://github.com/richzhang/PerceptualSimilarity. A target
    of another size is resized (Lanczos) to the image's.
    """

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
        from huggingface_hub import constants

        for part, filename in self._files.items() if self.model == "official" and constants.HF_HUB_OFFLINE else ():
            if not self._official(filename).is_file():
                _refuse_offline(OFFICIAL[part].format(filename), self._official(filename))

    def load(self) -> nn.Module:
        features, linear = (self._weights(part, filename) for part, filename in self._files.items())
        network = Features(self.net)
        kept = {name: weight for name, weight in features.items() if name.startswith("features.")}
        network.features.load_state_dict({name.removeprefix("features."): each for name, each in kept.items()})
        for place, layer in enumerate(network.linear):
            layer.load_state_dict({"weight": linear[f"lin{place}.model.1.weight"]})
        return network.to(self.torch_dtype)

    def _weights(self, part: str, filename: str) -> dict[str, Tensor]:
        if self.model != "official":
            return read_weights(weights_path(self.model, filename, self.revision))
        path = self._official(filename)
        if not path.is_file():
            _download(OFFICIAL[part].format(filename), path)
        return read_weights(path)

    def _official(self, filename: str) -> Path:
        """Return the path of the official file once it is downloaded."""
        return Path(torch.hub.get_dir()) / "checkpoints" / f"lpips-{self.net}-{filename}"

    def __call__(self, images: list[Image.Image], **columns) -> list[float | None]:
        """Return 1 - distance per image, at most 1; None for an image without a target."""
        self.load_once()
        return compare(self._pairs, images, columns[self.target_column])

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
        size = images[0].size
        fitted = [
            other if other.size == size else other.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            for other in map(open_image, others)
        ]
        weight = network.linear[0].weight
        one, two = (as_pixels(part).to(weight.device, weight.dtype) for part in (images, fitted))
        return 1 - network(2 * one - 1, 2 * two - 1)


def _refuse_offline(url: str, path: Path) -> None:
    raise FileNotFoundError(
        f"LPIPS needs {url}, which is not at {path}, and HF_HUB_OFFLINE is set; put it there, or name a folder with "
        "`model`."
    )


def _download(url: str, path: Path) -> None:
    """Download a file; refuse at once if `HF_HUB_OFFLINE` is set, although the file is not on the Hub."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        _refuse_offline(url, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(url, str(path), progress=False)
    except urllib.error.URLError as error:
        raise FileNotFoundError(
            f"LPIPS needs {url}, which is not at {path} and could not be downloaded ({error}); put it there, or name "
            "a folder with `model`."
        ) from error


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
