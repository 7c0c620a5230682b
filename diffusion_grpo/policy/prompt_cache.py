"""A cache of prompt embeddings: each distinct prompt is encoded once, and never again in replay.

If a call of the pipeline's `encode_prompt` has one prompt per sample, its rows are kept by prompt, so that other
batches with these prompts can use them. The results of other calls are kept whole. There is no code for single
families: arguments are compared by value, tensors by content.
"""

import contextlib
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from .network_gate import replace_attribute

Prompts = tuple[str, ...]  # texts of one sample: `prompt`, and others that the pipeline takes


class PromptCache:
    """Remembers results of a pipeline's `encode_prompt` between calls of the pipeline."""

    keeps_prompts = False

    def __init__(self):
        say_cuts_once()
        self.calls: dict[Any, Any] = {}  # results of whole calls, by all arguments
        # by the arguments that are not prompts, then by the prompts of an encoder call
        self.encoded: dict[Any, dict[tuple[Prompts, ...], Any]] = {}
        # by the arguments that are not prompts; False for HiDream, whose first axis is layers
        self.is_by_sample: dict[Any, bool] = {}

    def clear(self) -> None:
        """Forget all results: the next rollout has other prompts."""
        self.calls.clear()
        self.encoded.clear()

    @contextlib.contextmanager
    def serve(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """Let `pipe.encode_prompt` answer from the cache inside the context; leave pipelines without one alone."""
        encode = getattr(pipe, "encode_prompt", None)
        if encode is None:
            yield
            return
        with replace_attribute(pipe, "encode_prompt", lambda *args, **kwargs: self._encode(encode, args, kwargs)):
            yield

    def _encode(self, encode: Callable, args: tuple, kwargs: dict) -> Any:
        arguments = inspect.signature(encode).bind(*args, **kwargs).arguments
        names = _find_prompts(arguments)
        if names is not None:
            found = self._encode_prompts(encode, arguments, names)
            if found is not None:
                return found
        key = _make_key(arguments)
        if key not in self.calls:
            self.calls[key] = _call(encode, arguments)
        return self.calls[key]

    def _encode_prompts(self, encode: Callable, arguments: dict[str, Any], names: list[str]) -> Any:
        """Encode each distinct prompt alone and return the embeddings; None if they are not one row per sample.

        Together with other prompts, the last bits would differ between batches, processes and resumed runs. Only if
        the encoder pads prompts to the longest one of a call are the prompts of a call encoded together.
        """
        wanted = list(zip(*(arguments[name] for name in names), strict=True))
        key = _make_key({name: value for name, value in arguments.items() if name not in names})
        parts = self.encoded.setdefault(key, {})

        def encode_once(rows: tuple[Prompts, ...]) -> Any:
            if rows not in parts:
                columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
                parts[rows] = _call(encode, arguments | columns)
            return parts[rows]

        if key not in self.is_by_sample and len(wanted) > 1:
            # tested once with a repeated prompt; with different ones, shapes could be equal by chance
            first, count = wanted[0], len(wanted)
            repeated = {name: [text] * count for name, text in zip(names, first, strict=True)}
            joined = _join([_take_rows(encode_once((first,)), 1, [0])] * count)
            self.is_by_sample[key] = _shapes(joined) == _shapes(_call(encode, arguments | repeated))
        if not self.is_by_sample.get(key, True):
            return None
        try:
            return _join([_take_rows(encode_once((row,)), 1, [0]) for row in wanted])
        except _DoNotFit:
            distinct = tuple(sorted(set(wanted)))
            return _take_rows(encode_once(distinct), len(distinct), [distinct.index(row) for row in wanted])


def _call(encode: Callable, arguments: dict[str, Any]) -> Any:
    """Call the encoder with copies of lists, since Z-Image writes its chat template into the given list."""
    with torch.no_grad():
        return encode(**{name: list(value) if isinstance(value, list) else value for name, value in arguments.items()})


def _shapes(result: Any) -> Any:
    if torch.is_tensor(result):
        return result.shape
    return [_shapes(item) for item in result] if isinstance(result, (tuple, list)) else type(result)


def _find_prompts(arguments: dict[str, Any]) -> list[str] | None:
    """Return the arguments that hold one prompt per sample; None if the call has other arguments per sample."""
    prompts = arguments.get("prompt")
    if not _is_list_of(str, prompts) or not prompts:
        return None
    if any(arguments.get(name, 1) != 1 for name in ("num_images_per_prompt", "num_videos_per_prompt")):
        return None
    names = [name for name, value in arguments.items() if _is_list_of(str, value) and "prompt" in name]
    others = [value for name, value in arguments.items() if name not in names]
    if any(len(arguments[name]) != len(prompts) for name in names):
        return None
    # settings, such as Sana's instruction or FLUX.2's layers, but nothing that may depend on the samples
    if not all(_is_setting(value) for value in others) or any(_has_length(value, len(prompts)) for value in others):
        return None
    return names


class _CutsOnce(logging.Filter):
    """Drops diffusers' message that prompts are cut for CLIP if all of them were named before."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        _, is_cut, texts = record.getMessage().partition("was truncated because CLIP can only handle")
        new = {text.strip("[]'\"") for text in texts.partition(": ")[2].split("', '")} - self.said
        self.said |= new if is_cut else set()
        return not is_cut or bool(new)


def say_cuts_once() -> None:
    """Let diffusers say once per prompt that it is cut for CLIP, not in each rollout."""
    for handler in logging.getLogger("diffusers").handlers:
        if not any(isinstance(each, _CutsOnce) for each in handler.filters):
            handler.addFilter(_CutsOnce())


class _DoNotFit(Exception):
    """Embeddings have different shapes, because each call pads to its longest prompt."""


def _join(results: list[Any]) -> Any:
    """Join results for single samples into one for the batch."""
    first = results[0]
    if torch.is_tensor(first):
        if any(result.shape != first.shape for result in results):
            raise _DoNotFit
        by_sample = first.ndim > 0 and len(first) == 1
        if not by_sample and not all(torch.equal(result, first) for result in results):
            raise _DoNotFit
        return torch.cat(results) if by_sample else first
    if isinstance(first, list) and len(first) == 1:
        return [item for result in results for item in result]
    if isinstance(first, (tuple, list)):
        return type(first)(_join(list(items)) for items in zip(*results, strict=True))
    if any(result != first for result in results):
        raise _DoNotFit
    return first


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _has_length(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _is_setting(value: Any) -> bool:
    """Return whether a value consists of numbers and strings, also in lists and dicts: the same for every sample."""
    if isinstance(value, dict):
        return all(_is_setting(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_setting(item) for item in value)
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, torch.device, torch.dtype))


def _take_rows(result: Any, count: int, index: list[int]) -> Any:
    """Return the rows `index` of a result for `count` prompts."""
    if torch.is_tensor(result):
        return result[torch.tensor(index, device=result.device)] if result.ndim and len(result) == count else result
    if isinstance(result, (tuple, list)):
        if isinstance(result, list) and len(result) == count:
            return [result[i] for i in index]
        return type(result)(_take_rows(item, count, index) for item in result)
    return result


def _make_key(value: Any) -> Any:
    """Return a hashable key that is equal for equal values."""
    if _is_plain(value):
        return value
    if torch.is_tensor(value):
        data = value.detach().contiguous().view(torch.uint8) if value.ndim else value.detach()
        return ("tensor", value.shape, value.dtype, hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest())
    if isinstance(value, Image.Image):
        return ("image", value.size, value.mode, hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, dict):
        return tuple((name, _make_key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_make_key(item) for item in value)
    return object()  # equal to nothing, so that values that cannot be compared are encoded again
