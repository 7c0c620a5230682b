"""Modular pipelines as policies: a `ModularPipeline` gets the interface of a `DiffusionPipeline`.

What a modular pipeline does is written in blocks. They give the parameters of its call and its samples; a component,
the guider, applies guidance, and text encoders run in blocks of their own. With `as_pipeline` the same object also has
what policies ask of a pipeline: a call whose signature lists the inputs, gradients in the undecorated call, and
`encode_prompt`. There is no code for single families. `ask_for_latents` serves both kinds of pipeline.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.guiders import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import ModularPipelineBlocks, PipelineState
from torch import nn
from transformers import PreTrainedModel

from ..media.samples import SOUND_FIELDS
from .drivers import UnsupportedPipeline
from .networks import replace_attribute

SAMPLES = ("images", "image", "videos", "video", "frames", "audio", "sound", "audios")  # the first is what is scored
GUIDER, OFF = "guider", "off"  # what names of guiders contain; the scale that leaves one pass
LOG = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")


def as_pipeline(pipe: Any) -> Any:
    """Give a modular pipeline the interface of a `DiffusionPipeline`, in place; anything else is returned as it is.

    Its own interface stays: it can be called, saved and changed as before.

    Args:
        pipe: any pipeline.

    Raises:
        UnsupportedPipeline: no block makes a sample, or a guider is missing.

    Examples:
        >>> pipe = as_pipeline(modular_pipe)
        >>> isinstance(pipe, DiffusionPipeline), isinstance(pipe, ModularPipeline)
        (True, True)
    """
    if not isinstance(pipe, ModularPipeline) or isinstance(pipe, DiffusionPipeline):
        return pipe
    pipe._blocks = pipe.blocks  # a copy: blocks of diffusers' own classes share their parts
    leaves = [leaf for leaf in _list_blocks(pipe._blocks) if not leaf.sub_blocks]
    made = {each.name for leaf in leaves for each in leaf.intermediate_outputs}
    samples = [name for name in SAMPLES if name in made]
    if not samples:
        raise UnsupportedPipeline(
            f"The blocks of {type(pipe).__name__} make none of {', '.join(SAMPLES)}, so there is no sample to score; "
            "name the output of the last block accordingly."
        )
    guiders = {name: part for name, part in pipe.components.items() if GUIDER in name}
    if missing := [name for name, part in guiders.items() if part is None]:
        raise UnsupportedPipeline(
            f"{type(pipe).__name__} has no {missing[0]}, which its blocks call in each step; set one with "
            f"pipe.update_components({missing[0]}=ClassifierFreeGuidance(...))."
        )
    encoders = [leaf for leaf in leaves if _encodes_prompts(leaf)]
    for block in _list_blocks(pipe._blocks):
        block.__class__ = _undecorated(type(block), block in encoders)
    names = {each.name for each in pipe._blocks.inputs}
    scales = {_name_scale(name, names): name for name in guiders}
    parameters = _list_parameters(pipe._blocks, made)
    for scale, name in scales.items():
        is_guiding = _copy(guiders[name]).num_conditions > 1
        parameters[scale] = _parameter(scale, getattr(guiders[name], "guidance_scale", None) if is_guiding else None)
    namespace = _describe(type(pipe), list(parameters.values()), encoders)
    sounds = [name for name in SOUND_FIELDS if name in samples[1:]]
    namespace |= {"sample_outputs": [samples[0], *sounds], "guidance_scales": scales}
    namespace |= {"model_cpu_offload_seq": _order_parts(leaves)}
    pipe.__class__ = type(type(pipe).__name__, (_Adapted, type(pipe), DiffusionPipeline), namespace)
    if pipe._pretrained_model_name_or_path is not None:
        pipe.register_to_config(_name_or_path=str(pipe._pretrained_model_name_or_path))
    return pipe


def ask_for_latents(pipe: DiffusionPipeline) -> dict[str, Any]:
    """Return the arguments with which a pipeline returns the latents of its last step, if it ever does."""
    if isinstance(pipe, ModularPipeline):
        made = {each.name for block in _list_blocks(pipe._blocks) for each in block.intermediate_outputs}
        return {"output": ["latents"]} if "latents" in made else {}
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    return {"output_type": "latent"} if "output_type" in parameters else {}


class _Adapted:
    """What `as_pipeline` adds to a pipeline's class."""

    __setattr__ = object.__setattr__  # that of a DiffusionPipeline would write its own form into the configuration

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save as a modular pipeline does, to a folder given in any form."""
        super().save_pretrained(str(save_directory), **{"overwrite_modular_index": True} | kwargs)

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Set the progress bars of all loops."""
        self._progress_bar_config = kwargs

    @contextlib.contextmanager
    def _guided(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Set fresh guiders with the scales of a call, and yield its other inputs."""
        with contextlib.ExitStack() as stack:
            own = {name: _copy(part) for name, part in self.components.items() if isinstance(part, BaseGuidance)}
            guiders = {name: copy.copy(part) for name, part in own.items()}
            for name, guider in guiders.items():
                own[name].enable()  # encoders always make what guidance needs, so one result serves all calls
                stack.enter_context(replace_attribute(self, name, guider))
            stack.enter_context(replace_attribute(self, "own_guiders", own))
            for scale, name in self.guidance_scales.items():
                value = inputs.pop(scale, None)
                if own[name].num_conditions == 1:
                    own[name].guidance_scale = 2.0  # any that guides: the encoders are not told the call's
                if value == OFF:
                    guiders[name].disable()
                elif value is not None:
                    guiders[name].guidance_scale = value
                    guiders[name].enable()
            try:
                yield inputs
            finally:
                for name, guider in guiders.items():
                    _refuse_state(name, guider)


def _run(call: Callable, self: Any, state: PipelineState | None = None, output: Any = None, **inputs: Any) -> Any:
    """Make a modular pipeline's own call, with gradients if torch's grad mode is on."""
    bar = getattr(self, "_progress_bar_config", {})
    with contextlib.ExitStack() as stack:
        inputs = stack.enter_context(self._guided(inputs))
        stack.enter_context(replace_attribute(LOG, "disabled", True))  # errors are raised, and most end a replay
        for block in _list_blocks(self._blocks):
            stack.enter_context(replace_attribute(block, "_progress_bar_config", bar))
        stack.enter_context(replace_attribute(self._blocks, "has_gradient", torch.is_grad_enabled()))
        return call(self, state, output, **inputs)


def _encode_prompt(self: Any, step: int, **inputs: Any) -> Any:
    """Run one of the blocks that encode prompts, with the pipeline's own guiders: some fail in calls of one pass."""
    block, state = self.prompt_encoders[step], PipelineState()
    for each in block.inputs:
        state.set(each.name, inputs.get(each.name), each.kwargs_type)
    with contextlib.ExitStack() as stack:
        for name, guider in self.__dict__.get("own_guiders", {}).items():
            stack.enter_context(replace_attribute(self, name, guider))
        block.encode(self, state)
    return tuple(state.get(each.name) for each in block.intermediate_outputs)


def _describe(base: type, parameters: list[inspect.Parameter], encoders: list[Any]) -> dict[str, Any]:
    """Return the attributes of a pipeline's class that depend on its blocks."""
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def call(self, *args, **kwargs):
        return _run(base.__call__, self, *args, **kwargs)

    call.__signature__ = inspect.Signature([self, *parameters])
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__call__": torch.no_grad()(call)}
    if not encoders:
        return namespace
    for step, block in enumerate(encoders):
        block.step = step

    def encode_prompt(self, **inputs):
        return _encode_prompt(self, **inputs)

    # conditions of some workflows only, such as images, go into kwargs
    shared = {each.name: _parameter(each.name, None) for block in encoders for each in block.inputs}
    own = [set(block.input_names) for block in encoders]
    names = [name for name in shared if "image" not in name or all(name in each for each in own)]
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    known = [_parameter("step", None), *(shared[name] for name in names), rest]
    encode_prompt.__signature__ = inspect.Signature([self, *known])
    return namespace | {"encode_prompt": encode_prompt, "prompt_encoders": property(_find_encoders)}


def _find_encoders(pipe: Any) -> list[Any]:
    return [block for block in _list_blocks(pipe._blocks) if hasattr(block, "step")]


def _list_blocks(block: Any) -> Iterator[Any]:
    """Yield a block and all blocks in it."""
    yield block
    for part in block.sub_blocks.values():
        yield from _list_blocks(part)


def _encodes_prompts(block: Any) -> bool:
    """Return whether a block runs a text model on the prompt; one that draws noise must run in every call."""
    kinds = [each.type_hint for each in block.expected_components]
    has_model = any(isinstance(kind, type) and issubclass(kind, PreTrainedModel) for kind in kinds)
    return has_model and "prompt" in block.input_names and "generator" not in block.input_names


@functools.cache
def _undecorated(base: type[ModularPipelineBlocks], encodes: bool) -> type[ModularPipelineBlocks]:
    """Return a block's class without the `torch.no_grad` around its call; encoders of prompts ask `encode_prompt`."""
    run = inspect.unwrap(base.__call__)

    @functools.wraps(run)
    def call(self, *args, **kwargs):
        mode = self.__dict__.get("has_gradient")  # of the outermost block, inside diffusers' own no_grad
        with contextlib.nullcontext() if mode is None else torch.set_grad_enabled(mode):
            return run(self, *args, **kwargs)

    def ask(self, components, state):
        names = [each.name for each in self.intermediate_outputs]
        parts = [getattr(components, each.name, None) for each in self.expected_components]
        if not any(part is not None for part in parts) and set(names) <= set(self.input_names):
            return components, state  # it rewrites prompts with a model that was left out
        inputs = {each.name: state.get(each.name) for each in self.inputs}
        results = components.encode_prompt(step=self.step, **inputs)
        for each, result in zip(self.intermediate_outputs, results, strict=True):
            state.set(each.name, result, each.kwargs_type)
        return components, state

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__call__": ask if encodes else call,
    }
    return type(base.__name__, (base,), namespace | ({"encode": run} if encodes else {}))


