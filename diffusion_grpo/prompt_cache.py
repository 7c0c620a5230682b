"""Each distinct prompt is encoded once, and never again in replay.

In: calls of the pipeline's `encode_prompt`. Out: what it returned the first time. Repeated prompts in a batch are
encoded once and spread over the batch. Without family names: arguments are compared by value, tensors by content.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image


class PromptCache:
    """Remembers results of a pipeline's `encode_prompt` between calls of the pipeline."""

    def __init__(self):
        self.results: dict[Any, Any] = {}

    def clear(self) -> None:
        """Forget everything: the prompts of the next rollout are others."""
        self.results.clear()

    @contextlib.contextmanager
    def serving(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """`pipe.encode_prompt` answers from the cache inside the context; pipelines without one are left alone."""
        encode = getattr(pipe, "encode_prompt", None)
        if encode is None:
            yield
            return
        pipe.__dict__["encode_prompt"] = lambda *args, **kwargs: self._encode(encode, args, kwargs)
        try:
            yield
        finally:
            del pipe.__dict__["encode_prompt"]

    def _encode(self, encode: Callable, args: tuple, kwargs: dict) -> Any:
        arguments = inspect.signature(encode).bind(*args, **kwargs).arguments
        distinct, index = _distinct_prompts(arguments)
        key = _by_value(arguments | distinct), index is None
        if key not in self.results:
            with torch.no_grad():
                self.results[key] = encode(**(arguments | distinct))
        if index is not None and not _is_by_sample(self.results[key], max(index) + 1):
            key, index = (_by_value(arguments), True), None
            if key not in self.results:
                with torch.no_grad():
                    self.results[key] = encode(**arguments)
        return _spread(self.results[key], index)


def _distinct_prompts(arguments: dict[str, Any]) -> tuple[dict[str, list[str]], list[int] | None]:
    """The prompt lists without repetitions, and for each sample which of the distinct ones is its own.

    No index where the call is not of the plain kind, one prompt a sample and nothing else that counts samples.
    """
    prompts = arguments.get("prompt")
    if not _is_list_of(str, prompts):
        return {}, None
    if any(arguments.get(name, 1) != 1 for name in ("num_images_per_prompt", "num_videos_per_prompt")):
        return {}, None
    lists = {name: value for name, value in arguments.items() if _is_list_of(str, value) and "prompt" in name}
    others = [value for name, value in arguments.items() if name not in lists]
    if any(len(value) != len(prompts) for value in lists.values()):
        return {}, None
    # a setting, such as Sana's instruction or FLUX.2's layers, unless it may count samples or hold any
    if not all(_is_setting(value) for value in others) or any(_has_length(value, len(prompts)) for value in others):
        return {}, None
    rows = list(zip(*lists.values(), strict=True))
    distinct = list(dict.fromkeys(rows))
    if len(distinct) == len(rows):
        return {}, None
    columns = dict(zip(lists, map(list, zip(*distinct, strict=True)), strict=True))
    return columns, [distinct.index(row) for row in rows]


def _is_by_sample(result: Any, count: int) -> bool:
    """Whether every embedding has the distinct prompts as its first dimension (HiDream's layers come first)."""
    if torch.is_tensor(result):
        return result.ndim < 3 or len(result) == count
    if isinstance(result, (tuple, list)):
        return all(_is_by_sample(item, count) for item in result) or len(result) == count
    return True


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _has_length(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _is_setting(value: Any) -> bool:
    """Numbers and strings, also in lists and dicts: the same for every sample."""
    if isinstance(value, dict):
        return all(_is_setting(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_setting(item) for item in value)
    return _is_plain(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, torch.device, torch.dtype))


def _spread(result: Any, index: list[int] | None) -> Any:
    """Rows of the distinct prompts, laid out over the batch."""
    if index is None:
        return result
    count = max(index) + 1
    if torch.is_tensor(result):
        return result[torch.tensor(index, device=result.device)] if result.ndim and len(result) == count else result
    if isinstance(result, (tuple, list)):
        if isinstance(result, list) and len(result) == count:
            return [result[i] for i in index]
        return type(result)(_spread(item, index) for item in result)
    return result


def _by_value(value: Any) -> Any:
    """A hashable stand-in that is equal where the values are."""
    if _is_plain(value):
        return value
    if torch.is_tensor(value):
        data = value.detach().contiguous().view(torch.uint8) if value.ndim else value.detach()
        return ("tensor", value.shape, value.dtype, hashlib.sha256(data.cpu().numpy().tobytes()).hexdigest())
    if isinstance(value, Image.Image):
        return ("image", value.size, value.mode, hashlib.sha256(value.tobytes()).hexdigest())
    if isinstance(value, dict):
        return tuple((name, _by_value(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_by_value(item) for item in value)
    return object()  # equal to nothing: what cannot be compared by value is encoded anew
