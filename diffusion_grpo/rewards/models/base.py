"""The base class of all rewards with weights: the files it reads, loading, batches, and PIL images as its pixels.

The network is loaded at the first call, frozen and in eval mode. It runs without gradients, has its own dtype and
device, and leaves the run's random state alone. Every process holds the whole network, even under ZeRO-3, which would
otherwise shard it. Between calls it can be kept in CPU memory.
"""

# No `from __future__ import annotations`: contract.py checks options by the annotations of this class and subclasses.
import abc
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
from huggingface_hub import constants, file_exists, hf_hub_download, try_to_load_from_cache
from PIL import Image, ImageOps
from torch import Tensor, nn

from ...media.samples import convert_image

CONFIG = (("config.json",),)
WEIGHTS = (("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),)
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
VOCABULARIES += ("sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
TOKENIZER = (VOCABULARIES, ("tokenizer_config.json", "config.json"))
IMAGE_PROCESSOR = (("preprocessor_config.json", "processor_config.json"),)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Source(NamedTuple):
    """A Hub id, folder or file from which a reward reads files; of alternative names, one is enough."""

    setting: str
    place: str
    files: tuple[tuple[str, ...], ...]
    revision: str = "main"

    def path(self, name: str) -> Path | None:
        """Return the path of the file with that name on this machine, or None."""
        place = Path(self.place).expanduser()
        if place.is_file():
            return place if place.suffix == Path(name).suffix else None
        if place.is_dir():
            return place / name if (place / name).is_file() else None
        cached = try_to_load_from_cache(self.place, name, revision=self.revision)
        return Path(cached) if isinstance(cached, str) else None

    def check(self) -> None:
        """Raise FileNotFoundError if a file is neither on this machine nor on the Hub, or the Hub does not answer."""
        # the reward itself is loaded only after the first rollout, which a large run reaches late
        place = f"{self.setting}={self.place}"
        for names in self.files:
            if any(self.path(name) is not None for name in names):
                continue
            wanted = " or ".join(names)
            if Path(self.place).expanduser().exists():
                raise FileNotFoundError(f"{place} has no {wanted}; name a folder that has it, or a Hub id.")
            try:
                is_there = any(file_exists(self.place, name, revision=self.revision) for name in names)
            except Exception as error:  # not a Hub id, a gated repository, HF_HUB_OFFLINE, or errors of the network
                raise FileNotFoundError(
                    f"{place} is no folder, the cache {constants.HF_HUB_CACHE} has no {wanted} of its revision "
                    f"{self.revision}, and the Hub gives none ({' '.join(str(error).split())[:200]}); run `hf "
                    f"download {self.place} --revision {self.revision}` where there is a network, or name a folder."
                ) from error
            if not is_there:
                raise FileNotFoundError(f"{place} (revision {self.revision}) has no {wanted} on the Hub; correct it.")


@dataclasses.dataclass(eq=False)
class ModelReward(abc.ABC):
    """A reward computed by a network; subclasses are dataclasses too (`eq=False`) and score through `in_batches`."""

    model: str
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = 16
    revision: str = "main"
    offload: bool = False

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} for {self.model}; give 1 or more.")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name}={getattr(self, name)!r} for {self.model}; give one of {get_args(hint)}.")
        if self.model.startswith((".", "/", "~")) and not Path(self.model).expanduser().exists():
            raise ValueError(f"There is no folder {self.model} with a reward's weights; a Hub id is `owner/name`.")
        for name, value in self.settings().items():
            if isinstance(value, str) and value.startswith("~"):  # transformers would take it for a Hub id
                setattr(self, name, str(Path(value).expanduser()))
        self._network: nn.Module | None = None
        self._lock = threading.Lock()  # calls may come from several threads; the network moves between devices

    @abc.abstractmethod
    def load(self) -> nn.Module:
        """Return the network, on the CPU and in `torch_dtype`; set anything else, such as a processor, on `self`."""

    @abc.abstractmethod
    def sources(self) -> list[Source]:
        """Return the files that `load` reads, so that missing ones are reported before anything is loaded."""

    def check_needs(self) -> None:
        """Raise FileNotFoundError if a folder, or the cache when offline, lacks a file that `load` reads."""
        for source in self.sources():
            source.check()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        """The setting `device`; if it is None, this process's accelerator or else the CPU."""
        return torch.device(self.device) if self.device is not None else default_device()

    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    # so that a reward may be both trained on and evaluated
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash((type(self), self.model))

    def load_once(self) -> None:
        """Load the network to CPU memory, unless it is loaded."""
        with self._lock, torch.no_grad(), torch.autocast(self.torch_device.type, enabled=False):
            if self._network is None:
                with torch.random.fork_rng(devices=[]), without_sharding():
                    self._network = self.load().eval().requires_grad_(False)

    @contextlib.contextmanager
    def network(self, has_gradient: bool = False) -> Iterator[nn.Module]:
        """Yield the network on its device, without autocast; then offload it, but not before a backward pass."""
        device = self.torch_device
        self.load_once()
        with self._lock, torch.set_grad_enabled(has_gradient), torch.autocast(device.type, enabled=False):
            try:
                yield self._network.to(device)
            finally:
                if self.offload and not has_gradient:
                    self._network.to("cpu")

    def rest(self) -> None:
        """Move the network to CPU memory, as `offload` does after each call."""
        with self._lock:
            if self._network is not None:
                self._network.to("cpu")

    def in_batches(self, function: Callable[..., Any], *lists: list) -> list:
        """Return the values of `function(network, *parts)`, a list or a tensor `(batch, ...)`, for all entries."""
        if isinstance(lists[0], Tensor):  # so is the result, with gradient
            with self.network(torch.is_grad_enabled()) as network:
                return function(network, *lists)
        rows = list(zip(*lists, strict=True))
        answers: list = []
        # a later call may run beside the rollout, and loading changes torch's default dtype for the whole process
        if not rows:
            self.load_once()
            return answers
        with self.network() as network:
            for start in range(0, len(rows), self.batch_size):
                parts = [list(part) for part in zip(*rows[start : start + self.batch_size], strict=True)]
                answer = function(network, *parts)
                answers += answer.float().tolist() if isinstance(answer, Tensor) else answer
        return answers


def default_device() -> torch.device:
    """Return this process's accelerator with its index, because new threads start at the first device, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    index = torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, index % torch.accelerator.device_count())


@contextlib.contextmanager
def without_sharding() -> Iterator[None]:
    """Keep `from_pretrained` from sharding weights inside this context, during a run with DeepSpeed ZeRO-3."""
    from transformers.integrations import deepspeed as integration

    config = integration._hf_deepspeed_config_weak_ref and integration._hf_deepspeed_config_weak_ref()
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def weights_path(model: str, filename: str, revision: str = "main") -> Path:
    """Return the path of `filename` in a folder or on the Hub, downloaded if needed, or `model` if it is a file."""
    place = Path(model).expanduser()
    if place.is_file():
        return place
    return place / filename if place.is_dir() else Path(hf_hub_download(model, filename, revision=revision))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file, or of a pickled one without running any code in it."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    return weights.get("state_dict", weights)


def build_model(cls: Any, config: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build a transformers model with exactly these weights."""
    model, report = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    wrong = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"The checkpoint does not fit {cls.__name__}: {wrong}.")
    return model