def _parameter(name: str, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)


def _list_parameters(blocks: Any, made: set[str]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a call; what an earlier block makes is not required, whatever a later one says."""
    found = {}
    for each in blocks.inputs:
        if each.name is not None:
            is_required = each.required and each.default is None and each.name not in made
            found[each.name] = _parameter(each.name, inspect.Parameter.empty if is_required else each.default)
    return found


def _name_scale(guider: str, inputs: set[str]) -> str:
    """Return the name of a guider's scale as a parameter: as in classic pipelines, and not that of another input."""
    name = guider.replace(GUIDER, "guidance_scale")
    return name if name not in inputs else name.replace("guidance_scale", "true_cfg_scale")


def _order_parts(leaves: list[Any]) -> str:
    """Return the names of the networks in the order of their last use, in the form of `model_cpu_offload_seq`."""
    used = itertools.chain.from_iterable(leaf.expected_components for leaf in leaves)  # they may be loaded later
    networks = [
        each.name for each in used if isinstance(each.type_hint, type) and issubclass(each.type_hint, nn.Module)
    ]
    return "->".join(reversed(dict.fromkeys(reversed(networks))))


def _copy(guider: BaseGuidance) -> BaseGuidance:
    """Copy a guider, before its first step: the last step of another call must not decide whether it guides."""
    copied = copy.copy(guider)
    copied.set_state(None, None, None)
    return copied


def _refuse_state(name: str, guider: BaseGuidance) -> None:
    """Refuse a guider that remembers tensors of earlier steps, which a replay of one step does not have."""
    for key, value in vars(guider).items():
        if not torch.is_tensor(value) and any(map(torch.is_tensor, getattr(value, "__dict__", {}).values())):
            raise UnsupportedPipeline(
                f"The {name}, {type(guider).__name__}, carries its {key} from step to step, so a step cannot be "
                "replayed alone; set its momentum to None, or use another guider."
            )
