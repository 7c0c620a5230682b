"""What one call of a pipeline's `encode_prompt` asks for, and how results for single prompts are joined.

There is no code for single families. Texts, and embeddings that are passed through, belong to one sample each;
everything else is a setting of the call. The layout of a result for several samples is found by one call with two.
"""

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .drivers import UnsupportedPipeline

SHARED, ROWS = "shared", "rows"  # values of a layout: the same for all samples; a list with one item per sample
CONDITIONS = ("image", "images", "image_embeds", "query_embeds", "lyrics", "text_images")
COPIES = re.compile(r"num_\w+_per_prompt")  # num_images_per_prompt and the like
TEXT = re.compile(r"(negative_)?prompts?(_\d+)?")
Layout = int | str | list | dict  # for a tensor, the axis of the samples; for a list or dict, the layouts of its items


@dataclasses.dataclass(frozen=True)
class PromptCall:
    """A call of `encode_prompt`."""

    arguments: dict[str, Any]
    names: tuple[str, ...]
    count: int
    settings: str

    def key(self, row: int) -> str:
        """Return the key of one sample's part of the call: parts with equal keys have equal results."""
        values = {name: _describe(self._value(name, row)) for name in self.names}
        return hashlib.sha256(json.dumps([self.settings, values], sort_keys=True).encode()).hexdigest()

    @property
    def kind(self) -> str:
        """Key of the kind of call: results of one kind have the same layout."""
        return hashlib.sha256(json.dumps([self.settings, self.names]).encode()).hexdigest()

    def text(self, row: int) -> dict[str, str]:
        """Return the texts of one sample, in readable form."""
        values = {name: self._value(name, row) for name in self.names}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def select(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of a call for some of the samples, with copied lists, which the encoder may change."""
        chosen = {name: _select(self.arguments[name], rows) for name in self.names}
        if self.arguments.get("batch_size") is not None:
            chosen["batch_size"] = len(rows)
        others = {name: list(value) if isinstance(value, list) else value for name, value in self.arguments.items()}
        return others | chosen

    def _value(self, name: str, row: int) -> Any:
        value = self.arguments[name]
        return value if isinstance(value, str) else value[row]


def check_encode_prompt(pipeline: type[DiffusionPipeline]) -> None:
    """Refuse a class of pipelines whose prompts cannot be encoded ahead of its calls."""
    encode = getattr(pipeline, "encode_prompt", None)
    if encode is None:
        raise UnsupportedPipeline(
            f"cache_prompt_embeds: {pipeline.__name__} has no method encode_prompt, so its prompts cannot be encoded "
            "ahead; leave cache_prompt_embeds out."
        )
    others = [name for name in inspect.signature(encode).parameters if name in CONDITIONS]
    if others:
        raise UnsupportedPipeline(
            f"cache_prompt_embeds: encode_prompt of {pipeline.__name__} takes {others[0]!r} in addition to the "
            "prompt, so its result differs from sample to sample; leave cache_prompt_embeds out."
        )


def read_call(encode: Callable, args: tuple, kwargs: dict[str, Any]) -> PromptCall:
    """Read a call of `encode_prompt`."""
    bound = inspect.signature(encode).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {k: v for k, v in bound.arguments.items() if k != "kwargs" or v}
    if any(COPIES.fullmatch(name) and value not in (None, 1) for name, value in arguments.items()):
        raise UnsupportedPipeline("cache_prompt_embeds needs one sample per prompt in a call of the pipeline.")
    counts = [len(v) for k, v in arguments.items() if "prompt" in k and (_is_texts(v) or _is_rows(v))]
    count = counts[0] if counts else 1
    names = tuple(name for name, value in arguments.items() if _is_per_sample(name, value, count))
    settings = {name: value for name, value in arguments.items() if name not in names}
    settings = {name: value for name, value in settings.items() if not isinstance(value, torch.device)}
    if settings.get("batch_size") == count:
        settings["batch_size"] = 1
    for name, value in settings.items():
        if not _is_setting(value) or count > 1 and _is_texts(value) and len(value) == count:
            raise UnsupportedPipeline(
                "cache_prompt_embeds keeps what encode_prompt returns for texts, but this pipeline also passes it "
                f"{name!r}, a {type(value).__name__}; leave cache_prompt_embeds out."
            )
    described = {name: _describe(value) for name, value in settings.items() if value is not None and name != "device"}
    return PromptCall(arguments, names, count, json.dumps(described, sort_keys=True))


def _is_per_sample(name: str, value: Any, count: int) -> bool:
    """Return whether an argument has one value per sample; a single text counts for every sample."""
    if "prompt" not in name and "attention_mask" not in name:
        return False
    if isinstance(value, str):
        return TEXT.fullmatch(name) is not None
    return (_is_texts(value) or _is_rows(value)) and len(value) == count


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) for item in value)


def _is_rows(value: Any) -> bool:
    """Return whether a value holds embeddings of prompts: a tensor, or a list of one tensor per prompt."""
    if isinstance(value, list):
        return len(value) > 0 and all(map(torch.is_tensor, value))
    return torch.is_tensor(value) and value.ndim > 1


def _is_setting(value: Any) -> bool:
    """Return whether a value consists of numbers and strings only."""
    if isinstance(value, dict):
        return all(map(_is_setting, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (str, int, float, bool, torch.dtype))


def _describe(value: Any) -> Any:
    """Convert a value for JSON, so that equal values stay equal; a list of one text becomes that text."""
    if torch.is_tensor(value):
        return hash_tensor(value)
    if isinstance(value, dict):
        return {str(name): _describe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_describe(item) for item in value]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items
    return str(value) if isinstance(value, torch.dtype) else value


def _select(value: Any, rows: Sequence[int]) -> Any:
    if isinstance(value, str):
        return value if len(rows) == 1 else [value] * len(rows)
    return value[list(rows)] if torch.is_tensor(value) else [value[row] for row in rows]


class CannotJoin(UnsupportedPipeline):
    """Embeddings of single prompts that cannot be put together for one call."""


def find_layout(one: Any, two: Any) -> Layout:
    """Find the layout of results for several samples."""
    if torch.is_tensor(one) and torch.is_tensor(two):
        if one.shape == two.shape:
            return SHARED
        axes = [axis for axis, sizes in enumerate(zip(one.shape, two.shape)) if sizes == (1, 2)]
        others = sum(a != b for a, b in zip(one.shape, two.shape)) if one.ndim == two.ndim else -1
        if len(axes) == 1 and others == 1:
            return axes[0]
    elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {name: find_layout(one[name], two[name]) for name in one}
    elif isinstance(one, (list, tuple)) and type(one) is type(two):
        if isinstance(one, list) and (len(one), len(two)) == (1, 2):
            return ROWS
        if len(one) == len(two):
            return [find_layout(*pair) for pair in zip(one, two, strict=True)]
    elif type(one) is type(two) and one == two:
        return SHARED
    raise CannotJoin("encode_prompt does not return one result per prompt that could be put together with others'")


def join_results(results: list[Any], layout: Layout) -> Any:
    """Join results for single samples into the result of one call."""
    first = results[0]
    if layout == SHARED:
        if not all(_is_equal(first, other) for other in results):
            raise CannotJoin("what encode_prompt returns for all samples together depends on the prompt")
        return first
    if layout == ROWS:
        return [item for result in results for item in result]
    if isinstance(layout, dict):
        return {name: join_results([result[name] for result in results], part) for name, part in layout.items()}
    if isinstance(layout, list):
        return type(first)(join_results(list(items), part) for items, part in zip(zip(*results), layout, strict=True))
    if any(result.shape != first.shape for result in results):
        sizes = ", ".join(sorted({str(tuple(result.shape)) for result in results}))
        raise CannotJoin(f"the prompts' embeddings have different sizes: {sizes}")
    return torch.cat(results, dim=layout)


def _is_equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.shape == other.shape and torch.equal(one, other)
    return one == other


def list_shapes(result: Any) -> Any:
    """Return the shapes of all tensors in a result, in a form for JSON."""
    if torch.is_tensor(result):
        return list(result.shape)
    if isinstance(result, dict):
        return {name: list_shapes(item) for name, item in result.items()}
    return [list_shapes(item) for item in result] if isinstance(result, (list, tuple)) else None


def move_result(result: Any, device: torch.device | str) -> Any:
    """Return a result with its tensors on a device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), result)


def hash_tensor(tensor: Tensor) -> str:
    """Return a hash of the dtype, shape and content of a tensor, which does not depend on its device."""
    if is_traceable_wrapper_subclass(tensor):  # consists of other tensors, like the weights of torchao and quanto
        names, _ = tensor.__tensor_flatten__()
        content = "".join(hash_tensor(getattr(tensor, name)) for name in names).encode()
    else:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()
