"""Load modular pipelines by name: first their index and blocks, then their components."""

import contextlib
import functools
import logging
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModularPipeline
from torch import nn

from ..policy.modular import LOG, as_pipeline

HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def is_modular(source: str | Path, hub: Mapping[str, Any]) -> bool:
    """Return whether a folder or Hub id holds a modular pipeline and no classic one."""
    if Path(source).is_dir():
        return not (Path(source) / DiffusionPipeline.config_name).is_file()
    known = {name: hub[name] for name in HUB_KWARGS if isinstance(hub.get(name), Hashable) and name in hub}
    return _is_modular_id(str(source), **known)


@functools.cache
def _is_modular_id(source: str, **hub: Any) -> bool:
    try:
        DiffusionPipeline.load_config(source, **hub)
    except OSError:
        try:
            ModularPipeline.load_config(source, **hub)
        except OSError:
            return False  # the error about a classic pipeline is the one to see
        return True
    return False


def read_modular(source: str | Path, kwargs: Mapping[str, Any]) -> Any:
    """Return a modular pipeline without its components; see [`~diffusion_grpo.policy.modular.as_pipeline`]."""
    names = (*HUB_KWARGS, "trust_remote_code", "workflow")
    pipe = ModularPipeline.from_pretrained(source, **{k: kwargs[k] for k in names if k in kwargs})
    for name, spec in pipe._component_specs.items():
        if kwargs.get(name, spec) is None:
            setattr(pipe, name, None)  # a guider would be made from its configuration
    return as_pipeline(pipe)


def list_parts(pipe: ModularPipeline) -> dict[str, list[str]]:
    """Return library and class of each component that is loaded from files, as a `model_index.json` does."""
    kinds = {name: pipe.get_component_spec(name).type_hint for name in pipe.pretrained_component_names}
    return {name: [kind.__module__.partition(".")[0], kind.__name__] for name, kind in kinds.items() if kind}


def load_components(source: str | Path, **kwargs: Any) -> Any:
    """Load a modular pipeline with its components; one that `kwargs` gives, or leaves out with None, is not loaded."""
    pipe = read_modular(source, kwargs)
    specs = pipe._component_specs  # themselves; the public method returns copies
    given = {name: value for name, value in kwargs.items() if name in specs}
    pipe.update_components(**{name: part for name, part in given.items() if part is not None})
    for spec in specs.values():
        if spec.pretrained_model_name_or_path == str(source):  # components may come from several places
            spec.revision = kwargs.get("revision", spec.revision)
    names = [name for name, spec in specs.items() if spec.pretrained_model_name_or_path and name not in given]
    if not names and not given:
        raise ValueError(
            f"model: {source} says of none of its components where its weights are, so nothing is loaded."
        )
    skipped = {*given, "revision", "workflow"} | ({"variant"} if kwargs.get("variant") is None else set())
    others = {name: value for name, value in kwargs.items() if name not in skipped}
    if (quantized := others.pop("quantization_config", None)) is not None:
        is_own = {name: kind[0] == "diffusers" for name, kind in list_parts(pipe).items()}
        configs = {name: quantized._resolve_quant_config(is_own[name], name) for name in names if name in is_own}
        others["quantization_config"] = {name: config for name, config in configs.items() if config is not None}
    with _take_failures() as reasons:
        pipe.load_components(names=names, **others)
    if missing := [name for name in names if getattr(pipe, name) is None]:
        raise ValueError(
            f"model: {', '.join(missing)} of {source} could not be loaded: {' '.join(reasons[:1])} If no sample needs "
            f"a component, leave it out, as in model_init_kwargs: {{{missing[0]}: null}}."
        )
    return pipe


@contextlib.contextmanager
def _take_failures() -> Iterator[list[str]]:
    """Collect why components could not be loaded, in place of diffusers' tracebacks."""
    reasons: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if is_failure := message.startswith("Failed to"):
            reasons.append(" ".join(message.rpartition("\nValueError: ")[2].split()))
        return not is_failure

    LOG.addFilter(take)
    try:
        yield reasons
    finally:
        LOG.removeFilter(take)


def check_components(pipe: Any) -> None:
    """Refuse a given modular pipeline whose components are not loaded."""
    if isinstance(pipe, ModularPipeline) and not any(isinstance(part, nn.Module) for part in pipe.components.values()):
        raise ValueError(
            f"model is a {type(pipe).__name__} without components; call pipe.load_components(dtype=...) first."
        )
