"""Text encoders that are released once all prompts are encoded, and loaded again when something calls them.

The pipeline holds a `StandIn` in place of each. It has the encoder's class, configuration, dtype and device, which
pipelines ask for, but no weights. Calling it, or one of its methods, loads the encoder again; `save_pretrained` only
for as long as it writes the files, in CPU memory.
"""

import contextlib
import functools
import gc
import hashlib
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from accelerate.hooks import add_hook_to_module
from diffusers import DiffusionPipeline
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from .. import tiny
from ..config.settings import DiffusionGRPOConfig, describe
from ..policy.prompt_calls import hash_tensor

logger = logging.getLogger(__name__)

CHILDREN = ("model", "text_model", "encoder", "language_model", "generation_config")  # of encoders, used by pipelines
QUANTIZED = ("quantization", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
REMEMBERED = 8  # calls of an encoder: the negative prompt recurs with every prompt
SMALL = 2**20  # bytes up to which a file is identified by its content; larger ones by size and time


def list_text_encoders(names: Any) -> list[str]:
    """Return the names of those components that are text encoders, which `cache_prompt_embeds` releases."""
    return [name for name in names if name.startswith("text_encoder")]


class StandIn(nn.Module):
    """Placeholder for a released text encoder."""

    def __init__(
        self,
        kind: type[nn.Module],
        config: Any,
        dtype: torch.dtype,
        device: torch.device | str,
        wake: Callable[[], nn.Module],
        save: Callable[..., Any],
    ):
        super().__init__()
        self.__dict__.update(_kind=kind, made_as=dtype)
        self.connect(wake, save)
        self.register_buffer("_place", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.__dict__.update(config=config, __module__=kind.__module__)

    @property
    def __class__(self) -> type[nn.Module]:
        return self._kind

    @property
    def device(self) -> torch.device:
        """The device on which the encoder would be."""
        return self._place.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the encoder's weights would have."""
        return self._place.dtype

    @property
    def is_cast(self) -> bool:
        """Whether the dtype was changed since creation, e.g. by the pipeline's `to`."""
        return self.dtype != self.made_as

    @property
    def save_pretrained(self) -> Callable[..., Any]:
        """The encoder's own method, which loads the encoder only while it is saved."""
        save = self._save

        @functools.wraps(self._kind.save_pretrained)  # diffusers looks at the signature
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            return save(*args, **kwargs)

        return save_pretrained

    def connect(self, wake: Callable[[], nn.Module], save: Callable[..., Any]) -> None:
        """Set the functions that load and save the encoder."""
        self.__dict__.update(_wake=wake, _save=save)

    def wake(self) -> nn.Module:
        """Load the encoder again and return it."""
        return self._wake()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Load the encoder again and call it."""
        return self.wake()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not (hasattr(self._kind, name) or name in CHILDREN):
            return super().__getattr__(name)
        return getattr(self.wake(), name)


class TextEncoders:
    """The text encoders of a pipeline, which are loaded and released."""

    def __init__(
        self,
        pipe: DiffusionPipeline,
        reload: Callable[[str], nn.Module] | None,
        folder: Path,
        device: torch.device,
    ):
        self._pipe, self._reload, self._folder, self._device = pipe, reload, folder, device
        self.names = [name for name in list_text_encoders(pipe.components) if isinstance(self._get(name), nn.Module)]
        self.loads = 0
        self._is_working, self._is_encoding, self._is_saving = False, False, False
        self._used_elsewhere: set[str] = set()  # also called outside encode_prompt
        self._hooks: list[Any] = []
        self._forwards: dict[str, Callable | None] = {}  # original forwards while working
        self._spilled: tempfile.TemporaryDirectory | None = None
        for name in self.released if reload is not None else []:
            wake, save = functools.partial(self._load_again, name), functools.partial(self._save, name)
            self._get(name).to(device).connect(wake, save)

    @property
    def released(self) -> list[str]:
        """Names of the encoders that are not in memory."""
        return [name for name in self.names if isinstance(self._get(name), StandIn)]

    def _get(self, name: str) -> nn.Module:
        return getattr(self._pipe, name)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[bool]]:
        """Yield a list whose first item tells, after the context, whether an encoder has run inside."""
        parts = {id(part) for name in self.names for part in self._get(name).modules()}
        loads, has_run = self.loads, [False]

        def note(module: nn.Module, _: Any) -> None:
            has_run[0] |= id(module) in parts

        self._is_encoding = True
        handle = register_module_forward_pre_hook(note)
        try:
            yield has_run
        finally:
            handle.remove()
            self._is_encoding = False
            has_run[0] |= self.loads > loads

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Keep encoders that are called inside this context, cache their last calls, and release them at the end."""
        self._is_working = True
        for name in set(self.names) - set(self.released):
            self._begin_work(name)
        try:
            yield
        finally:
            self._is_working = False
            self.release()

    def release(self) -> None:
        """Release the encoders from memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        before = self.released
        for name in set(self.names) - set(before):
            self._end_work(name)
        if self.released != before:
            gc.collect()  # encoders and the hooks of `offload_frozen` refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _end_work(self, name: str) -> None:
        """Restore an encoder's own forward, and release it unless it is also called outside encode_prompt."""
        part = self._get(name)
        forward = self._forwards.pop(name, None)
        part.__dict__.pop("forward", None)
        if forward is not None:
            part.__dict__["forward"] = forward
        if name not in self._used_elsewhere:
            self._replace(name, part)

    def _begin_work(self, name: str) -> None:
        part = self._get(name)
        if is_plain(part) and not _is_fetched(part):
            part.to(self._device)
        self._forwards[name] = part.__dict__.get("forward")
        part.__dict__["forward"] = remember_calls(part.forward)

        def note(*_: Any) -> None:
            if not self._is_encoding:
                self._used_elsewhere.add(name)

        self._hooks.append(part.register_forward_pre_hook(note))

    def _replace(self, name: str, part: nn.Module) -> None:
        if self._reload is not None:
            wake = functools.partial(self._load_again, name, part.dtype)
        elif is_plain(part):
            wake = self._spill(name, part)
        else:
            logger.warning(
                "cache_prompt_embeds: %s of the given pipeline is quantised and stays in memory; give the model by "
                "its name, so that it can be loaded again.",
                name,
            )
            return
        save = functools.partial(self._save, name)
        self._put(name, StandIn(type(part), part.config, part.dtype, self._device, wake, save))

    def _spill(self, name: str, part: nn.Module) -> Callable[[], nn.Module]:
        """Write the weights of an encoder to a file and free them; return a function that reads them back."""
        if self._spilled is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._spilled = tempfile.TemporaryDirectory(prefix="waiting-", dir=self._folder)
        path = Path(self._spilled.name) / f"{name}.safetensors"
        parameters = dict(part.named_parameters())
        dtypes = {key: weights.dtype for key, weights in parameters.items()}
        if not path.is_file():
            save_file({key: weights.detach().cpu().contiguous() for key, weights in parameters.items()}, path)
        for weights in parameters.values():
            weights.data = weights.data.new_empty(0)

        def read() -> nn.Module:
            for key, weights in load_file(path).items():
                parameters[key].data = weights.to(dtypes[key])  # the file may predate a cast
            return self._wake(name, part)

        return read

    def _load_again(self, name: str, dtype: torch.dtype | None = None) -> nn.Module:
        part = self._reload(name).requires_grad_(False).eval()
        if dtype is not None:
            _cast(part, dtype)
        return self._wake(name, part)

    def _wake(self, name: str, part: nn.Module) -> nn.Module:
        logger.info(
            "%s is loaded again, %s.", name, "to be saved" if self._is_saving else "because something calls it"
        )
        self.loads += 1
        stand_in = self._get(name)
        if stand_in.is_cast:
            _cast(part, stand_in.dtype)
        device = stand_in.device
        self._put(name, part)
        if self._is_working:
            self._begin_work(name)
        elif not self._is_saving and is_plain(part) and not _is_fetched(part):
            part.to(device)
        return part

    def _save(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Load an encoder into CPU memory, call its `save_pretrained`, and release it again."""
        stand_in, self._is_saving = self._get(name), True
        try:
            part = stand_in.wake()
        finally:
            self._is_saving = False
        try:
            return part.save_pretrained(*args, **kwargs)
        finally:
            if self._reload is None:
                self._spill(name, part)
            self._put(name, stand_in)

    def _put(self, name: str, part: nn.Module) -> None:
        """Replace a part of the pipeline; the new one takes over the hook by which `offload_frozen` fetches it."""
        hook = getattr(self._get(name), "_hf_hook", None)
        setattr(self._pipe, name, part)
        if hook is not None:
            add_hook_to_module(part, hook)


def wake_encoders(pipe: DiffusionPipeline) -> None:
    """Load the text encoders that an earlier run released back into the pipeline."""
    for name in list_text_encoders(pipe.components):
        part = getattr(pipe, name)
        if isinstance(part, StandIn):
            part.wake()


def _cast(part: nn.Module, dtype: torch.dtype) -> None:
    """Cast an encoder to another dtype; a quantised one stays as it is."""
    if part.dtype != dtype and is_plain(part):
        part.to(dtype)


def _is_fetched(part: nn.Module) -> bool:
    """Return whether a hook moves a part to the accelerator when it is called."""
    return hasattr(part, "_hf_hook")


def is_plain(part: nn.Module) -> bool:
    """Return whether all weights of a module are ordinary tensors, none of them quantised."""
    return all(type(weights) is nn.Parameter and type(weights.data) is Tensor for weights in part.parameters())


def remember_calls(forward: Callable) -> Callable:
    """Wrap a forward method with a small cache: a recent call that is repeated gets a copy of its result."""
    results: OrderedDict[str, Any] = OrderedDict()

    def remembering(*args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        if not all(leaf is None or isinstance(leaf, (Tensor, str, int, float, bool)) for leaf in leaves):
            return forward(*args, **kwargs)
        key = _hash_all([str(form), *leaves])
        if key not in results:
            results[key] = forward(*args, **kwargs)
        results.move_to_end(key)
        if len(results) > REMEMBERED:
            results.popitem(last=False)
        return pytree.tree_map_only(Tensor, Tensor.clone, results[key])

    return remembering


def _hash_all(values: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(hash_tensor(value).encode())
        else:
            found.update(f"{type(value).__name__} {value!r}".encode())
    return found.hexdigest()


# Identity of a model


def identify_encoders(pipe: DiffusionPipeline, model: str | None, args: DiffusionGRPOConfig) -> str:
    """Return the name of the folder for prompts encoded by these text encoders; each model has its own."""
    if model is None:
        found = identify_pipeline(pipe)
    else:
        kwargs = args.model_init_kwargs or {}
        source = str(tiny.PATH) if model == "tiny" else model
        quantized = [getattr(args, name) for name in QUANTIZED]
        found = f"{identify_source(source, **kwargs)} {describe(kwargs)} {quantized}"
    dtypes = [str(getattr(pipe, name).dtype) for name in list_text_encoders(pipe.components) if getattr(pipe, name)]
    about = [type(pipe).__name__, found, *dtypes, args.device.type, *describe_versions()]
    return f"{type(pipe).__name__}-{_hash_all(about)[:20]}"


def identify_pipeline(pipe: DiffusionPipeline) -> str:
    """Return a hash that identifies the text encoders and tokenizers of a pipeline by their contents."""
    parts = {name: part for name, part in pipe.components.items() if is_part_of_encoding(name)}
    found = [type(pipe).__name__]
    for name, part in parts.items():
        found.append(name)
        if isinstance(part, nn.Module):
            found += [value for pair in part.state_dict().items() for value in pair]
        elif hasattr(part, "save_pretrained"):
            with tempfile.TemporaryDirectory() as folder:
                part.save_pretrained(folder)
                found += [path.read_bytes().hex() for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return _hash_all(found)


def identify_source(source: str | Path, **kwargs: Any) -> str:
    """Return a string that identifies the text encoders and tokenizers of a named model, without loading them."""
    folder = Path(source)
    if not folder.is_dir():
        names = {name: kwargs[name] for name in ("cache_dir", "revision") if name in kwargs}
        path = try_to_load_from_cache(str(source), "model_index.json", **names)
        return f"{source}@{Path(path).parent.name if isinstance(path, str) else kwargs.get('revision')}"
    found = []
    for path in sorted(folder.glob("*/**/*")):
        if path.is_file() and is_part_of_encoding(path.relative_to(folder).parts[0]):
            about, target = path.stat(), path.resolve()
            is_small = about.st_size < SMALL
            content = path.read_bytes().hex() if is_small else f"{about.st_size} {target.stat().st_mtime_ns}"
            found += [str(path.relative_to(folder)), content]
    return _hash_all(found)


def is_part_of_encoding(name: str) -> bool:
    """Return whether a component of this name takes part in encoding prompts."""
    return any(word in name for word in ("text_encoder", "tokenizer", "processor"))


def make_stand_ins(
    source: str | Path, dtypes: torch.dtype | dict[str, torch.dtype] | None, **kwargs: Any
) -> dict[str, StandIn]:
    """Make stand-ins for the text encoders of a named model, to pass to `from_pretrained` in their place.

    Encoders from libraries other than transformers are left out.
    """
    made = {}
    index = DiffusionPipeline.load_config(source, **kwargs)
    for name in list_text_encoders(index):
        library, kind = index[name]
        if library != "transformers" or not hasattr(transformers, kind):
            continue
        kind = getattr(transformers, kind)
        config = kind.config_class.from_pretrained(source, subfolder=name, **kwargs)
        dtype = dtypes.get(name, dtypes.get("default")) if isinstance(dtypes, dict) else dtypes
        made[name] = StandIn(kind, config, dtype or torch.float32, "cpu", lambda: None, lambda: None)
    return made


def describe_versions() -> list[str]:
    """Return the versions of the libraries that encode prompts: another version may give other bits."""
    return [f"{module.__name__} {module.__version__}" for module in (torch, transformers, diffusers)]
