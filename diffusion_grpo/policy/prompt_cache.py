"""A cache of prompt embeddings: each distinct prompt is encoded once per rollout, or once for all (`KeptResults`).

Each prompt is encoded alone, so that the last bits of its embeddings do not depend on the prompts beside it: they are
the same in a rollout, its replay, another process and a resumed run. No pipeline family has code of its own here. How
results of single prompts are joined is learned from one call with two. `KeptResults` are in memory or in a folder.
"""

import contextlib
import hashlib
import inspect
import json
import operator
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..quiet import say_cuts_once
from .drivers import UnsupportedPipeline
from .networks import replace_attribute

CONDITIONS = ("image", "images", "image_embeds", "query_embeds", "lyrics", "text_images")
COPIES = re.compile(r"num_\w+_per_prompt")  # num_images_per_prompt and the like
TEXT = re.compile(r"(negative_)?prompts?(_\d+)?")
SHARED, ROWS = "shared", "rows"  # values of a layout: the same for all samples; a list with one item per sample
Layout = int | str | list | dict  # for a tensor, the axis of the samples; for a list or dict, the layouts of its items


class PromptCache:
    """Remembers what an encoder of prompts returns for each prompt; `kept` outlasts `clear`."""

    def __init__(self, kept: "KeptResults | None" = None):
        say_cuts_once()
        self.kept = kept
        self.encoded = 0  # number of results that were added to `kept`
        self._results: dict[str, Any] = {}  # of the current rollout
        self._layouts: dict[str, Layout | None] = {}  # by the kind of call; None if results cannot be joined

    def clear(self) -> None:
        """Forget the results that are not kept: the next rollout has other prompts."""
        self._results.clear()

    @contextlib.contextmanager
    def serve(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """Let `pipe.encode_prompt` answer from the cache inside the context; leave pipelines without one alone."""
        encode = getattr(pipe, "encode_prompt", None)
        if encode is None:
            yield
            return
        with replace_attribute(pipe, "encode_prompt", lambda *args, **kwargs: self.call(encode, *args, **kwargs)):
            yield

    def call(self, encode: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what an encoder returns for these arguments, encoding only the prompts that are not known."""
        try:
            call = EncoderCall(encode, args, kwargs)
        except TypeError:  # arguments that cannot be compared
            return encode(*args, **kwargs)
        parts = [self._encode(call, row) for row in range(call.count)] if call.names else []
        layout = self._find_layout(call) if len(parts) > 1 else None
        if len(parts) == 1:
            result = parts[0]
        elif layout is None:
            result = self._remember(call.key, call.run)
        else:
            try:
                result = _join(parts, layout)
            except CannotJoin:  # a call pads to its longest prompt, so its prompts are encoded together
                rows = {key: row for row, key in enumerate(call.keys)}
                order = sorted(rows)
                together = self._remember(" ".join(order), lambda: call.run([rows[key] for key in order]))
                result = _take(together, layout, [order.index(key) for key in call.keys])
        return pytree.tree_map(lambda leaf: leaf, result)  # copies lists, since a pipeline may change them

    def keep(self, encode: Callable, *args: Any, **kwargs: Any) -> list[str]:
        """Encode and keep what is missing for a call, and return the keys in `kept` of its results."""
        call = EncoderCall(encode, args, kwargs)
        if self.kept is None or not call.names:
            return []
        for row, key in enumerate(call.keys):
            if key not in self.kept:
                self._encode(call, row)
        self._find_layout(call)
        return [*call.keys, f"layout-{call.kind}"]

    def _remember(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def _encode(self, call: "EncoderCall", row: int) -> Any:
        """Return the result for one sample: a known one, one from `kept`, or a new one."""
        key = call.keys[row]
        if key in self._results:
            return self._results[key]
        result = None if self.kept is None else self.kept.get(key)
        if result is None:
            result = call.run([row])
            if self.kept is not None:
                self.kept.put(key, result, call.texts[row])
                self.encoded += 1
        else:
            result = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(call.device), result)
        self._results[key] = result
        return result

    def _find_layout(self, call: "EncoderCall") -> Layout | None:
        """Find the layout of results for several prompts, once per kind of call, by encoding one prompt twice."""
        if call.kind in self._layouts:
            return self._layouts[call.kind]
        key = f"layout-{call.kind}"
        kept = None if self.kept is None else self.kept.get(key)
        if kept:
            layout = kept["layout"]
        else:
            try:
                layout = find_layout(self._encode(call, 0), call.run([0, 0]))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # of an encoder that takes one prompt per call, or of results that cannot be joined
                layout = None
            if self.kept is not None:
                self.kept.put(key, {"layout": layout}, {})
        self._layouts[call.kind] = layout
        return layout


class EncoderCall:
    """A call of an encoder of prompts, which is read as one call per sample.

    Texts belong to one sample each, and numbers and strings are settings of the call. If there is anything else, or
    if nothing says how many samples there are, `names` is empty, and the call can only be made as a whole.

    Attributes:
        names: arguments that hold a text per sample, or a single one for all; `texts` are those of each sample.
        keys: of the samples' parts of the call; `key` is that of the whole call.
        kind: results of calls of one kind have the same layout.

    Raises:
        TypeError: an argument cannot be compared with others.
    """

    def __init__(self, encode: Callable, args: tuple, kwargs: dict[str, Any]):
        self._encode, self._bound = encode, inspect.signature(encode).bind(*args, **kwargs)
        self.arguments = arguments = self._bound.arguments
        given = {name for name, value in arguments.items() if "prompt" in name and _is_texts(value)}
        counts = {len(arguments[name]) for name in given} or {1}
        self.count = min(counts)
        given |= {name for name, value in arguments.items() if isinstance(value, str) and TEXT.fullmatch(name)}
        self.names = tuple(name for name in arguments if name in given)
        settings = {k: v for k, v in arguments.items() if k not in given and v is not None and k != "device"}
        copies = [value for name, value in settings.items() if COPIES.fullmatch(name) and value != 1]
        lists = {name: value for name, value in settings.items() if isinstance(value, list)}
        others = [k for k, v in lists.items() if "prompt" in k or _is_texts(v) and len(v) == self.count > 1]
        if copies or others or len(counts) > 1 or not all(map(_is_setting, settings.values())):
            self.names, settings = (), {k: v for k, v in arguments.items() if k != "device"}
        elif settings.get("batch_size") == self.count:
            settings["batch_size"] = 1
        about = json.dumps([getattr(encode, "__name__", ""), settings], default=_describe, sort_keys=True)
        texts = [(name, arguments[name]) for name in self.names]
        self.texts = [{name: v if isinstance(v, str) else v[row] for name, v in texts} for row in range(self.count)]
        self.keys = [_hash(json.dumps([about, each])) for each in self.texts]
        self.key, self.kind = _hash(about), _hash(json.dumps([about, self.names]))

    @property
    def device(self) -> torch.device | str:
        """The device on which the encoder puts its results."""
        pipe = getattr(self._encode, "__self__", None)
        return self.arguments.get("device") or getattr(pipe, "_execution_device", "cpu")

    def run(self, rows: Sequence[int] | None = None) -> Any:
        """Call the encoder for some of the samples, by default for all."""
        # with copies of lists, since Z-Image writes its chat template into the given one
        chosen = {name: list(value) if isinstance(value, list) else value for name, value in self.arguments.items()}
        if rows is not None:
            for name in self.names:
                if len(rows) > 1 or not isinstance(chosen[name], str):
                    chosen[name] = [self.texts[row][name] for row in rows]
            if chosen.get("batch_size") is not None:
                chosen["batch_size"] = len(rows)
        bound = inspect.BoundArguments(self._bound.signature, chosen)
        with torch.no_grad():
            return self._encode(*bound.args, **bound.kwargs)


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


class KeptResults:
    """Results of encoders in CPU memory or, with a folder, in files that later runs can read."""

    def __init__(self, folder: Path | None = None):
        self._forms: dict[str, Any] | _Files = {}
        self._tensors: dict[str, Any] | _Files = {}
        if folder is not None:
            read = lambda path: json.loads(path.read_text(encoding="utf-8"))  # noqa: E731
            write = lambda value, path: path.write_text(json.dumps(value, indent=1, ensure_ascii=False), "utf-8")  # noqa: E731
            self._forms = _Files(folder / "prompts", "json", read, write)
            self._tensors = _Files(folder / "tensors", "safetensors", load_file, save_file)

    def __contains__(self, key: str) -> bool:
        return key in self._forms

    def get(self, key: str) -> Any:
        """Return a result with its tensors on the CPU; None if there is none that can be read."""
        try:
            form = self._forms[key]
            leaves = [self._tensors[x["name"]]["tensor"] if isinstance(x, dict) else x for x in form["leaves"]]
            return pytree.tree_unflatten(leaves, pytree.treespec_loads(form["structure"]))
        except (KeyError, TypeError):
            return None

    def put(self, key: str, result: Any, texts: dict[str, str]) -> None:
        """Keep a result; `texts` tell a reader of the files what it is."""
        leaves, structure = pytree.tree_flatten(result)
        for place, leaf in enumerate(leaves):
            if torch.is_tensor(leaf):
                leaves[place] = {"name": hash_tensor(leaf), "shape": list(leaf.shape)}
                if leaves[place]["name"] not in self._tensors:
                    self._tensors[leaves[place]["name"]] = {"tensor": leaf.detach().cpu().contiguous()}
        self._forms[key] = {"texts": texts, "leaves": leaves, "structure": pytree.treespec_dumps(structure)}

    def shapes(self, key: str) -> str:
        """Return the shapes of a result's tensors, as text to compare; their content is not read."""
        try:
            return str([leaf["shape"] for leaf in self._forms[key]["leaves"] if isinstance(leaf, dict)])
        except (KeyError, TypeError):
            return ""


class _Files:
    """Files of a folder, which several processes and runs may share: each is written aside and moved into place."""

    def __init__(self, folder: Path, ending: str, read: Callable[[Path], Any], write: Callable[[Any, Path], Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ending, self._read, self._write = folder, ending, read, write

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{self._ending}"

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def __getitem__(self, name: str) -> Any:
        path = self._path(name)
        try:
            return self._read(path)
        except (FileNotFoundError, ValueError, SafetensorError) as error:
            path.unlink(missing_ok=True)  # a damaged one is written anew
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        path = self._path(name)
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._write(value, aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


class CannotJoin(ValueError):
    """Results for single prompts that cannot be put together for one call."""


def find_layout(one: Any, two: Any) -> Layout:
    """Find the layout of results for several samples from results for one sample and for two equal ones."""
    if torch.is_tensor(one) and torch.is_tensor(two):
        if one.shape == two.shape:
            return SHARED
        axes = [axis for axis, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
        if one.ndim == two.ndim and len(axes) == 1 and (one.shape[axes[0]], two.shape[axes[0]]) == (1, 2):
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
    raise CannotJoin


def _join(results: list[Any], layout: Layout) -> Any:
    """Join results for single samples into the result of one call."""
    first = results[0]
    if layout == SHARED:
        equal = torch.equal if torch.is_tensor(first) else operator.eq
        if not all(equal(first, other) for other in results):
            raise CannotJoin
        return first
    if layout == ROWS:
        return [item for result in results for item in result]
    if isinstance(layout, dict):
        return {name: _join([result[name] for result in results], part) for name, part in layout.items()}
    if isinstance(layout, list):
        return type(first)(_join(list(items), part) for items, part in zip(zip(*results), layout, strict=True))
    if any(result.shape != first.shape for result in results):
        raise CannotJoin
    return torch.cat(results, dim=layout)


def _take(result: Any, layout: Layout, rows: list[int]) -> Any:
    """Return the result of a call with these of its samples, in this order."""
    if layout == SHARED:
        return result
    if layout == ROWS:
        return [result[row] for row in rows]
    if isinstance(layout, dict):
        return {name: _take(result[name], part, rows) for name, part in layout.items()}
    if isinstance(layout, list):
        return type(result)(_take(item, part, rows) for item, part in zip(result, layout, strict=True))
    return result.index_select(layout, torch.tensor(rows, device=result.device))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) for item in value)


def _is_setting(value: Any) -> bool:
    """Return whether a value consists of numbers and strings only."""
    if isinstance(value, (dict, list, tuple)):
        return all(map(_is_setting, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (str, int, float, bool, torch.dtype, torch.device))


def _describe(value: Any) -> str:
    """Describe what JSON lacks, so that equal values have equal descriptions."""
    if torch.is_tensor(value):
        return hash_tensor(value)
    if isinstance(value, Image.Image):
        return f"{value.size} {value.mode} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    raise TypeError(type(value))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_tensor(tensor: Tensor) -> str:
    """Return a hash of the dtype, shape and content of a tensor, which does not depend on its device."""
    if is_traceable_wrapper_subclass(tensor):  # consists of other tensors, like the weights of torchao and quanto
        names, _ = tensor.__tensor_flatten__()
        content = "".join(hash_tensor(getattr(tensor, name)) for name in names).encode()
    else:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()
