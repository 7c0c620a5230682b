"""Read and write weights on disk, in forms that plain diffusers can load.

A LoRA is written in both PEFT's and diffusers' form. Full training writes the network and, at the end of a run, the
whole pipeline, in diffusers' layout.
"""

import copy
import dataclasses
import inspect
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from ..distributed.late_weights import load_held
from ..policy.base import policy_component, split_component
from .card_data import public_source_name

SOURCE = "_name_or_path"  # config entry in which diffusers says where a pipeline or network was loaded from
POLICY_FOLDER = "policy"  # subfolder for the policy itself, next to its published average

ADAPTER_WEIGHTS = "adapter_model.safetensors"
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"


@dataclasses.dataclass(frozen=True)
class PolicyFiles:
    """Writer and reader of the weights of a run's policy, in diffusers' layout.

    Attributes:
        pipe: the pipeline being trained.
        component: names of the trained networks in the pipeline.
    """

    pipe: DiffusionPipeline
    component: tuple[str, ...]

    def save(self, model: nn.Module, folder: Path, whole_pipeline: bool = False) -> None:
        """Save the policy; see [`save_policy`]."""
        save_policy(model, self.pipe, self.component, folder, whole_pipeline)

    def load(self, model: nn.Module, folder: Path) -> None:
        """Load the policy; see [`load_policy`]."""
        load_policy(model, self.component, folder)

    def copy(self, checkpoint: Path, folder: Path) -> None:
        """Copy the policy's weights; see [`copy_weights`]."""
        copy_weights(checkpoint, folder, self.component)


def save_policy(
    model: nn.Module,
    pipe: DiffusionPipeline,
    component: tuple[str, ...],
    folder: str | Path,
    whole_pipeline: bool = False,
) -> None:
    """Write the trained weights to `folder`.

    Args:
        model: the trained model, unwrapped: a `PeftModel` around the pipeline's network, or that network.
        pipe: the pipeline that it belongs to.
        component: names of the trained networks in the pipeline.
        folder: folder to write to, made if needed. LoRA: `pytorch_lora_weights.safetensors` for
            `pipe.load_lora_weights(folder)`, and PEFT's `adapter_model.safetensors`; for a network into which the
            pipeline loads no LoRA, see [`lora_loader`]. Full training: `folder/<component>`.
        whole_pipeline: in full training, whether to write the other parts too, for
            `DiffusionPipeline.from_pretrained(folder)`.

    The files use the public name of the base model, without folders of this machine.

    If several networks share the steps, the LoRA of the first goes to `folder` and that of any other to
    `folder/<component>`: `pipe.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)`.
    """
    folder = Path(folder)
    for part, name, place in _others(model, component, folder):
        save_policy(part, pipe, (name,), place)
    model, name = _first(model, component)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        _save_lora(model, pipe, name, folder)
    elif whole_pipeline:
        pipe.save_pretrained(folder)
        _publish_sources(folder, pipe.components, pipe)
    else:
        model.save_pretrained(folder / name)
        _publish_sources(folder, (name,), pipe)


def _publish_sources(folder: Path, names: Iterable[str], pipe: DiffusionPipeline) -> None:
    """Replace paths by public names in the files just written for these parts of the pipeline."""

    def publish(found: dict[str, Any]) -> dict[str, Any]:
        return found | {SOURCE: public_source_name(found[SOURCE], base)} if found.get(SOURCE) else found

    base = pipe.config.get(SOURCE)
    configs = [path for name in names for path in (folder / name).rglob("*config.json")]
    for path in (folder / pipe.config_name, *configs):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if f'"{SOURCE}"' in text:
            content = json.loads(text, object_hook=publish)
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _first(model: nn.Module, component: tuple[str, ...]) -> tuple[nn.Module, str]:
    """Return the model itself, or the first of several."""
    return (model[component[0]] if isinstance(model, nn.ModuleDict) else model), component[0]


def _others(model: nn.Module, component: tuple[str, ...], folder: Path) -> Iterator[tuple[nn.Module, str, Path]]:
    """Yield the models after the first, with their names and the folders of their weights."""
    for name in component[1:]:
        yield model[name], name, folder / name if isinstance(model[name], PeftModel) else folder


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
    """Return the name of the method that loads a LoRA of this network into a new pipeline.

    Returns:
        "load_lora_weights", a method of the pipeline; "load_lora_adapter", a method of the network, if the pipeline
        has no loader for it; "peft" if diffusers has none at all (PixArt, DiT): `PeftModel.from_pretrained`.
    """
    if f"{name.removesuffix('_2')}_lora_layers" in _lora_arguments(pipe):
        return "load_lora_weights"
    return "load_lora_adapter" if isinstance(getattr(pipe, name), PeftAdapterMixin) else "peft"


def name_half_dtype(pipe: DiffusionPipeline) -> str | None:
    """Return the half-precision dtype of a pipeline's parts, such as "bfloat16"; None if all are in float32."""
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    found = {parameter.dtype for part in parts for parameter in part.parameters()}
    names = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return next((name for dtype, name in names.items() if dtype in found), None)


