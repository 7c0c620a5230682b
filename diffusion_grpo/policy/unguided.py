"""Calls of a pipeline without classifier-free guidance, as losses on re-noised samples need them."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import DiffusionPipeline, FlowMapEulerDiscreteScheduler
from torch import nn

from . import modular
from .drivers import UnsupportedPipeline

# values at which scales have no effect; a prior's own guidance is not included, because it makes the condition
OFF = {"guidance_scale": 1.0, "guidance_scale_2": 1.0, "audio_guidance_scale": 1.0, "true_cfg_scale": 1.0}
OFF |= {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0}  # for the first and the last frame
OFF |= {"image_guidance_scale": 1.0, "img_guidance_scale": 1.0}  # for calls with and without the image
OFF |= {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0}
OFF |= {"pag_scale": 0.0, "sag_scale": 0.0}
ADDS_GUIDANCE = ("ZImage", "Krea2")  # cond + guidance_scale * (cond - uncond): no effect at 0
# of a condition; an input of the network; without effect unless guidance_scale acts
STAYS = ("prior_guidance_scale", "distilled_guidance_scale", "skip_layer_guidance_scale")
SCALE = re.compile(r"(.+_)?(guidance|cfg)_(scale|schedule|amount|weight)(_\w+)?")  # names that look like guidance


def switch_guidance_off(
    pipe: DiffusionPipeline, networks: Sequence[nn.Module], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call that makes only the conditional prediction."""
    guider = None if hasattr(pipe, "guidance_scales") else getattr(pipe, "guider", None)
    refuse_guider(type(pipe).__name__, None if guider is None else type(guider).__name__)
    is_map = isinstance(getattr(pipe, "scheduler", None), FlowMapEulerDiscreteScheduler)
    if is_map or any(getattr(getattr(network, "config", None), "flow_map", False) for network in networks):
        raise UnsupportedPipeline(
            f"The network of {type(pipe).__name__} is a flow map, which predicts the jump to the next step and no "
            "clean sample, but losses on re-noised samples train that; use loss_type='grpo'."
        )
    refuse_unknown_scales(type(pipe), inputs)
    used = _list_used(type(pipe), inputs)
    scales = OFF | ({"guidance_scale": 0.0} if _adds_guidance(pipe) else {})
    if any(_embeds_guidance(pipe, network) for network in networks):
        del scales["guidance_scale"]  # an input of the network (FLUX, HunyuanVideo), which keeps its value
    off = {name: value for name, value in scales.items() if name in used}
    off |= dict.fromkeys(getattr(pipe, "guidance_scales", ()), modular.OFF)
    return (_drop_negatives(pipe, inputs) if off else inputs) | off


def find_guidance_argument(pipe: DiffusionPipeline, networks: Sequence[nn.Module]) -> str:
    """Return the name of the argument that sets how strongly a pipeline's call is guided.

    It is `true_cfg_scale` if the pipeline has it and the network does not take `guidance_scale` as an input
    (Qwen-Image, FLUX.1 schnell): such a pipeline ignores `guidance_scale`.
    """
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    configs = [getattr(network, "config", None) for network in (*networks, *pipe.components.values())]
    ignores = any(hasattr(config, "get") and config.get("guidance_embeds") is False for config in configs)
    if "true_cfg_scale" in parameters and (ignores or "guidance_scale" not in parameters):
        return "true_cfg_scale"
    if "guidance_scale" in parameters:
        return "guidance_scale"
    raise UnsupportedPipeline(f"{type(pipe).__name__} takes neither guidance_scale nor true_cfg_scale.")


def find_default_guidance(pipe: DiffusionPipeline, networks: Sequence[nn.Module]) -> float | None:
    """Return the default of a pipeline's `guidance_scale` if it means classifier-free guidance; otherwise None."""
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    default = parameters["guidance_scale"].default if "guidance_scale" in parameters else None
    if not isinstance(default, (int, float)):
        return None
    off = switch_guidance_off(pipe, networks, {"guidance_scale": default})["guidance_scale"]
    off = 1.0 if off == modular.OFF else off
    return float(default) if default > off else None


def _adds_guidance(pipe: DiffusionPipeline) -> bool:
    return any(base.__name__.startswith(ADDS_GUIDANCE) for base in type(pipe).__mro__)


def _embeds_guidance(pipe: DiffusionPipeline, network: nn.Module) -> bool:
    config, names = getattr(network, "config", None), ["guidance_embeds", "guidance_embed"]
    if hasattr(pipe, "get_guidance_scale_embedding"):  # otherwise it may embed another number, such as a noise level
        names.append("time_cond_proj_dim")
    return hasattr(config, "get") and any(config.get(name) for name in names)


def _list_used(pipeline: type[DiffusionPipeline], inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of all arguments with a value in a call; scales without one follow the first scale."""
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    return [name for name in parameters if inputs.get(name, parameters[name].default) is not None]


def refuse_unknown_scales(pipeline: type[DiffusionPipeline], inputs: Mapping[str, Any]) -> None:
    """Refuse a pipeline with a guidance scale for which no value is known that switches it off."""
    unknown = [name for name in _list_used(pipeline, inputs) if SCALE.fullmatch(name) and name not in (*OFF, *STAYS)]
    if unknown:
        raise UnsupportedPipeline(
            f"{pipeline.__name__} also applies guidance through {', '.join(unknown)}, which no known value switches "
            "off, but losses on re-noised samples train the prediction without guidance; use loss_type='grpo'."
        )


def refuse_guider(pipeline: str, guider: str | None) -> None:
    """Refuse a pipeline that is guided by a component."""
    if guider is not None:
        raise UnsupportedPipeline(
            f"{pipeline} applies guidance through its component {guider}, which no argument switches off, but losses "
            "on re-noised samples train the prediction without guidance; use loss_type='grpo'."
        )


def _drop_negatives(pipe: DiffusionPipeline, inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out negative prompts and embeddings, about which pipelines warn in every call without guidance."""
    if any(isinstance(part, DiffusionPipeline) for part in vars(pipe).values()):
        return inputs  # an inner pipeline uses them to make the condition
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty]  # Kandinsky 2.2 requires them
    return {name: value for name, value in inputs.items() if not name.startswith("negative_") or name in needed}
