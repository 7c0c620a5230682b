"""Calls of a pipeline without classifier-free guidance, which is no part of what losses on re-noised samples train."""

import inspect
from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

GUIDANCE = ("guidance_scale", "guidance_scale_2", "prior_guidance_scale", "audio_guidance_scale")
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
    """
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    if "true_cfg_scale" in parameters:
        return _drop_negatives(inputs) | {"true_cfg_scale": 1.0}
    configs = [getattr(network, "config", {}) for network in networks]
    if any(config.get(name) for config in configs for name in EMBEDS_GUIDANCE if hasattr(config, "get")):
        return inputs
    off = {name: 1.0 for name in GUIDANCE if name in parameters}
    # a second scale is left to follow the first where it was not given
    off = {name: value for name, value in off.items() if name == "guidance_scale" or name in inputs}
    return (_drop_negatives(inputs) if off else inputs) | off


def _drop_negatives(inputs: dict[str, Any]) -> dict[str, Any]:
    """Leave out negative prompts and embeddings: pipelines warn of them at every call without guidance."""
    return {name: value for name, value in inputs.items() if not name.startswith("negative_")}
