"""Read `model_index.json` of a model, and check it before any weights are loaded."""

import os
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from .. import tiny
from ..config.settings import DiffusionGRPOConfig
from ..policy.base import policy_component, split_component
from ..policy.schedulers import stochastic_scheduler
from ..policy.unguided import refuse_guider, refuse_unknown_scales
from .pipeline_checks import check_processors
from .scheduler_settings import change_scheduler, check_sigmas
from .trained_networks import choose_networks, list_components

HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def pipeline_class(model: str | DiffusionPipeline, args: Any) -> type[DiffusionPipeline] | None:
    """Return the pipeline's class, read from `model_index.json` alone; None if its code comes from elsewhere."""
    if isinstance(model, DiffusionPipeline):
        return type(model)
    if "custom_pipeline" in (args.model_init_kwargs or {}):
        return None
    return getattr(diffusers, str(read_index(model, args).get("_class_name")), None)


def name_source(model: str) -> str | Path:
    """Return what diffusers calls a named model: a Hub id, or a folder."""
    return tiny.PATH if model == "tiny" else os.path.expanduser(model)


def read_index(model: str, args: Any) -> dict[str, Any]:
    """Return the contents of a named model's `model_index.json`: the class of each component."""
    return DiffusionPipeline.load_config(name_source(model), **hub_kwargs(args))


def hub_kwargs(args: Any) -> dict[str, Any]:
    """Return the entries of `model_init_kwargs` that say where files come from."""
    kwargs = args.model_init_kwargs or {}
    return {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}


def find_networks(model: str | DiffusionPipeline, args: DiffusionGRPOConfig) -> tuple[str, ...]:
    """Return the names of the networks to train, in a pipeline or in a named model that is not loaded yet."""
    if isinstance(model, DiffusionPipeline):
        return policy_component(model, args.train_component)
    given = args.model_init_kwargs or {}
    index = {name: entry for name, entry in read_index(model, args).items() if given.get(name, entry) is not None}
    return choose_networks(list_components(index), args.train_component)


def check_scheduler(
    model: str | DiffusionPipeline, pipeline: type[DiffusionPipeline] | None, args: DiffusionGRPOConfig
) -> None:
    """Refuse wrong scheduler and noise settings of a named model before weights are loaded.

    For other models, `load_pipeline` and `make_policy` refuse them.
    """
    if not isinstance(model, str) or pipeline is None or "scheduler" in (args.model_init_kwargs or {}):
        return
    index = read_index(model, args)
    cls = getattr(diffusers, str((index.get("scheduler") or [None, None])[1]), None)
    if cls is None:
        return
    scheduler = cls.from_pretrained(name_source(model), subfolder="scheduler", **hub_kwargs(args))
    if args.scheduler_kwargs:
        scheduler = change_scheduler(scheduler, args.scheduler_kwargs)
    if args.sigmas is not None:
        check_sigmas(scheduler)
    trained = () if args.train_component is None else split_component(args.train_component)
    libraries = [(index.get(name) or [None])[0] for name in trained]
    if "transformers" not in libraries:  # a language model draws tokens and has no scheduler
        stochastic_scheduler(scheduler, args.sde_type, args.log_prob_type)


def check_packages(model: str | DiffusionPipeline, args: Any) -> None:
    """Refuse a named model that needs a missing package, before weights are loaded."""
    given = args.model_init_kwargs or {}
    if isinstance(model, str) and "custom_pipeline" not in given:
        check_processors(read_index(model, args), given)


def check_guider(
    model: str | DiffusionPipeline, pipeline: type[DiffusionPipeline] | None, args: DiffusionGRPOConfig
) -> None:
    """Refuse guidance that cannot be switched off, if the algorithm trains predictions without guidance."""
    if not args.is_renoised:
        return
    if pipeline is not None:
        refuse_unknown_scales(pipeline, args.pipeline_kwargs or {})
    if isinstance(model, DiffusionPipeline):
        guider = getattr(model, "guider", None)
        refuse_guider(type(model).__name__, None if guider is None else type(guider).__name__)
    elif "custom_pipeline" not in (args.model_init_kwargs or {}):
        index = read_index(model, args)
        refuse_guider(str(index.get("_class_name")), (index.get("guider") or [None, None])[1])
