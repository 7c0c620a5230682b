"""Save memory when latents are decoded: one sample at a time, in tiles, or a few samples at a time."""

import functools
import inspect
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
    for setting, method, is_wanted in (
        ("vae_slicing", "enable_slicing", slicing),
        ("vae_tiling", "enable_tiling", tiling),
    ):
        if is_wanted and not [part for part in parts if _enable(part, method)]:
            raise ValueError(
                f"{setting}=True: no part of {type(pipe).__name__} has diffusers' {method}; leave {setting} out."
            )
    decoders = [part for part in parts if callable(getattr(part, "decode", None))]
    for decoder in decoders:
        if isinstance(vars(decoder).get("decode"), DecodeInPieces):
            del decoder.decode  # set by an earlier run
    if batch_size is not None:
        _decode_in_pieces(pipe, decoders, batch_size)
    return pipe


def _enable(part: nn.Module, method: str) -> bool:
    """Call a method of a VAE; return whether the VAE supports it."""
    if not callable(getattr(part, method, None)):
        return False
    try:
        getattr(part, method)()
    except NotImplementedError:  # all autoencoders inherit the method
        return False
    return True


def _decode_in_pieces(pipe: DiffusionPipeline, decoders: list[nn.Module], batch_size: int) -> None:
    name = type(pipe).__name__
    if not decoders:
        raise ValueError(f"decode_batch_size: {name} decodes no latents; leave decode_batch_size out.")
    for decoder in decoders:
        if "num_frames" in inspect.signature(decoder.decode).parameters:
            raise ValueError(
                f"decode_batch_size: {type(decoder).__name__} gets the frames of all samples as one sequence; leave "
                "decode_batch_size out, and set decode_chunk_size in pipeline_kwargs."
            )
        decoder.decode = DecodeInPieces(decoder.decode, batch_size)


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
