"""Pipelines without weights, loaded from configuration files and prepared by the code of training.

The pipeline is of diffusers' own class. Its networks hold fake tensors (torch's `FakeTensorMode`), which have a shape
and a dtype but no memory.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from peft import PeftConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.settings import DiffusionGRPOConfig
from ..training.model import choose_dtype, load_pipeline, prepare_model
from ..training.model_checks import check_processors
from ..training.model_index import list_components, read_index
from ..training.modular_loading import is_modular, read_modular

WEIGHTS = ["*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.ckpt", "*.pt", "*.onnx*", "*.gguf"]


@dataclass
class Parts:
    """A pipeline without weights that is prepared for training, and what it is made of."""

    pipe: DiffusionPipeline
    mode: FakeTensorMode
    model: nn.Module
    networks: dict[str, nn.Module]
    others: dict[str, nn.Module]
    moved: list[str]  # others that `offload_frozen` moves
    decodes: list[str]  # others that work after the network
    specs: dict[str, Any] = field(default_factory=dict)  # how components are quantised

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def prepare_parts(folder: Path, args: DiffusionGRPOConfig, peft_config: PeftConfig | None) -> Parts:
    """Build a pipeline without weights and prepare it as for training."""
    pipe, mode = build_weightless_pipeline(folder, args, peft_config is None)
    with mode:
        component, model = prepare_model(pipe, args, peft_config)
    every = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    order = (pipe.model_cpu_offload_seq or "").split("->")
    others = {name: part for name, part in every.items() if name not in component}
    moved = [name for name in order if name in others and name not in pipe._exclude_from_cpu_offload]
    last = max((order.index(name) for name in component if name in order), default=len(order))
    decodes = [name for name in moved if order.index(name) > last]
    return Parts(pipe, mode, model, {name: every[name] for name in component}, others, moved, decodes)


def find_configuration(model: str) -> Path:
    """Find the folder with the configuration files of a pipeline, downloading them from the Hub if needed."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, ignore_patterns=[*WEIGHTS, "*.png", "*.jpg", "*.gif", "*.mp4"]))


def build_weightless_pipeline(
    folder: Path, args: DiffusionGRPOConfig, is_full_training: bool
) -> tuple[DiffusionPipeline, FakeTensorMode]:
    """Load the pipeline of a folder as training does, with networks of fake tensors."""
    mode, kwargs = FakeTensorMode(allow_non_fake_inputs=True), args.model_init_kwargs or {}
    # with a weak reference to a weight, torch would refuse to cast the network (LoRA, SDXL's VAE)
    mode.fake_tensor_converter.set_tensor_memo = lambda meta, fake: None
    index, dtype = read_index(str(folder), args), choose_dtype(args, is_full_training)
    check_processors(index, kwargs)
    modular = read_modular(folder, kwargs) if is_modular(folder, {}) else None
    parts: dict[str, nn.Module] = {}
    for name, (library, kind) in list_components(index).items():
        spec = None if modular is None else modular.get_component_spec(name)
        source = folder if spec is None else spec.pretrained_model_name_or_path  # each may come from another place
        cls = find_class(name, library, kind)
        if source is None or kwargs.get(name, cls) is None or not issubclass(cls, nn.Module):
            continue
        place = folder / name if spec is None else find_configuration(source) / (spec.subfolder or "")
        part_dtype = dtype.get(name, dtype.get("default", torch.float32)) if isinstance(dtype, dict) else dtype
        with mode:
            parts[name] = _build_network(cls, place, part_dtype)
    return load_pipeline(str(folder), args, is_full_training, parts=parts), mode


def find_class(name: str, library: str, kind: str) -> type:
    beside = getattr(diffusers.pipelines, library, None)  # as for Stable Diffusion's safety checker
    cls = getattr(diffusers, kind, None) or getattr(transformers, kind, None) or getattr(beside, kind, None)
    if cls is None:
        raise ValueError(f"{name} is a {kind} of {library}, which diffusers and transformers do not have.")
    return cls


def _build_network(cls: type[nn.Module], folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Build a network in the dtype in which it is loaded; some layers stay in float32."""
    if issubclass(cls, transformers.PreTrainedModel):
        config = cls.config_class.from_pretrained(folder)
        network = cls(config)
        dtype = dtype or getattr(config, "dtype", None)  # the default of transformers
        in_float32 = set(network._keep_in_fp32_modules_strict or ())
        in_float32 |= set(network._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    else:
        network = cls.from_config(cls.load_config(folder))
        in_float32 = set(network._keep_in_fp32_modules or ())
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(
                torch.float32 if in_float32 & set(name.split(".")) else dtype or torch.float32
            )
    return network.eval()
