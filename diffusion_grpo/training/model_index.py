"""What a named model is made of before its weights are loaded: where its files are, its class, components, networks.

`model_index.json` says all of it, or the index of a modular pipeline.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from .. import tiny
from ..config.settings import DiffusionGRPOConfig
from ..policy.base import POLICY_COMPONENTS, policy_component, split_component
from .modular_loading import HUB_KWARGS, is_modular, list_parts, read_modular


def name_source(model: str) -> str | Path:
    """Return what diffusers calls a named model: a Hub id, or a folder."""
    return tiny.PATH if model == "tiny" else os.path.expanduser(model)


def hub_kwargs(args: Any) -> dict[str, Any]:
    """Return the entries of `model_init_kwargs` that say where files come from."""
    kwargs = args.model_init_kwargs or {}
    return {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}


def read_index(model: str, args: Any) -> dict[str, Any]:
    """Return the contents of a named model's `model_index.json`: the class of each component."""
    if is_modular(name_source(model), hub_kwargs(args)):
        pipe = read_modular(name_source(model), args.model_init_kwargs or {})
        return {"_class_name": type(pipe).__name__, **list_parts(pipe)}
    return DiffusionPipeline.load_config(name_source(model), **hub_kwargs(args))


def pipeline_class(model: str | DiffusionPipeline, args: Any) -> type[DiffusionPipeline] | None:
    """Return the pipeline's class, read from `model_index.json` alone; None if its code comes from elsewhere."""
    if isinstance(model, DiffusionPipeline):
        return type(model)
    if "custom_pipeline" in (args.model_init_kwargs or {}):
        return None
    if is_modular(name_source(model), hub_kwargs(args)):
        return type(read_modular(name_source(model), args.model_init_kwargs or {}))
    return getattr(diffusers, str(read_index(model, args).get("_class_name")), None)


def list_components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each component that a `model_index.json` names."""
    pairs = {name: tuple(entry) for name, entry in index.items() if isinstance(entry, (list, tuple))}
    return {name: pair for name, pair in pairs.items() if len(pair) == 2 and None not in pair}


def choose_networks(components: Collection[str], train_component: str | None) -> tuple[str, ...]:
    """Return the names of the networks to train, from the names of a pipeline's components."""
    if train_component:
        return split_component(train_component)
    names = (name for name in POLICY_COMPONENTS if name in components or f"{name}_2" in components)
    first = next(names, POLICY_COMPONENTS[0])
    return tuple(name for name in (first, f"{first}_2") if name in components)


def find_networks(model: str | DiffusionPipeline, args: DiffusionGRPOConfig) -> tuple[str, ...]:
    """Return the names of the networks to train, in a pipeline or in a named model that is not loaded yet."""
    if isinstance(model, DiffusionPipeline):
        return policy_component(model, args.train_component)
    given = args.model_init_kwargs or {}
    index = {name: entry for name, entry in read_index(model, args).items() if given.get(name, entry) is not None}
    return choose_networks(list_components(index), args.train_component)
