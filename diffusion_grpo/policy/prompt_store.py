"""A store of prompt embeddings that outlasts a rollout: in memory, or in a folder that later runs can read.

In place of [`~diffusion_grpo.policy.prompt_cache.PromptCache`], it answers every call of a pipeline's `encode_prompt`,
prompt by prompt. Missing results are encoded and kept; once the store has all prompts of a run, no text encoder is
needed.
"""

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from .network_gate import replace_attribute
from .prompt_calls import (
    CannotJoin,
    Layout,
    PromptCall,
    find_layout,
    hash_tensor,
    join_results,
    list_shapes,
    move_result,
    read_call,
)

logger = logging.getLogger(__name__)


class Shelf(Protocol):
    """A place for results of `encode_prompt`, by the key of one sample's part of a call."""

    def __contains__(self, key: str) -> bool:
        """Return whether there is a result for a key."""

    def get(self, key: str) -> Any:
        """Return a result with its tensors on the CPU; None if there is none."""

    def get_blank(self, key: str) -> Any:
        """Return a result of which only the shapes and dtypes are used; None if there is none."""

    def put(self, key: str, result: Any, text: dict[str, str]) -> None:
        """Keep a result; `text` holds the encoded texts in readable form."""


class MemoryShelf(dict):
    """Keeps results in CPU memory. Equal tensors, such as those of the negative prompt, are kept once."""

    def __init__(self):
        super().__init__()
        self._tensors: dict[str, Tensor] = {}

    def get_blank(self, key: str) -> Any:
        """Return a result."""
        return self.get(key)

    def put(self, key: str, result: Any, text: dict[str, str]) -> None:
        """Keep a result."""

        def share(tensor: Tensor) -> Tensor:
            return self._tensors.setdefault(hash_tensor(tensor), tensor)

        self[key] = pytree.tree_map_only(Tensor, share, move_result(result, "cpu"))


