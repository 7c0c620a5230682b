"""Read and write weights on disk, in forms that plain diffusers can load.

A LoRA is written in both PEFT's and diffusers' form. Full training writes the network and, at the end of a run, the
whole pipeline, in diffusers' layout.
"""

import copy
import inspect
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..distributed.late_weights import load_held
from ..policy.base import policy_component, split_component
from ..policy.networks import replace_attribute
from .public_names import public_source_name

SOURCE = "_name_or_path"  # config entry in which diffusers says where a pipeline or network was loaded from
LOADED_FROM = "pretrained_model_name_or_path"  # the same of each component of a modular pipeline
POLICY_FOLDER = "policy"  # subfolder for the policy itself, next to its published average

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
# name of a layer's first matrix, in the layouts that diffusers' pipelines convert files to
FIRST_MATRIX = re.compile(r"(lora_A|lora(_linear_layer)?[._]down)(\.\w+)?\.weight$|lora_embedding_A")


def save_policy(
    model: nn.Module,
    pipe: DiffusionPipeline,
    component: tuple[str, ...],
    folder: str | Path,
    whole_pipeline: bool = False,
) -> None:
    """Write the trained weights to `folder`, under the public name of the base model."""
    folder = Path(folder)
    for part, name, place in _list_parts(model, component, folder):
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(part, PeftModel):
            _save_lora(part, pipe, name, place)
        elif not whole_pipeline:
            part.save_pretrained(folder / name)
            _publish_sources(folder, (name,), pipe)
    if whole_pipeline and not isinstance(part, PeftModel):
        pipe.save_pretrained(folder)
        _publish_sources(folder, pipe.components, pipe)
        name_repository(folder, str(folder), folder.resolve().name)


def _publish_sources(folder: Path, names: Iterable[str], pipe: DiffusionPipeline) -> None:
    """Replace paths by public names in the files just written for these parts of the pipeline."""

    def publish(config: dict[str, Any]) -> dict[str, Any]:
        return config | {SOURCE: public_source_name(config[SOURCE], base)} if config.get(SOURCE) else config

    base = pipe.config.get(SOURCE)
    configs = [path for name in names for path in (folder / name).rglob("*config.json")]
    for path in (folder / pipe.config_name, *configs):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if f'"{SOURCE}"' in text:
            content = json.loads(text, object_hook=publish)
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def name_repository(folder: Path, former: str, name: str) -> None:
    """Write into a modular pipeline's index where its components are: readers on the Hub load them from there."""
    index = folder / ModularPipeline.config_name
    if index.is_file():

        def rename(spec: dict[str, Any]) -> dict[str, Any]:
            return spec | {LOADED_FROM: name} if spec.get(LOADED_FROM) == former else spec

        content = json.loads(index.read_text(encoding="utf-8"), object_hook=rename)
        index.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _list_parts(model: nn.Module, component: tuple[str, ...], folder: Path) -> Iterator[tuple[nn.Module, str, Path]]:
    """Yield each trained network, with its name and the folder of its weights."""
    for name in component:
        part = model[name] if isinstance(model, nn.ModuleDict) else model
        # the LoRA of a second network: load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)
        yield part, name, folder / name if name != component[0] and isinstance(part, PeftModel) else folder


def _save_lora(model: PeftModel, pipe: DiffusionPipeline, name: str, folder: Path) -> None:
    layers = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    state = {name: tensor.contiguous() for name, tensor in layers.items()}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[model.active_adapter])  # the model keeps its own
    if config.base_model_name_or_path:
        config.base_model_name_or_path = public_source_name(config.base_model_name_or_path, pipe.config.get(SOURCE))
    config.save_pretrained(folder)
    way = lora_loader(pipe, name)
    layers = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    if way == "load_lora_adapter":
        metadata = {LORA_ADAPTER_METADATA_KEY: json.dumps(config.to_dict(), default=sorted)}
        save_file(layers, folder / LORA_WEIGHTS, metadata={"format": "pt", **metadata})
    if way != "load_lora_weights":
        return
    known = _lora_arguments(pipe)
    # diffusers writes a second expert's LoRA as it does the first's. Names stay PEFT's: the older ones of UNets exist
    # for attention only, and a file with both is read as if it had only those of its first layer.
    component = name.removesuffix("_2")
    names = {f"{component}_lora_layers": layers, f"{component}_lora_adapter_metadata": config.to_dict()}
    pipe.save_lora_weights(folder, **{name: value for name, value in names.items() if name in known})


