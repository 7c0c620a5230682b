"""LoRAs in a pipeline, and the one that is trained.

Other adapters stay as they are, and networks can still be saved with their adapters merged. Anything that would lose
an adapter is refused before anything is changed.
"""

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft import set_peft_model_state_dict as set_state
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..distributed.late_weights import fill
from ..policy.networks import find_quantization, replace_attribute
from .files import drop_adapter, list_tuner_layers, load_weights
from .quantization import show_plain_layers

TARGETS = (("to_q", "to_k", "to_v", "to_out.0"), ("q_proj", "k_proj", "v_proj", "o_proj"))  # diffusers', transformers'
REFERENCE = "grpo_reference"  # copy of an adapter that is trained further, or whose reference moves
TRAINED = "default"  # peft's name for a first adapter


# Adapters in a pipeline


def list_adapters(pipe: DiffusionPipeline) -> dict[str, list[str]]:
    """List the adapters of each module of the pipeline that has any, without references of an earlier run."""
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    lists = {name: [a for a in getattr(part, "peft_config", {}) if a != REFERENCE] for name, part in modules.items()}
    return {name: adapters for name, adapters in lists.items() if adapters}


def list_kept_adapters(pipe: DiffusionPipeline, model: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """List the adapters other than those of the trained `model`, or of the models in a `ModuleDict`."""
    models = {name: model[name] if isinstance(model, nn.ModuleDict) else model for name in names}
    trained = {name: part.active_adapter for name, part in models.items() if isinstance(part, PeftModel)}
    carried = list_adapters(pipe)
    others = {name: [a for a in adapters if a != trained.get(name)] for name, adapters in carried.items()}
    return {name: adapters for name, adapters in others.items() if adapters}


def continues_lora(lora_path: str | None, lora_adapter: str | None, peft_config: PeftConfig | None) -> bool:
    """Return whether an existing LoRA is trained further; refuse what cannot be a folder, a file or a Hub id."""
    if lora_path is None and lora_adapter is None:
        return False
    if peft_config is not None:
        name = "lora_path" if lora_path is not None else "lora_adapter"
        raise ValueError(f"{name} names a LoRA that has its own rank and layers; leave out peft_config.")
    if lora_path is not None and not Path(lora_path).expanduser().exists():
        if lora_path.startswith((".", "/", "~")) or lora_path.count("/") != 1:
            raise ValueError(f"lora_path: there is no folder or file {lora_path}, and a Hub id is `owner/name`.")
    return True


def check_adapters(
    pipe: DiffusionPipeline,
    names: tuple[str, ...],
    lora_adapter: str | None,
    keep_adapters: bool,
    is_full_training: bool,
) -> None:
    """Refuse adapters that training would drop, switch off, or save in a form that does not load."""
    carried = list_adapters(pipe)
    for name in names if lora_adapter is not None else []:
        if lora_adapter not in carried.get(name, []):
            there = ", ".join(carried.get(name, [])) or "none"
            raise ValueError(f"pipe.{name} has no LoRA {lora_adapter!r}; it has {there}.")
    for component, adapters in carried.items():
        others = [adapter for adapter in adapters if component not in names or adapter != lora_adapter]
        if others and (is_full_training or not keep_adapters):
            raise ValueError(
                f"pipe.{component} has the adapter {others[0]!r}. Set lora_adapter={others[0]!r} to train it further, "
                "or keep_adapters=True to keep it active but frozen while another LoRA is trained; or merge it "
                "(pipe.fuse_lora(), then pipe.unload_lora_weights()), which full training needs."
            )
        _check_state(getattr(pipe, component), component, lora_adapter if component in names else None)


def _check_state(network: nn.Module, component: str, lora_adapter: str | None) -> None:
    for layer in list_tuner_layers(network):
        if layer.merged:
            raise ValueError(
                f"pipe.{component} has the adapter {layer.merged_adapters[0]!r} both fused into its weights and "
                "loaded; call pipe.unload_lora_weights() to keep the fused weights, or pipe.unfuse_lora()."
            )
        usual = _usual_scale(layer, lora_adapter)
        if usual is not None and abs(layer.scaling[lora_adapter] - usual) > 1e-6 * usual:
            raise ValueError(
                f"lora_adapter={lora_adapter!r} is scaled by {layer.scaling[lora_adapter] / usual:g}, which its saved "
                f"weights would not record; call pipe.set_adapters({lora_adapter!r}, 1.0) first."
            )


def _usual_scale(layer: BaseTunerLayer, adapter: str | None) -> float | None:
    if adapter not in getattr(layer, "scaling", {}):
        return None
    rank = layer.r[adapter]
    return layer.lora_alpha[adapter] / (rank**0.5 if getattr(layer, "use_rslora", {}).get(adapter) else rank)


# The trained adapter


def load_lora(pipe: DiffusionPipeline, names: tuple[str, ...], source: str, keep_adapters: bool) -> str:
    """Load a LoRA into the trained networks to train it further, and return its name; see [`load_weights`]."""
    check_adapters(pipe, names, None, keep_adapters, is_full_training=False)
    unwrap(pipe, names)
    name = choose_adapter_name(pipe)
    load_weights(pipe, source, name, names)
    where = {component for component, adapters in list_adapters(pipe).items() if name in adapters}
    if missing := sorted(set(names) - where):
        raise ValueError(f"lora_path: {source} holds no LoRA for {missing[0]}; set train_component to what it is for.")
    if (beside := sorted(where - set(names))) and not keep_adapters:
        raise ValueError(
            f"lora_path: {source} also has a LoRA for {beside[0]}, which is not trained and would be missing from "
            "what is saved; set keep_adapters=True to use it all the same."
        )
    return name


def unwrap(pipe: DiffusionPipeline, names: tuple[str, ...]) -> None:
    """Replace each `PeftModel` in the pipeline by the network inside it, which keeps its adapters."""
    for name in names:
        if isinstance(getattr(pipe, name), PeftModel):
            setattr(pipe, name, getattr(pipe, name).get_base_model())


def choose_adapter_name(pipe: DiffusionPipeline) -> str:
    """Return a name for a new adapter: `default`, or `default_2` and so on if that is taken."""
    taken = {adapter for adapters in list_adapters(pipe).values() for adapter in adapters}
    names = [TRAINED, *(f"{TRAINED}_{number}" for number in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


def wrap_lora(
    network: nn.Module, peft_config: PeftConfig | None, name: str, reference_moves: bool = False
) -> PeftModel:
    """Wrap a frozen network to train one LoRA; adapters that were active stay so, and are frozen."""
    drop_adapter(network, REFERENCE)  # of an earlier trainer of the same pipeline
    active = [adapter for adapter in _active_adapters(network) if adapter != name]
    state = None
    if peft_config is None:
        state = {key: value.clone() for key, value in get_peft_model_state_dict(network, adapter_name=name).items()}
        peft_config = copy_config(network, name)
    else:
        peft_config = fill_targets(network, peft_config)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # peft warns that there is an adapter already
        model = get_peft_model(network, peft_config, adapter_name=name)
    trained = {id(parameter) for parameter in network.parameters() if parameter.requires_grad}
    if state is None and reference_moves:
        state = get_peft_model_state_dict(network, adapter_name=name)
    if state is not None:
        _add_reference(model, state, name)
    for layer in list_tuner_layers(network):
        layer.enable_adapters(True)
        layer.set_adapter([*active, name])
    for parameter in network.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    model._hf_peft_config_loaded = True  # otherwise Trainer believes that a quantised network has no LoRA
    network.save_pretrained = functools.wraps(type(network).save_pretrained)(functools.partial(save_merged, network))
    return model


def copy_config(network: nn.Module, name: str) -> PeftConfig:
    """Copy the config of an adapter to train it further, without dropout, which a replay cannot reproduce."""
    peft_config = copy.deepcopy(network.peft_config[name])
    peft_config.lora_dropout, peft_config.inference_mode = 0.0, False
    return peft_config


def _add_reference(model: PeftModel, state: dict[str, Any], name: str) -> None:
    """Restore the adapter's weights, which peft has reinitialised, and keep a copy as the reference."""
    network = model.get_base_model()
    set_state(network, state, adapter_name=name)
    model.add_adapter(REFERENCE, copy.deepcopy(model.peft_config[name]))
    set_state(network, state, adapter_name=REFERENCE)


def _active_adapters(network: nn.Module) -> list[str]:
    layers = [layer for layer in list_tuner_layers(network) if not layer.disable_adapters]
    return list(dict.fromkeys(adapter for layer in layers for adapter in layer.active_adapters))


def fill_targets(network: nn.Module, peft_config: LoraConfig) -> LoraConfig:
    """Copy a config, filling in the network's usual target modules if it names none."""
    peft_config = copy.deepcopy(peft_config)  # peft writes into it
    peft_config.task_type, peft_config.inference_mode = None, False  # set for language models, and in saved adapters
    names = [name for name, _ in network.named_modules() if name]
    targets = peft_config.target_modules
    if not targets:
        present = (list(filter(functools.partial(_is_target, names), usual)) for usual in TARGETS)
        peft_config.target_modules = set(next((usual for usual in present if usual), []))
        if not peft_config.target_modules:
            raise ValueError(
                f"{type(network).__name__} has none of the usual attention layers; set target_modules to some of "
                f"its modules: {_linear_names(network)}."
            )
        return peft_config
    if isinstance(targets, str):  # a regular expression for whole names, as in peft, or the end of a name
        try:
            if targets.lower() == "all-linear" or any(re.fullmatch(targets, name) for name in names):
                return peft_config
        except re.error as error:
            raise ValueError(
                f"target_modules={targets!r} is no regular expression ({error}); write .* for any."
            ) from error
        peft_config.target_modules = {targets}
    missing = ", ".join(sorted(name for name in peft_config.target_modules if not _is_target(names, name)))
    if missing:
        raise ValueError(
            f"target_modules: {type(network).__name__} has no module {missing}; choose from {_linear_names(network)}."
        )
    return peft_config


def _is_target(names: list[str], target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _linear_names(network: nn.Module) -> str:
    """List the last parts of the names of layers that can have a LoRA, without block numbers."""
    layers = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.Embedding, BaseTunerLayer)
    paths = [name.split(".") for name, module in network.named_modules() if isinstance(module, layers) and name]
    ends = [path[-2:] if path[-1].isdigit() else path[-1:] for path in paths if not {"lora_A", "lora_B"} & set(path)]
    return ", ".join(sorted({".".join(end) for end in ends} - {"base_layer"}))


# Reference, and saving


@contextlib.contextmanager
def reference_adapters(model: PeftModel) -> Iterator[None]:
    """Make the network behave as the reference inside this context; kept adapters stay active."""
    name = model.active_adapter
    if list(model.peft_config) == [name]:
        with model.disable_adapter():
            yield
        return
    instead = [REFERENCE] if REFERENCE in model.peft_config else []
    with contextlib.ExitStack() as stack:
        for layer in list_tuner_layers(model):
            others = [adapter for adapter in layer.active_adapters if adapter != name]
            # not peft's set_adapter, which would also change which weights are trained
            stack.enter_context(replace_attribute(layer, "_active_adapter", [*others, *instead]))
        yield


def reference_names(model: nn.Module) -> list[str]:
    """List the parameters of the reference adapters that correspond to the trained ones."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [re.sub(r"(\.lora_\w+\.)[^.]+", rf"\g<1>{REFERENCE}", name) for name in trained]


def save_merged(network: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Save a network as its own class does, with its active adapters merged into plain weights."""
    # diffusers would write the adapters' layers under names that `from_pretrained` does not know
    fill(network.parameters())
    with contextlib.ExitStack() as stack:
        if find_quantization(network) is not None:
            stack.enter_context(show_plain_layers(network))
        stack.enter_context(merge_adapters(network))
        stack.enter_context(replace_attribute(network, "_hf_peft_config_loaded", False))
        type(network).save_pretrained(network, *args, **kwargs)


@contextlib.contextmanager
def merge_adapters(network: nn.Module) -> Iterator[None]:
    """Merge active adapters into plain layers inside this context; afterwards all is as before, bit for bit."""
    layers = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, BaseTunerLayer)]
    with contextlib.ExitStack() as stack:
        for name, layer in layers:
            base = layer.get_base_layer()
            *_, weight = layer.parameters()  # the last adapter's; a formerly quantised layer is on the CPU
            for parameter in layer.parameters():
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.to(weight.device, copy=True)
            # a quantised layer's own merge would round again; `show_plain_layers` has replaced it by a plain layer
            merge = LoraLinear.merge if type(base) is nn.Linear else type(layer).merge
            merge(layer, adapter_names=[] if layer.disable_adapters else layer.active_adapters)
            layer.merged_adapters.clear()
            for parameter in base.parameters():
                parameter.data = parameter.data.cpu()  # so only one layer at a time is doubled on the accelerator
            path, _, last = name.rpartition(".")
            parent = network.get_submodule(path)
            stack.callback(setattr, parent, last, layer)
            setattr(parent, last, base)
        yield