class DiskShelf:
    """Keeps results in safetensors files, one per tensor, named by its content; equal tensors share a file.

    For each prompt, a JSON file names the tensors of its result. Files are written under temporary names and moved
    into place, so that several processes and runs may share the folder; a damaged file counts as missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("prompts", "tensors"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def get(self, key: str) -> Any:
        """Return a result; None if there is none that can be read."""
        return self._get(key, self._read)

    def get_blank(self, key: str) -> Any:
        """Return empty tensors of the right shapes, without reading the files of the real ones."""
        return self._get(key, self._read_blank)

    def _get(self, key: str, read: Callable[[dict[str, Any]], Tensor]) -> Any:
        try:
            return _unpack(json.loads(self._path(key).read_text(encoding="utf-8"))["result"], read)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, SafetensorError) as error:
            logger.warning("%s is damaged (%s); its prompt is encoded again.", self._path(key), error)
            return None

    def put(self, key: str, result: Any, text: dict[str, str]) -> None:
        """Write a result."""
        form = {"text": text, "result": _pack(move_result(result, "cpu"), self._write)}
        content = json.dumps(form, indent=1, ensure_ascii=False)
        self._place(self._path(key), lambda path: path.write_text(content, encoding="utf-8"))

    def _path(self, key: str) -> Path:
        return self.folder / "prompts" / f"{key}.json"

    def _read(self, about: dict[str, Any]) -> Tensor:
        with safe_open(self._tensor_path(about["name"]), "pt") as file:
            return file.get_tensor("tensor")

    def _read_blank(self, about: dict[str, Any]) -> Tensor:
        blank = torch.zeros((), dtype=getattr(torch, about["dtype"])).expand(about["shape"])
        numbers = blank.numel() * blank.element_size()
        if self._tensor_path(about["name"]).stat().st_size < numbers:
            self._read(about)  # refuses it
        return blank

    def _write(self, tensor: Tensor) -> dict[str, Any]:
        name = hash_tensor(tensor)
        path = self._tensor_path(name)
        if not _is_whole(path):
            self._place(path, lambda path: save_file({"tensor": tensor.contiguous()}, path))
        return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    def _tensor_path(self, name: str) -> Path:
        return self.folder / "tensors" / f"{name}.safetensors"

    def _place(self, path: Path, write: Callable[[Path], Any]) -> None:
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            write(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


class PromptStore:
    """Answers a pipeline's calls of `encode_prompt` from a shelf."""

    keeps_prompts = True

    def __init__(self, shelf: Shelf, watch: Callable[[], contextlib.AbstractContextManager[list[bool]]]):
        self.shelf, self._watch = shelf, watch
        self.layouts: dict[str, Layout | None] = {}  # by the kind of call; None if results cannot be joined
        self.noted: list[str] = []
        self.learns_layouts, self.is_ahead, self.encoded = False, False, 0
        self._is_passed_through: set[str] = set()  # kinds of calls that get embeddings and encode nothing
        self._rollout: dict[tuple[str, str], Any] = {}  # results that this rollout has used, by key and device

    def clear(self) -> None:
        """Forget the results of the current rollout, but keep the shelf."""
        self._rollout.clear()

    def rest(self) -> None:
        """Answer calls with full results again, and learn no more layouts."""
        self.is_ahead = self.learns_layouts = False
        self.clear()

    @contextlib.contextmanager
    def serve(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """Let `pipe.encode_prompt` answer from the store inside the context."""
        encode = pipe.encode_prompt
        with replace_attribute(
            pipe, "encode_prompt", lambda *args, **kwargs: self._answer(pipe, encode, args, kwargs)
        ):
            yield

    def shapes(self, key: str) -> str:
        """Return the shapes of a result, as text to compare."""
        return json.dumps(list_shapes(self.shelf.get_blank(key)))

    def _answer(self, pipe: DiffusionPipeline, encode: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = read_call(encode, args, kwargs)
        if call.kind in self._is_passed_through:
            return encode(*args, **kwargs)
        device = call.arguments.get("device") or pipe._execution_device
        parts = []
        for row in range(call.count):
            part = self._find(encode, call, row, torch.device(device))
            if part is None:  # nothing was encoded
                return encode(*args, **kwargs)
            parts.append(part)
        if self.learns_layouts:
            self.learn_layout(encode, call)
        if len(parts) == 1:
            return pytree.tree_map(lambda part: part, parts[0])  # copies lists, since a pipeline may change them
        return self._join(pipe, encode, call, parts)

    def _find(self, encode: Callable, call: PromptCall, row: int, device: torch.device) -> Any:
        """Return the result for one sample; None if the call only passes embeddings through."""
        key = call.key(row)
        if (key, str(device)) not in self._rollout:
            found = self.shelf.get_blank(key) if self.is_ahead else self.shelf.get(key)
            if found is None:
                with torch.no_grad(), self._watch() as has_run:
                    found = encode(**call.select([row]))
                if not has_run[0]:
                    self._is_passed_through.add(call.kind)
                    return None
                self.shelf.put(key, found, call.text(row))
                self.encoded += 1
            self._rollout[key, str(device)] = move_result(found, device)
        self.noted.append(key)
        return self._rollout[key, str(device)]

    def _join(self, pipe: DiffusionPipeline, encode: Callable, call: PromptCall, parts: list[Any]) -> Any:
        self.learn_layout(encode, call)
        try:
            if self.layouts[call.kind] is None:
                raise CannotJoin("encode_prompt does not return one result per prompt that could be put together")
            return join_results(parts, self.layouts[call.kind])
        except CannotJoin as error:
            raise CannotJoin(f"{type(pipe).__name__}: {error}; give it one prompt per call.") from None

    def learn_layout(self, encode: Callable, call: PromptCall) -> None:
        """Find the layout of results for several prompts, once per kind of call, by encoding one prompt twice."""
        key = f"layout-{call.kind}"
        if call.kind in self.layouts:
            return
        known = self.shelf.get(key)
        if known is None:
            known = {"layout": self._measure_layout(encode, call)}
            self.shelf.put(key, known, call.text(0))
        self.layouts[call.kind] = known["layout"]

    def _measure_layout(self, encode: Callable, call: PromptCall) -> Layout | None:
        try:
            with torch.no_grad(), self._watch():
                return find_layout(self.shelf.get(call.key(0)), encode(**call.select([0, 0])))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an encoder for single prompts may raise any error
            logger.info("encode_prompt takes one prompt per call: %s", error)
            return None


def _is_whole(path: Path) -> bool:
    """Return whether a safetensors file exists and has the length that its header says."""
    try:
        with safe_open(path, "pt"):
            return True
    except (FileNotFoundError, SafetensorError):
        return False


def _pack(result: Any, write: Callable[[Tensor], dict[str, Any]]) -> Any:
    """Describe a result in JSON, with its tensors written elsewhere."""
    if torch.is_tensor(result):
        return {"tensor": write(result)}
    if isinstance(result, dict):
        return {"dict": {name: _pack(item, write) for name, item in result.items()}}
    if isinstance(result, (list, tuple)):
        return {type(result).__name__: [_pack(item, write) for item in result]}
    return {"plain": result}


def _unpack(form: dict[str, Any], read: Callable[[dict[str, Any]], Tensor]) -> Any:
    ((kind, content),) = form.items()
    if kind == "tensor":
        return read(content)
    if kind == "dict":
        return {name: _unpack(item, read) for name, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_unpack(item, read) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