def _lora_arguments(pipe: DiffusionPipeline) -> Mapping[str, Any]:
    return inspect.signature(getattr(pipe, "save_lora_weights", lambda: None)).parameters


def lora_loader(pipe: DiffusionPipeline, name: str) -> str:
    """Return the name of the method that loads a LoRA of this network into a new pipeline."""
    if f"{name.removesuffix('_2')}_lora_layers" in _lora_arguments(pipe):
        return "load_lora_weights"
    return "load_lora_adapter" if isinstance(getattr(pipe, name), PeftAdapterMixin) else "peft"


def name_half_dtype(pipe: DiffusionPipeline) -> str | None:
    """Return the half-precision dtype of a pipeline's parts, such as "bfloat16"; None if all are in float32."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    dtypes = {parameter.dtype for part in parts for parameter in part.parameters()}
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return next((name for dtype, name in names.items() if dtype in dtypes), None)


def load_weights(
    pipe: DiffusionPipeline,
    source: str | Path,
    adapter_name: str = "default",
    component: tuple[str, ...] | None = None,
) -> None:
    """Load trained weights into a pipeline, in place."""
    place = fetch_lora(pipe, source) or Path(source).expanduser()
    if place.is_file() and place.name in (ADAPTER_WEIGHTS, LORA_WEIGHTS) and (place.parent / ADAPTER_CONFIG).is_file():
        place = place.parent
    networks = [name for name in pipe.components if (place / name / "config.json").is_file()]
    networks = [name for name in networks if isinstance(getattr(pipe, name), nn.Module)]
    if place.name == ADAPTER_WEIGHTS:
        raise ValueError(f"{source} needs the {ADAPTER_CONFIG} that PEFT saved beside it, which holds its scale.")
    if (place / ADAPTER_WEIGHTS).is_file():
        _load_lora(pipe, place, adapter_name, lambda: _add_adapters(pipe, place, adapter_name, component))
    elif networks and not (place / LORA_WEIGHTS).is_file():
        for name in networks:
            network = getattr(pipe, name)
            saved = type(network).from_pretrained(place / name, dtype=network.dtype, use_safetensors=True)
            network.load_state_dict(saved.state_dict())
    elif place.is_dir() and not list(place.glob("*.safetensors")):
        raise ValueError(f"{place} holds neither a LoRA nor a network of {type(pipe).__name__}.")
    elif not hasattr(pipe, "load_lora_weights"):
        raise ValueError(f"{type(pipe).__name__} loads no LoRA from {source}; give the folder of a run.")
    else:
        _load_lora(pipe, source, adapter_name, lambda: _let_pipeline_load(pipe, source, adapter_name))


def find_variant(folder: str | Path) -> str | None:
    """Return the variant, such as `fp16`, of a pipeline's folder in which a network has no other weights."""
    for part in Path(folder).glob("*/"):
        # model.safetensors, model.fp16.safetensors, model.fp16-00001-of-00002.safetensors
        names = [file.name.split(".") for file in part.glob("*.safetensors")]
        if names and all(len(name) == 3 for name in names):
            return names[0][1].split("-")[0]
    return None


def fetch_lora(pipe: DiffusionPipeline, source: str | Path) -> Path | None:
    """Fetch a LoRA in a run's layout from the Hub, with those of other networks."""
    name = str(source)
    if isinstance(source, Path) or Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return None
    try:
        hf_hub_download(name, ADAPTER_CONFIG)
    except EntryNotFoundError:
        return None
    files = (ADAPTER_WEIGHTS, ADAPTER_CONFIG, LORA_WEIGHTS)
    networks = [component for component, part in pipe.components.items() if isinstance(part, nn.Module)]
    inside = [f"{network}/{file}" for network in networks for file in files]
    folder = Path(snapshot_download(name, allow_patterns=[*files, "run.json", *inside]))
    return folder if any((folder / file).is_file() for file in (ADAPTER_WEIGHTS, LORA_WEIGHTS)) else None


