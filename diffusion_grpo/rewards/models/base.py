"""The base class of all rewards with weights.

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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..needs import Source


@dataclasses.dataclass(eq=False)
class ModelReward(abc.ABC):
    """A reward computed by a network.

    Subclasses are dataclasses too (`eq=False`). They add settings and a default model, list in `sources` the files
    that `load` reads, and score in `__call__` through `in_batches`. Rewards with equal settings are equal, so a reward
    may be both trained on and evaluated.
    """

    model: str
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = 16
    revision: str = "main"
    offload: bool = False

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} for {self.model}; give 1 or more.")
        if self.model.startswith((".", "/", "~")) and not Path(self.model).expanduser().exists():
            raise ValueError(f"There is no folder {self.model} with a reward's weights; a Hub id is `owner/name`.")
        for name, value in self.settings().items():
            if isinstance(value, str) and value.startswith("~"):  # transformers would take it for a Hub id
                setattr(self, name, str(Path(value).expanduser()))
        self._network: nn.Module | None = None
        self._lock = threading.Lock()  # calls may come from several threads; the network moves between devices

    @abc.abstractmethod
    def load(self) -> nn.Module:
        """Return the network, on the CPU and in `torch_dtype`; set anything else, such as a processor, on `self`.

        It is called once, and the random state is restored afterwards.
        """

    @abc.abstractmethod
    def sources(self) -> list[Source]:
        """Return the files that `load` reads, so that missing ones are reported before anything is loaded."""

    def check_needs(self) -> None:
        """Raise FileNotFoundError if a folder, or the cache when offline, lacks a file that `load` reads."""
        for source in self.sources():
            source.check()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The setting `dtype` as a torch dtype."""
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        """The setting `device`; if it is None, this process's accelerator or else the CPU."""
        return torch.device(self.device) if self.device is not None else default_device()

    def settings(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash((type(self), self.model))

    def load_once(self) -> None:
        """Load the network to CPU memory, unless it is loaded.

        The first call of a reward has to do this even if there is nothing to score. Later calls may run in another
        thread during the rollout, and loading changes torch's default dtype for the whole process.
        """
        with self._lock, torch.no_grad(), torch.autocast(self.torch_device.type, enabled=False):
            if self._network is None:
                with torch.random.fork_rng(devices=[]), without_sharding():
                    self._network = self.load().eval().requires_grad_(False)

    @contextlib.contextmanager
    def network(self) -> Iterator[nn.Module]:
        """Yield the network on its device, without gradients or autocast; then offload it if `offload` is set."""
        device = self.torch_device
        self.load_once()
        with self._lock, torch.no_grad(), torch.autocast(device.type, enabled=False):
            try:
                yield self._network.to(device)
            finally:
                if self.offload:
                    self._network.to("cpu")

    def rest(self) -> None:
        """Move the network to CPU memory, as `offload` does after each call."""
        with self._lock:
            if self._network is not None:
                self._network.to("cpu")

    def in_batches(self, function: Callable[..., Any], *lists: list) -> list:
        """Call `function(network, *parts)` on batches of the lists and return its answers as one list.

        Empty lists load the network too; see `load_once`.

        Args:
            function: returns one value per entry, as a list or as a tensor `(batch, ...)`, whose rows become floats
                or nested lists.
        """
        rows = list(zip(*lists, strict=True))
        answers: list = []
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
    """Return the path of `filename` in a folder or a Hub id, or `model` itself if it is a file; download it if
    needed.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        return folder
    if folder.is_dir():
        if not (folder / filename).is_file():
            raise FileNotFoundError(
                f"The folder {model} contains no {filename}, the file with the reward's weights; give a folder that "
                "contains it, or a Hub id."
            )
        return folder / filename
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, filename, revision=revision))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file, or of a pickled one without running any code in it."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict):
        raise ValueError(f"{path} holds a {type(weights).__name__}, not a mapping from names to weights.")
    return weights.get("state_dict", weights)


def build_model(cls: Any, config: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build a transformers model with exactly these weights."""
    model, found = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    wrong = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"The checkpoint does not fit {cls.__name__}: {wrong}.")
    return model