def load_weights(pipe: DiffusionPipeline, source: str | Path, adapter_name: str | None = None) -> None:
    """Load trained weights into a pipeline, in place.

    Args:
        pipe: pipeline of the model that was trained.
        source: a run's folder or one of its checkpoints (or the `policy` in it), with a LoRA (of a second expert too)
            or with the networks of full training; the Hub id of a pushed LoRA; a folder that PEFT wrote; or any
            LoRA that the pipeline itself loads, a file or a Hub id.
        adapter_name: name of the LoRA in the pipeline; by default diffusers chooses one.

    Raises:
        ValueError: the folder holds no such weights.
    """
    folder = fetch_lora(pipe, source) or Path(source)
    is_lora = any((folder / name).is_file() for name in (ADAPTER_WEIGHTS, LORA_WEIGHTS))
    networks = [name for name in pipe.components if (folder / name / "config.json").is_file()]
    networks = [name for name in networks if isinstance(getattr(pipe, name), nn.Module)]
    if is_lora:
        _load_lora(pipe, folder, {} if adapter_name is None else {"adapter_name": adapter_name})
    elif networks:
        for name in networks:
            network = getattr(pipe, name)
            saved = type(network).from_pretrained(folder / name, dtype=network.dtype, use_safetensors=True)
            network.load_state_dict(saved.state_dict())
    elif folder.is_dir() and not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds neither a LoRA nor a network of {type(pipe).__name__}.")
    elif not hasattr(pipe, "load_lora_weights"):
        raise ValueError(f"{type(pipe).__name__} loads no LoRA from {source}; give the folder of a run.")
    else:
        pipe.load_lora_weights(source, adapter_name=adapter_name)


def fetch_lora(pipe: DiffusionPipeline, source: str | Path) -> Path | None:
    """Fetch a LoRA in a run's layout from the Hub, with those of other networks.

    Returns:
        its folder in the cache; None if `source` is no Hub id, or if only the pipeline can tell which file to load.
    """
    name = str(source)
    if isinstance(source, Path) or Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return None
    try:
        hf_hub_download(name, "adapter_config.json")
    except EntryNotFoundError:
        return None
    files = (ADAPTER_WEIGHTS, "adapter_config.json", LORA_WEIGHTS)
    networks = [component for component, part in pipe.components.items() if isinstance(part, nn.Module)]
    inside = [f"{network}/{file}" for network in networks for file in files]
    folder = Path(snapshot_download(name, allow_patterns=[*files, "run.json", *inside]))
    return folder if any((folder / file).is_file() for file in (ADAPTER_WEIGHTS, LORA_WEIGHTS)) else None


def _load_lora(pipe: DiffusionPipeline, folder: Path, named: dict[str, str]) -> None:
    records = [place / "run.json" for place in (folder, *folder.resolve().parents[:2])]  # of the run that holds it
    trained = [json.loads(path.read_text(encoding="utf-8")).get("component") for path in records if path.is_file()]
    first, *others = split_component(trained[0]) if trained and trained[0] else policy_component(pipe)
    for name, place in ((first, folder), *((name, folder / name) for name in others)):
        if not place.is_dir():
            continue
        way = "peft" if is_peft_alone(place) else lora_loader(pipe, name)
        if way == "load_lora_weights":
            into = {f"load_into_{name}": True} if name in policy_component(pipe)[1:] else {}
            pipe.load_lora_weights(place, **into, **named)
        elif way == "load_lora_adapter":
            getattr(pipe, name).load_lora_adapter(place, prefix=None, weight_name=LORA_WEIGHTS, **named)
        else:
            PeftModel.from_pretrained(getattr(pipe, name), place, **named)


def is_peft_alone(folder: Path) -> bool:
    """Return whether a LoRA has only PEFT's layout, which diffusers does not load."""
    is_peft = (folder / ADAPTER_WEIGHTS).is_file() and (folder / "adapter_config.json").is_file()
    return is_peft and not (folder / LORA_WEIGHTS).is_file()


def load_policy(model: nn.Module, component: tuple[str, ...], folder: str | Path) -> None:
    """Load weights that `save_policy` wrote back into the model, in place and bit for bit.

    Raises:
        ValueError: the folder holds no weights of this kind of model.
    """
    folder = Path(folder)
    for part, name, place in _others(model, component, folder):
        load_policy(part, (name,), place)
    model, name = _first(model, component)
    if isinstance(model, PeftModel):
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}; it was not written by LoRA training.")
        weights = load_file(folder / ADAPTER_WEIGHTS)
        result = set_peft_model_state_dict(model, weights, adapter_name=model.active_adapter)
        if result.unexpected_keys:
            raise ValueError(
                f"The adapter in {folder} has layers that this model lacks, such as {result.unexpected_keys[0]}; use "
                "the peft_config it was trained with."
            )
        return
    if not (folder / name).is_dir():
        raise ValueError(f"{folder} has no folder {name!r}; it was not written by full training of that network.")
    saved = type(model).from_pretrained(folder / name, dtype=model.dtype, use_safetensors=True)
    load_held(model, saved.state_dict())


def copy_weights(checkpoint: str | Path, folder: str | Path, component: tuple[str, ...]) -> None:
    """Copy the weights that `save_policy` wrote into a checkpoint, without the training state, to another folder."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    for name in (ADAPTER_WEIGHTS, "adapter_config.json", LORA_WEIGHTS):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder / name)
    for name in (*component, POLICY_FOLDER):
        if (checkpoint / name).is_dir():
            shutil.copytree(checkpoint / name, folder / name, dirs_exist_ok=True)
