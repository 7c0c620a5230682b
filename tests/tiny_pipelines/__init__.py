"""Tiny random pipelines of the real diffusers classes: a name enters, a pipeline and the inputs of a call leave.

One package for all tests, because what is promised is promised for diffusers' own classes: networks, text encoders,
tokenizers and schedulers are the real ones with the configuration the real model ships, only small. Nothing is
downloaded. Every weight of the network is random, none is zero, so that outputs are of order one, prompts matter, and
a gradient or a ratio that comes out right does not do so by chance.
"""

import contextlib
import inspect
from collections.abc import Iterator

import torch
from diffusers import DiffusionPipeline

from diffusion_grpo.policy.modular import as_pipeline

from . import basic, conditioned, glm, large, modular, more, physical, sound
from .basic import clip_tokenizer, randomize

__all__ = [
    "EVERY",
    "MODULAR",
    "PIPELINES",
    "PROMPTS",
    "build",
    "clip_tokenizer",
    "of_every_prompt",
    "on_equal_terms",
    "policy",
    "randomize",
]

PROMPTS = ['the word "RAIN" in red', "a cat"]  # of different lengths, so that padding plays its part
PIPELINES = basic.PIPELINES  # the plain ones
GROUPS = (basic, conditioned, more, large, physical, sound, glm)
EVERY = {name: pipeline for group in GROUPS for name, pipeline in group.PIPELINES.items()}
MODULAR = modular.PIPELINES


def build(name: str, seed: int = 0) -> tuple[DiffusionPipeline, dict]:
    """Builds the pipeline `name` of `EVERY` or `MODULAR` in less than a second.

    Returns:
        The pipeline, on the CPU in float32 and in eval mode, and keyword arguments of its `__call__` for two samples:
        prompts as strings, sizes, and real guidance where the pipeline has it, but neither the number of steps nor the
        kind of output. The same seed gives the same weights; torch's global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe, inputs = (EVERY | MODULAR)[name]()
        pipe = as_pipeline(pipe)
        randomize(policy(pipe))
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    pipe.set_progress_bar_config(disable=True)
    if "prompt" in inspect.signature(type(pipe).__call__).parameters:
        inputs = {"prompt": list(PROMPTS), **inputs}
    return pipe, inputs


def of_every_prompt(inputs: dict) -> dict:
    """These inputs of a call as `pipeline_kwargs` of a run, which has one negative prompt where a call lists two."""
    texts = {key: value[0] for key, value in inputs.items() if isinstance(value, list) and isinstance(value[0], str)}
    return inputs | texts


@contextlib.contextmanager
def on_equal_terms(pipe: DiffusionPipeline) -> Iterator[None]:
    """Have every weight of a pipeline frozen and aligned in memory inside, so that equal weights give equal bits.

    Some CPUs compute with other kernels where a convolution's weights need a gradient, or where weights that were read
    from a file do not begin at a multiple of 64 bytes.
    """
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    tensors = {id(x): x for part in parts for x in (*part.parameters(), *part.buffers())}.values()
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in tensors:
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    for tensor in trained:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in trained:
            tensor.requires_grad_(True)


def policy(pipe: DiffusionPipeline) -> torch.nn.Module:
    """The network that denoises."""
    names = ("transformer", "unet", "prior")
    return next(pipe.components[name] for name in names if pipe.components.get(name) is not None)