# Pixels. Scorers were trained with torchvision's transforms, whose rounding is reproduced here with Pillow alone:
# another resize, or a crop that is off by one pixel, gives another score.


def open_image(image: Image.Image | str | Path) -> Image.Image:
    """Return an image with 8 bits per channel; read one at a path, rotated according to its EXIF data."""
    if isinstance(image, (str, Path)):
        with Image.open(image) as file:
            image = ImageOps.exif_transpose(file)
    return convert_image(image, None) if isinstance(image, Image.Image) else image


def resize_short_side(image: Image.Image, size: int) -> Image.Image:
    """Resize (bicubic, antialiased) so that the shorter side is `size`; round the longer one down."""
    width, height = image.size
    if min(width, height) == size:
        return image
    resized = (size, int(size * height / width)) if width <= height else (int(size * width / height), size)
    return image.resize(resized, Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Cut out the square in the middle; round half a pixel to even."""
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def as_pixels(images: list[Image.Image] | list[Tensor] | Tensor) -> Tensor:
    """Convert images of one size to `(batch, 3, height, width)` float32 in [0, 1]; tensors stay as they are."""
    if isinstance(images[0], Tensor):
        return torch.stack([*images])
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return `(pixels - mean) / std`, with one mean and one standard deviation per channel."""
    return (pixels - pixels.new_tensor(mean)[:, None, None]) / pixels.new_tensor(std)[:, None, None]


def crop_squares(
    images: list[Image.Image] | Tensor, resize: int, crop: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Resize the shorter side to `resize`, cut out the middle and normalise, to `(batch, 3, crop, crop)`."""
    if isinstance(images, Tensor):
        return normalize(crop_tensor(images, resize, crop), mean, std)
    cut = [center_crop(resize_short_side(image.convert("RGB"), resize), crop) for image in images]
    return normalize(as_pixels(cut), mean, std)


def crop_tensor(pixels: Tensor, resize: int, crop: int, corner: Callable = round) -> Tensor:
    """As `resize_short_side` and `center_crop`, with gradient; Pillow rounds and clips after both passes."""
    sides = pixels.shape[-2:]
    if min(sides) != resize:
        size = [int(resize * side / min(sides)) for side in sides]
        pixels = nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (corner((side - crop) / 2) for side in pixels.shape[-2:])
    return pixels[..., top : top + crop, left : left + crop]


def compare(
    similarity: Callable[[list, list], list[float]], images: list[Image.Image], targets: list
) -> list[float | None]:
    """Return the similarity of each image to its target; None for an image without one."""
    pairs = [(image, target) for image, target in zip(images, targets, strict=True) if target is not None]
    # `similarity` opens targets a batch at a time, because all of them may be more than memory holds
    scores = iter(similarity([image for image, _ in pairs], [other for _, other in pairs]))
    return [None if target is None else next(scores) for target in targets]
