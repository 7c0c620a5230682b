"""Save memory when latents are decoded: one sample at a time, in tiles, or a few samples at a time."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.utils import _pytree as pytree


def set_decoding(
    pipe: DiffusionPipeline, slicing: bool = False, tiling: bool = False, batch_size: int | None = None
) -> DiffusionPipeline:
    """Let a pipeline's VAE decode with less memory; options that are off keep what the user has set."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    for method, is_wanted in (("enable_slicing", slicing), ("enable_tiling", tiling)):
        for part in parts if is_wanted else []:
            with contextlib.suppress(AttributeError, NotImplementedError):  # all autoencoders inherit the method
                getattr(part, method)()
    for decoder in find_decoders(pipe):
        if isinstance(vars(decoder).get("decode"), DecodeInPieces):
            del decoder.decode  # set by an earlier run
        if batch_size is not None:
            decoder.decode = DecodeInPieces(decoder.decode, batch_size)
    return pipe


def find_decoders(pipe: DiffusionPipeline) -> list[nn.Module]:
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    return [part for part in parts if callable(getattr(part, "decode", None))]


class DecodeInPieces:
    """A VAE's `decode`, of latents (batch, ...), that handles a few samples at a time and joins the results."""

    def __init__(self, decode: Callable, batch_size: int):
        functools.update_wrapper(self, decode)
        self._decode, self._batch_size = decode, batch_size

    def __call__(self, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Decode latents (batch, ...); other arguments with one entry per sample are split along with them."""
        count = len(latents)
        if count <= self._batch_size:
            return self._decode(latents, *args, **kwargs)
        pieces = []
        for start in range(0, count, self._batch_size):
            chosen = slice(start, start + self._batch_size)
            others = [_take(value, chosen, count) for value in args]
            named = {name: _take(value, chosen, count) for name, value in kwargs.items()}
            pieces.append(self._decode(latents[chosen], *others, **named))
        leaves, structure = zip(*map(pytree.tree_flatten, pieces), strict=True)
        return pytree.tree_unflatten([_join(parts) for parts in zip(*leaves, strict=True)], structure[0])


def _take(value: Any, chosen: slice, count: int) -> Any:
    is_tensor = torch.is_tensor(value) and value.ndim > 0
    is_per_sample = (is_tensor or isinstance(value, (list, tuple))) and len(value) == count
    return value[chosen] if is_per_sample else value


def _join(parts: tuple) -> Any:
    is_per_sample = torch.is_tensor(parts[0]) and parts[0].ndim > 0
    return torch.cat(parts) if is_per_sample else parts[0]