def _load_lora(pipe: DiffusionPipeline, source: str | Path, name: str, load: Callable[[], tuple[int, int]]) -> None:
    """Load a LoRA; take it out again if the pipeline did not take all of it."""
    try:
        taken, held = load()
        reason = f"only {taken} of its {held} layers are in the pipeline" if taken < held else None
    except (OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any error of peft or of diffusers' conversion, of which some have a line per tensor
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"
    if reason is not None:
        for part in pipe.components.values():
            drop_adapter(part, name)
        raise ValueError(
            f"The LoRA {source} does not fit {type(pipe).__name__} ({reason}); use one that was trained on this model."
        )


def _add_adapters(
    pipe: DiffusionPipeline, folder: Path, name: str, component: tuple[str, ...] | None
) -> tuple[int, int]:
    """Add the LoRAs of a folder in PEFT's layout, which holds their scale exactly, to their networks."""
    records = [place / "run.json" for place in (folder, *folder.resolve().parents[:2])]  # of the run that holds it
    trained = [json.loads(path.read_text(encoding="utf-8")).get("component") for path in records if path.is_file()]
    first, *others = split_component(trained[0]) if trained and trained[0] else component or policy_component(pipe)
    taken = held = 0
    for network, place in ((first, folder), *((other, folder / other) for other in others)):
        if (place / ADAPTER_WEIGHTS).is_file():
            layers = load_file(place / ADAPTER_WEIGHTS)
            unexpected = _add_adapter(getattr(pipe, network), place, layers, name)
            taken, held = taken + len(layers) - len(unexpected), held + len(layers)
    return taken // 2, held // 2  # each layer has two matrices


def _add_adapter(network: nn.Module, folder: Path, layers: dict[str, Tensor], name: str) -> list[str]:
    """Add one LoRA to a network, and return the names of its tensors that the network lacks."""
    inject_adapter_in_model(PeftConfig.from_pretrained(folder), network, adapter_name=name)
    layers = {key.removeprefix("base_model.model."): tensor for key, tensor in layers.items()}
    network._hf_peft_config_loaded = True  # diffusers then knows that there are adapters
    return set_peft_model_state_dict(network, layers, adapter_name=name).unexpected_keys


def _let_pipeline_load(pipe: DiffusionPipeline, source: str | Path, name: str) -> tuple[int, int]:
    """Let the pipeline load a LoRA of any other layout."""
    state, read = {}, getattr(pipe, "lora_state_dict", None)

    def convert(*args: Any, **kwargs: Any) -> Any:
        result = read(*args, **kwargs)
        state.update(result[0] if isinstance(result, tuple) else result)
        return result

    # diffusers warns of what does not fit, a line per tensor, and goes on
    log = logging.getLogger("diffusers.loaders.peft")
    with replace_attribute(pipe, "lora_state_dict", convert), replace_attribute(log, "disabled", True):
        pipe.load_lora_weights(source, adapter_name=name)
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    names = [key for part in parts for key, _ in part.named_parameters() if f"_A.{name}" in key]
    return len(names), sum(FIRST_MATRIX.search(key) is not None for key in state)


def list_tuner_layers(network: nn.Module) -> list[BaseTunerLayer]:
    return [module for module in network.modules() if isinstance(module, BaseTunerLayer)]


def drop_adapter(network: Any, name: str) -> None:
    """Delete an adapter of a network; nothing happens if there is none."""
    if isinstance(network, nn.Module):
        getattr(network, "peft_config", {}).pop(name, None)
        for layer in list_tuner_layers(network):
            layer.delete_adapter(name)


def load_policy(model: nn.Module, component: tuple[str, ...], folder: str | Path) -> None:
    """Load weights that `save_policy` wrote back into the model, in place and bit for bit."""
    for part, name, place in _list_parts(model, component, Path(folder)):
        if isinstance(part, PeftModel):
            weights = load_file(place / ADAPTER_WEIGHTS)
            result = set_peft_model_state_dict(part, weights, adapter_name=part.active_adapter)
            if result.unexpected_keys:
                raise ValueError(
                    f"The adapter in {place} has layers that this model lacks, such as {result.unexpected_keys[0]}; "
                    "use the peft_config it was trained with."
                )
            continue
        if not (place / name).is_dir():  # diffusers would look for it on the Hub
            raise ValueError(f"{place} has no folder {name!r}; it was not written by full training of that network.")
        saved = type(part).from_pretrained(place / name, dtype=part.dtype, use_safetensors=True)
        load_held(part, saved.state_dict())


def copy_weights(checkpoint: str | Path, folder: str | Path, component: tuple[str, ...]) -> None:
    """Copy the weights that `save_policy` wrote into a checkpoint, without the training state, to another folder."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, LORA_WEIGHTS):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder / name)
    for name in (*component, POLICY_FOLDER):
        if (checkpoint / name).is_dir():
            shutil.copytree(checkpoint / name, folder / name, dirs_exist_ok=True)
