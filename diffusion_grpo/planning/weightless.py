"""Pipelines without weights, built from configuration files by the rules of training.

The pipeline is of diffusers' own class. Its networks hold fake tensors (torch's `FakeTensorMode`), which have a shape
and a dtype but no memory.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.settings import DiffusionGRPOConfig
from ..training.decoding import set_decoding
from ..training.model import choose_dtype, set_scheduler
from ..training.model_checks import check_processors
from ..training.modular_loading import is_modular, list_parts, read_modular

WEIGHTS = ["*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.onnx*", "*.gguf"]


def find_configuration(model: str) -> Path:
    """Find the folder with the configuration files of a pipeline, downloading them from the Hub if needed."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, ignore_patterns=[*WEIGHTS, "*.png", "*.jpg", "*.gif", "*.mp4"]))


def build_weightless_pipeline(
    folder: Path, args: DiffusionGRPOConfig, is_full_training: bool
) -> tuple[DiffusionPipeline, FakeTensorMode]:
    """Build the pipeline of a folder as `load_pipeline` does, but with fake tensors instead of weights.

    How it decodes is set by [`decode_as_set`].
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = choose_dtype(args, is_full_training)
    if is_modular(folder, {}):
        return set_scheduler(
            _build_modular(folder, args.model_init_kwargs or {}, dtype, mode), args.scheduler_kwargs
        ), mode
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    check_processors(index, args.model_init_kwargs or {})
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        is_left_out = (args.model_init_kwargs or {}).get(name, entry) is None
        if not isinstance(entry, list) or entry[0] is None or entry[1] is None or is_left_out:
            parts[name] = None if isinstance(entry, list) else entry
            continue
        parts[name] = _build_part(folder / name, entry, _choose_own(dtype, name), mode)
    pipe = getattr(diffusers, index["_class_name"])(**parts)
    return set_scheduler(pipe, args.scheduler_kwargs), mode


def _build_modular(folder: Path, given: dict[str, Any], dtype: Any, mode: FakeTensorMode) -> DiffusionPipeline:
    """Build a modular pipeline, whose components may come from several places."""
    pipe, parts = read_modular(folder, given), {}
    for name, entry in list_parts(pipe).items():
        spec = pipe.get_component_spec(name)
        if spec.pretrained_model_name_or_path and given.get(name, entry) is not None:
            place = find_configuration(spec.pretrained_model_name_or_path) / (spec.subfolder or "")
            parts[name] = _build_part(place, entry, _choose_own(dtype, name), mode)
    pipe.update_components(**parts)
    return pipe


def _choose_own(dtype: Any, name: str) -> torch.dtype | None:
    return dtype.get(name, dtype.get("default", torch.float32)) if isinstance(dtype, dict) else dtype


@contextlib.contextmanager
def decode_as_set(pipe: DiffusionPipeline, args: DiffusionGRPOConfig) -> Iterator[None]:
    """Apply the settings of decoding to a pipeline; undo this on leaving."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    before = [dict(vars(part)) for part in parts]
    try:
        set_decoding(pipe, args.vae_slicing, args.vae_tiling, args.decode_batch_size)
        yield
    finally:
        for part, values in zip(parts, before, strict=True):
            vars(part).clear()
            vars(part).update(values)


def _build_part(folder: Path, entry: list[str], dtype: torch.dtype | None, mode: FakeTensorMode) -> Any:
    library, name = entry
    own_library = getattr(diffusers.pipelines, library, None)  # as for Stable Diffusion's safety checker
    cls = getattr(diffusers, name, None) or getattr(transformers, name, None) or getattr(own_library, name, None)
    if cls is None:
        raise ValueError(f"{folder.name} is a {name} of {library}, which diffusers and transformers do not have.")
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(folder)
    if issubclass(cls, transformers.PreTrainedModel):
        config = cls.config_class.from_pretrained(folder)
        with mode:
            part = cls(config)
        own = dtype or getattr(config, "dtype", None)  # the default of transformers
        kept = set(part._keep_in_fp32_modules_strict or ())
        kept |= set(part._keep_in_fp32_modules or ()) if own == torch.float16 else set()
    else:
        with mode:
            part = cls.from_config(cls.load_config(folder))
        own, kept = dtype, set(part._keep_in_fp32_modules or ())
    return _cast(part, own or torch.float32, kept).eval()


def _cast(part: nn.Module, dtype: torch.dtype, kept: set[str]) -> nn.Module:
    """Cast a part, except for what its class keeps in float32, and move it to the meta device."""

    def cast(name: str, tensor: Tensor) -> Tensor:
        is_kept = kept & set(name.split(".")) and dtype != torch.float32
        to = tensor.dtype if not tensor.is_floating_point() else torch.float32 if is_kept else dtype
        return torch.empty(tensor.shape, dtype=to, device="meta")

    _replace(part, cast)
    return part


def move_to_cpu(pipe: DiffusionPipeline, mode: FakeTensorMode) -> None:
    """Replace the weights of a prepared pipeline by fake tensors on the CPU, so that it can be called."""

    def fake(name: str, tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _replace(part, fake)


def forget_conversions(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to its tensors: a pipeline that casts its VAE could not swap the weights."""
    mode.fake_tensor_converter.tensor_memo.clear()


def _replace(part: nn.Module, new: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each weight and buffer. Tied tensors stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, module in part.named_modules():
        own = {"recurse": False, "remove_duplicate": False}
        for name, tensor in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if id(tensor) not in made:
                other = new(f"{prefix}.{name}", tensor)
                if isinstance(tensor, nn.Parameter):
                    other = nn.Parameter(other, requires_grad=tensor.requires_grad)
                made[id(tensor)] = tensor, other
            setattr(module, name, made[id(tensor)][1])
