"""Calls of a pipeline without classifier-free guidance, which is no part of what losses on re-noised samples train."""

import inspect
from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from .drivers import UnsupportedPipeline

# scales by the value at which they change nothing; a prior's own guidance is not among them: it makes the condition
OFF = {"guidance_scale": 1.0, "guidance_scale_2": 1.0, "audio_guidance_scale": 1.0, "pag_scale": 0.0}
OFF |= {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0}
EMBEDS_GUIDANCE = ("guidance_embeds", "guidance_embed", "time_cond_proj_dim")  # in the config of a distilled network


def switch_guidance_off(
    pipe: DiffusionPipeline, networks: Sequence[nn.Module], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call that makes the conditional prediction alone.

    Where the network takes the guidance scale as an input (FLUX, HunyuanVideo), that scale stays; `true_cfg_scale` is
    classifier-free guidance under another name.

    Args:
        pipe: the pipeline.
        networks: those that are trained.
        inputs: keyword arguments of its `__call__`.

    Raises:
        UnsupportedPipeline: guidance is a component of the pipeline, which no argument switches off.
    """
    if getattr(pipe, "guider", None) is not None:
        raise UnsupportedPipeline(
            f"{type(pipe).__name__} guides by its component {type(pipe.guider).__name__}, which no argument switches "
            "off, and losses on re-noised samples train the prediction without guidance; use loss_type='grpo'."
        )
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    if "true_cfg_scale" in parameters:
        return _drop_negatives(pipe, inputs) | {"true_cfg_scale": 1.0}
    configs = [getattr(network, "config", {}) for network in networks]
    if any(config.get(name) for config in configs for name in EMBEDS_GUIDANCE if hasattr(config, "get")):
        return inputs
    # a scale that is None unless given follows the first one
    off = {
        name: value
        for name, value in OFF.items()
        if name in parameters and (name in inputs or parameters[name].default is not None)
    }
    return (_drop_negatives(pipe, inputs) if off else inputs) | off


def _drop_negatives(pipe: DiffusionPipeline, inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out negative prompts and embeddings: pipelines warn of them at every call without guidance.

    A pipeline with another inside keeps them: they shape the condition that the inner one makes.
    """
    if any(isinstance(part, DiffusionPipeline) for part in vars(pipe).values()):
        return inputs
    return {name: value for name, value in inputs.items() if not name.startswith("negative_")}
