"""The base class of all rewards with weights.

The network is loaded at the first call, frozen and in eval mode. It runs without gradients, keeps its own dtype and
device whatever the policy trains in, leaves the run's random state alone, is whole on each process (ZeRO-3 would shard
it), and can be kept in CPU memory between calls.
"""

# The annotations are read as they stand (contract.py checks options by them), in subclasses of other modules too.
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
    """A reward by a network. Subclasses are dataclasses too (`eq=False`): they add settings and a default model, name
    in `sources` what they read in `load`, and score in `__call__` through `in_batches`.

    Two with equal settings are equal, so that a reward may be both trained on and evaluated.

    Args:
        model: Hub id or folder.
        device: where the network runs; by default this process's accelerator, if there is one.
        dtype: of the network.
        batch_size: samples at once.
        revision: branch, tag or commit of a Hub id.
        offload: the network lies in the host's memory between calls.

    Raises:
        ValueError: `batch_size` is below 1, or `model` is written as a folder that there is not.
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
            if isinstance(value, str) and value.startswith("~"):  # which transformers would take for a Hub id
                setattr(self, name, str(Path(value).expanduser()))
        self._network: nn.Module | None = None
        self._lock = threading.Lock()  # calls may come from several threads; the network moves between devices

    @abc.abstractmethod
    def load(self) -> nn.Module:
        """The network, on the CPU and in `torch_dtype`; whatever else is needed (a processor) is set on `self`.

        Called once, with the random state saved around it.
        """

    @abc.abstractmethod
    def sources(self) -> list[Source]:
        """What `load` reads and from where, so that what is missing is said before anything is loaded."""

    def check_needs(self) -> None:
        """Raise FileNotFoundError where a folder, or the cache when offline, lacks what `load` reads."""
        for source in self.sources():
            source.check()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The setting `dtype` as torch has it."""
        return getattr(torch, self.dtype)

    @property
    def torch_device(self) -> torch.device:
        """The setting `device`, or the accelerator of this process, or the CPU."""
        return torch.device(self.device) if self.device is not None else default_device()

    def settings(self) -> dict[str, Any]:
        """Every setting under its name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.settings() == other.settings()

    def __hash__(self) -> int:
        return hash((type(self), self.model))

    @contextlib.contextmanager
    def network(self) -> Iterator[nn.Module]:
        """The network for one call: on its device, without gradients or autocast; offloaded afterwards if so set."""
        device = self.torch_device
        with self._lock, torch.no_grad(), torch.autocast(device.type, enabled=False):
            if self._network is None:
                with torch.random.fork_rng(devices=[]), without_sharding():
                    self._network = self.load().eval().requires_grad_(False)
            try:
                yield self._network.to(device)
            finally:
                if self.offload:
                    self._network.to("cpu")

    def rest(self) -> None:
        """Put the network into the host's memory, as `offload` does after each call."""
        with self._lock:
            if self._network is not None:
                self._network.to("cpu")

    def in_batches(self, function: Callable[..., Any], *lists: list) -> list:
        """`function(network, *parts)` for every `batch_size` entries of the lists, its answers as one list.

        Args:
            function: returns one value an entry, as a list or as a tensor `(batch, ...)` (of which the rows, as floats
                or nested lists, are taken).
            lists: of equal lengths, at least one.

        Raises:
            ValueError: the lists differ in length.
        """
        rows = list(zip(*lists, strict=True))
        answers: list = []
        if not rows:
            return answers
        with self.network() as network:
            for start in range(0, len(rows), self.batch_size):
                parts = [list(part) for part in zip(*rows[start : start + self.batch_size], strict=True)]
                answer = function(network, *parts)
                answers += answer.float().tolist() if isinstance(answer, Tensor) else answer
        return answers


def default_device() -> torch.device:
    """The accelerator of this process, or the CPU. With its index, for a thread of its own starts at the first."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    index = torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
    return torch.device(torch.accelerator.current_accelerator().type, index % torch.accelerator.device_count())


@contextlib.contextmanager
def without_sharding() -> Iterator[None]:
    """Inside, `from_pretrained` does not shard what it loads, though a run under DeepSpeed ZeRO-3 is going on."""
    from transformers.integrations import deepspeed as integration

    config = integration._hf_deepspeed_config_weak_ref and integration._hf_deepspeed_config_weak_ref()
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            integration.set_hf_deepspeed_config(config)


def weights_path(model: str, filename: str, revision: str = "main") -> Path:
    """The file `filename` in the folder `model`, or of the Hub id; downloaded where it is not in the cache.

    Raises:
        FileNotFoundError: the folder has no such file.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / filename).is_file():
            raise FileNotFoundError(f"The folder {model} holds no {filename}, where the reward's weights stand.")
        return folder / filename
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, filename, revision=revision))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a pickled one read without running any code that it might hold.

    Raises:
        ValueError: it holds something else than a mapping from names to tensors.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict):
        raise ValueError(f"{path} holds a {type(weights).__name__}, not a mapping from names to weights.")
    return weights.get("state_dict", weights)


def build_model(cls: Any, config: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A model of transformers with these weights, all of them and no others.

    Raises:
        ValueError: weights that the model lacks, or that lack to it.
    """
    model, found = cls.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    wrong = {kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"The checkpoint does not fit {cls.__name__}: {wrong}.")
    return model
