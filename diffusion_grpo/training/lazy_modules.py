"""Text encoders that are loaded when something calls them, and freed once all prompts are encoded.

The pipeline holds a `LazyModule` in place of each. It has the encoder's class, configuration, dtype and device, which
pipelines ask for, but no weights. Calling it, or one of its methods, loads the encoder.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn

logger = logging.getLogger(__name__)

CHILDREN = ("model", "text_model", "encoder", "language_model", "generation_config")  # of encoders, used by pipelines


def list_text_encoders(names: Iterable[str]) -> list[str]:
    """Return the names of those components that are text encoders, which `cache_prompt_embeds` frees."""
    return [name for name in names if name.startswith("text_encoder")]


def is_part_of_encoding(name: str) -> bool:
    """Return whether a component of this name takes part in encoding prompts."""
    return any(word in name for word in ("text_encoder", "tokenizer", "processor"))


def is_plain(part: nn.Module) -> bool:
    """Return whether all weights of a module are ordinary tensors, none of them quantised."""
    return all(type(weights) is nn.Parameter and type(weights.data) is Tensor for weights in part.parameters())


class LazyModule(nn.Module):
    """Placeholder for a text encoder that is read later, or for `part`, which waits in CPU memory."""

    def __init__(self, kind: type[nn.Module], config: Any, dtype: torch.dtype, part: nn.Module | None = None):
        super().__init__()
        self.__dict__.update(_kind=kind, made_as=dtype, _read=None, waiting=part)  # hidden from `to` and others
        self.__dict__.update(config=config, __module__=kind.__module__)
        self.training = False
        self.register_module("_part", None)
        self.register_buffer("_place", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def __class__(self) -> type[nn.Module]:
        return self._kind

    @property
    def device(self) -> torch.device:
        """The device on which the encoder is, or would be."""
        return self._place.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the encoder's weights have, or would have."""
        return self._place.dtype

    @property
    def save_pretrained(self) -> Callable[..., Any]:
        """The encoder's own method, for which the encoder is loaded into CPU memory only."""

        @functools.wraps(self._kind.save_pretrained)  # diffusers looks at the signature
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            return (self._part or self.read()).save_pretrained(*args, **kwargs)

        return save_pretrained

    @property
    def is_loaded(self) -> bool:
        return self._part is not None

    def connect(self, read: Callable[[], nn.Module]) -> None:
        """Set the function that reads the encoder."""
        self.__dict__["_read"] = read

    def read(self) -> nn.Module:
        """Read the encoder into CPU memory, in the dtype to which the pipeline was cast meanwhile."""
        part = (self.waiting or self._read()).requires_grad_(False).eval()
        if self.dtype not in (part.dtype, self.made_as) and is_plain(part):
            part.to(self.dtype)
        self._place = self._place.to(part.dtype)
        self.__dict__["made_as"] = None  # was only what the encoder was expected to be
        return part

    def load(self) -> nn.Module:
        """Return the encoder, loading it if it is not in memory."""
        if self._part is None:
            logger.info("%s is loaded, because something calls it.", self._kind.__name__)
            part = self.read()
            self._part = part.to(self.device) if is_plain(part) else part
        return self._part

    def free(self) -> None:
        self._part = None
        if self.waiting is not None:
            self.waiting.to("cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not (hasattr(self._kind, name) or name in CHILDREN):
            return super().__getattr__(name)
        return getattr(self.load(), name)


def make_lazy_modules(
    source: str | Path, dtypes: torch.dtype | dict[str, torch.dtype] | None, **kwargs: Any
) -> dict[str, LazyModule]:
    """Make lazy modules for a named model's text encoders of transformers; `connect` sets what reads them."""
    made = {}
    index = DiffusionPipeline.load_config(source, **kwargs)
    for name in list_text_encoders(index):
        library, kind = index[name]
        if library != "transformers" or not hasattr(transformers, kind):
            continue
        kind = getattr(transformers, kind)
        config = kind.config_class.from_pretrained(source, subfolder=name, **kwargs)
        dtype = dtypes.get(name, dtypes.get("default")) if isinstance(dtypes, dict) else dtypes
        made[name] = LazyModule(kind, config, dtype or torch.float32)
    return made


def find_lazy_modules(pipe: DiffusionPipeline) -> dict[str, LazyModule]:
    return {name: part for name, part in pipe.components.items() if is_lazy(part)}


def is_lazy(part: Any) -> bool:
    return type(part) is LazyModule


def free_encoders(pipe: DiffusionPipeline) -> list[str]:
    """Free a pipeline's text encoders, or let them wait in CPU memory; return the names of those not in memory."""
    for name in list_text_encoders(pipe.components):
        part = getattr(pipe, name)
        if isinstance(part, nn.Module) and not is_lazy(part) and is_plain(part):
            setattr(pipe, name, LazyModule(type(part), part.config, part.dtype, part=part).to(part.device))
    lazy_modules = find_lazy_modules(pipe)
    for part in lazy_modules.values():
        part.free()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return list(lazy_modules)


def restore_encoders(pipe: DiffusionPipeline) -> None:
    """Put the text encoders that an earlier run freed back into the pipeline."""
    for name, part in find_lazy_modules(pipe).items():
        setattr(pipe, name, part.load())
