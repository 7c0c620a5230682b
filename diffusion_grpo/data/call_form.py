"""Find out, once and before the first rollout, how a pipeline takes its inputs, by calling it.

A signature does not show this: given a list of images, one pipeline takes one image per sample, another takes all of
them for one sample, and a third raises an error. Short rollouts, in which one input is changed, tell them apart. The
same calls show whether the chosen steps can be trained.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from ..config.settings import DiffusionGRPOConfig
from ..distributed.collectives import broadcast_bytes, gather_json
from ..media.serialize import pack_values, unpack_values
from ..policy.base import UntrainedStepError
from ..policy.drivers import UnsupportedPipeline
from ..policy.rollout import DenoisingPolicy, Policy, rollout, sample_seed
from .columns import RowError
from .inputs import BATCHED, LISTED, SINGLE, Form, PipelineInputs

logger = logging.getLogger(__name__)
LEAST_SHARE = 1e-2  # limit of the change in other samples, relative to its own; rounding is far below
Result = TypeVar("Result")


class Unfit(Exception):
    """A form in which a pipeline can be called, but with other samples than those meant."""


def call_in_some_form(call: Callable[[str], Result]) -> tuple[Result, Form]:
    """Make a call in the first form that a pipeline takes; return its result and form, or raise its first error."""
    refusals: list[Exception] = []
    for form in (BATCHED, SINGLE, LISTED):
        try:
            result = call(form)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # any error of the pipeline is an answer
            refusals.append(error)
        else:
            return result, Form(form, " ".join(str(refusals[0]).split()).rstrip(".") if refusals else None)
    raise next(error for error in refusals if not isinstance(error, Unfit))


def learn_forms(
    inputs: PipelineInputs,
    policy: Policy,
    rows: list[dict[str, Any]],
    noise_level: float | None,
    args: DiffusionGRPOConfig | None = None,
    accelerator: Accelerator | None = None,
) -> None:
    """Find out, once per set of columns, whether samples can share a call; with `accelerator`, a collective."""
    if policy.draws_tokens:  # such pipelines take a list of prompts
        return
    is_trained, args = args is None, args or inputs.args
    asked: dict[frozenset[str], dict[str, Any]] = {}
    images = {name: value for name, value in inputs.repeated.items() if not isinstance(value, str)}
    for row in rows:
        given = inputs.find_given(row)
        if given not in inputs.forms:
            asked.setdefault(given, images | {name: row[name] for name in row if name in given})
    for given, row in (asked if accelerator is None else _gather_asked(asked, accelerator)).items():
        try:
            inputs.forms[given] = _find_form(inputs, policy, row, noise_level, args, is_trained)
        except (UnsupportedPipeline, UntrainedStepError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # any error of the pipeline
            prompt = f" (prompt {row['prompt']!r})" if isinstance(row.get("prompt"), str) else ""
            raise RowError(
                f"{inputs.pipeline.__name__} fails on a row with {', '.join(sorted(given))}{prompt}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _find_form(
    inputs: PipelineInputs,
    policy: Policy,
    row: dict[str, Any],
    noise_level: float | None,
    args: DiffusionGRPOConfig,
    is_trained: bool,
) -> Form:
    """Find the form by calling the pipeline with one row; warn if it takes samples only one by one."""
    count = args.rollout_call_size
    if count == 1:  # evaluations and updates may have larger calls
        count = min(2, max(args.per_device_train_batch_size, args.eval_batch_size))
    start, stop = args.trainable_steps.start, args.trainable_steps.stop
    last = args.num_inference_steps - 1  # has no noise; only re-noised samples train it
    start = min(start, last - 1)
    drew, policy.draws_globally = policy.draws_globally, False  # draws of rewards and decoders do not count
    try:
        form = find_form(
            policy,
            row,
            inputs.arguments,
            count,
            num_inference_steps=args.num_inference_steps,
            steps=list(range(start, min(start + 2, stop, last))),
            noise_level=noise_level,
        )
    finally:
        inputs.draws_globally |= policy.draws_globally
        policy.draws_globally |= drew
    if inputs.spacing:
        _check_times(inputs, policy)
    if "strength" not in row:  # another row may take more steps
        _check_window(inputs, policy, args)
        _check_networks(inputs, policy, row, form, args, is_trained)
    if form.reason is not None and count > 1:
        logger.warning(
            "%s does not take several samples in one call (%s); they are rolled out and replayed one by one.",
            inputs.pipeline.__name__,
            form.reason,
        )
    return form


def _check_times(inputs: PipelineInputs, policy: Policy) -> None:
    """Refuse `sigmas` if the timesteps that the last call gave the network do not match them."""
    scheduler = policy.scheduler  # GLM-Image and CogView4 set timesteps of their own in addition to the sigmas
    times = scheduler.timesteps.cpu().float() / scheduler.config.num_train_timesteps
    if not torch.allclose(times, scheduler.sigmas[: len(times)].cpu().float(), atol=1e-3):
        raise UnsupportedPipeline(
            f"sigmas: {inputs.pipeline.__name__} passes its network times that it computes itself, which would not "
            "match those of the steps; leave sigmas out."
        )


def _check_window(inputs: PipelineInputs, policy: Policy, args: DiffusionGRPOConfig) -> None:
    """Refuse a window that reaches beyond the steps of the last call; a later rollout would draw such a step."""
    steps, length = args.trainable_steps, policy.loop_length
    if length is not None and steps.stop > length - args.is_recorded:
        raise UnsupportedPipeline(
            f"{inputs.pipeline.__name__} takes {length} of {args.num_inference_steps} steps with these inputs (as "
            f"with a strength below 1), but steps {steps.start} to {steps.stop - 1} may be trained, and the last "
            "one has no noise; set trained_steps, or raise num_inference_steps."
        )


def _check_networks(
    inputs: PipelineInputs,
    policy: Policy,
    row: dict[str, Any],
    form: Form,
    args: DiffusionGRPOConfig,
    is_trained: bool,
) -> None:
    """Refuse networks that no step calls and steps of an expert that is not trained; warn of experts not reached."""
    others = [name for name in policy.component if name not in policy.experts]  # such as a text encoder
    experts = [name for name in policy.component if name in policy.experts] if is_trained else []
    if not (policy.frozen_experts or others or len(experts) > 1):
        return
    passing = policy.find_passing_steps(inputs.arguments([row], form.name), args.num_inference_steps)
    for name in others:
        if not passing[name] - {0}:  # encoding prompts before the loop counts as step 0
            alone = " and ".join(policy.experts) or "another network"
            raise UntrainedStepError(
                f"{name} (train_component) runs in no step of {inputs.pipeline.__name__}'s loop, so it cannot be "
                f"trained; train {alone} alone."
            )
    called = set().union(*passing.values())
    for step in args.trainable_steps:
        if step not in called:
            policy.refuse_step(step, called)
    trained = args.trainable_steps
    if args.takes_gradients:  # through all steps from there on
        trained = range(trained.start, args.num_inference_steps)
    for name in experts:
        if passing[name].isdisjoint(trained):
            logger.warning(
                "%s will not be trained: it runs in %s, and only %s may be trained. Set trained_steps to train it "
                "too, or train_component=%r to spare its memory.",
                name,
                _describe_steps(passing[name]),
                _describe_steps(trained),
                ", ".join(other for other in policy.component if other != name),
            )


def refuse_single(inputs: PipelineInputs, rows: list[dict[str, Any]], loss_type: str) -> None:
    """Refuse rows that cannot share a call with others, for a loss that compares the samples of a prompt."""
    forms = (inputs.forms.get(inputs.find_given(row), Form(BATCHED)) for row in rows)
    single = next((form for form in forms if form.name != BATCHED), None)
    if single is not None:
        raise UnsupportedPipeline(
            f"loss_type={loss_type!r} compares the samples of a prompt within one pipeline call, but "
            f"{inputs.pipeline.__name__} takes one sample per call ({single.reason}); use loss_type='nft' or 'awm'."
        )


def _describe_steps(steps: Collection[int]) -> str:
    if not steps:
        return "no step"
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _gather_asked(
    rows: dict[frozenset[str], dict[str, Any]], accelerator: Accelerator
) -> dict[frozenset[str], dict[str, Any]]:
    """Return a row for each set of columns, that of the first process that asks about it. A collective."""
    gathered: dict[frozenset[str], dict[str, Any]] = {}
    for process, asked in enumerate(gather_json(accelerator, [sorted(given) for given in rows])):
        for given in map(frozenset, asked):
            if given not in gathered:
                packet = pack_values([rows[given]]) if process == accelerator.process_index else None
                (gathered[given],) = unpack_values(broadcast_bytes(accelerator, packet, process))
    return gathered


def find_form(
    policy: DenoisingPolicy,
    row: dict[str, Any],
    arguments: Callable[[list[dict[str, Any]], str], dict[str, Any]],
    count: int,
    **settings: Any,
) -> Form:
    """Find out how the pipeline takes `count` samples, from the first trained steps of a few rollouts."""
    return call_in_some_form(_Probe(policy, row, arguments, count, settings).check)[1]


class _Probe:
    """Short rollouts of one row, as it is and with one input changed."""

    def __init__(
        self, policy: DenoisingPolicy, row: dict[str, Any], arguments: Callable, count: int, settings: dict[str, Any]
    ):
        self.policy, self.row, self.arguments, self.count = policy, row, arguments, count
        self.steps = settings.pop("steps")
        self.settings = settings
        # prompts that are encoded one by one and kept cannot affect each other, and there are no other texts to try
        tried = {k: v for k, v in row.items() if not (policy.prompts.kept is not None and "prompt" in k)}
        self.changed = {name: other for name, value in tried.items() if (other := _change(value)) is not None}

    def check(self, form: str) -> None:
        """Raise an error if samples cannot be given in this form."""
        plain, idle = self.latents(form), []
        if form != BATCHED:
            return
        for name in self.changed:
            moved = (self.latents(form, name) - plain).abs().amax(1)
            last, others = moved[-1], moved[:-1].max() if self.count > 1 else 0.0
            # texts may change other samples, because they are padded to the longest one
            if not _is_text(self.row[name]) and others > LEAST_SHARE * last:
                raise Unfit(f"in a batch, '{name}' of one sample changes other samples")
            if last == 0 and self.count > 1:
                idle.append(name)
        # an input without an effect on a single sample either is really ignored by the pipeline
        if lost := next(filter(self.matters_alone, idle), None):
            raise Unfit(f"in a batch, '{lost}' of the last sample is not used")

    def matters_alone(self, name: str) -> bool:
        """Return whether an input affects a single sample, in a form that the pipeline takes."""
        try:
            form, plain = SINGLE, self.latents(SINGLE)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:  # the pipeline does not take this form
            form, plain = LISTED, self.latents(LISTED)
        return not torch.equal(self.latents(form, name), plain)

    def latents(self, form: str, change: str | None = None) -> Tensor:
        """Return (batch, elements) latents after the steps; `change` names an input of the last sample to change."""
        self.policy.prompts.clear()
        rows = [self.row] * (self.count if form == BATCHED else 1)
        if change is not None:
            rows[-1] = self.row | {change: self.changed[change]}
        # a single sample has the last one's: with another, a prompt may change tokens that it does not change there
        seeds = [sample_seed("batching", place) for place in range(self.count)][-len(rows) :]
        arguments = self.arguments(rows, form)
        steps = [self.steps] * len(rows)
        _, trajectory = rollout(self.policy, arguments, seeds=seeds, steps=steps, is_complete=False, **self.settings)
        self.policy.prompts.clear()
        return trajectory.next_latents.flatten(1)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, list) and all(isinstance(item, str) for item in value)


def _change(value: Any) -> Any:
    """Return another value of the same kind and shape, different everywhere; None if there is none."""
    if isinstance(value, str):
        return f"no {value}"  # at the start, since long prompts are cut off at the end
    if isinstance(value, Image.Image):
        image = value.convert("RGB") if value.mode == "P" else value
        array = np.asarray(image)
        return Image.fromarray(~array if array.dtype == bool else np.subtract(255, array, dtype=array.dtype))
    if torch.is_tensor(value) or isinstance(value, np.ndarray):
        return ~value if value.dtype in (torch.bool, np.bool_) else 1 - value
    if isinstance(value, (list, tuple)) and len(value):
        items = [_change(item) for item in value]
        return None if any(item is None for item in items) else type(value)(items)
    return None  # numbers count as settings of a call
