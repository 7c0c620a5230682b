"""Find out by short rollouts, before the first real one, whether a pipeline takes several samples in one call.

A signature does not show this: given a list of images, one pipeline takes one image per sample, another takes all of
them for one sample, and a third raises an error.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .rollout import DenoisingPolicy, rollout, sample_seed

BATCHED, SINGLE, LISTED = (
    "batched",
    "single",
    "listed",
)  # lists with all samples; one sample as it is; one sample in lists
LEAST_SHARE = 1e-2  # limit of the change in other samples, relative to its own; rounding is far below


@dataclasses.dataclass
class Form:
    """The form in which the inputs of a call are given.

    Attributes:
        name: `batched` for lists with one value per sample; `single` for one sample with its values as they are;
            `listed` for one sample with each value in a list.
        reason: why several samples cannot share a call; None if they can.
    """

    name: str
    reason: str | None = None


def find_form(
    policy: DenoisingPolicy,
    row: dict[str, Any],
    arguments: Callable[[list[dict[str, Any]], str], dict[str, Any]],
    count: int,
    **settings: Any,
) -> Form:
    """Find out how the pipeline takes `count` samples, from the first trained steps of a few rollouts.

    A batch is correct if a change to one input of its last sample changes the latents of that sample and of no other.
    Prompts may change other samples too, because they are padded to the longest one. If a change has no effect in the
    batch, it must not have an effect on a single sample either: then the pipeline really ignores the input.

    Args:
        policy: policy of the pipeline.
        row: the columns of a dataset row that the pipeline is given.
        arguments: function from rows and the name of a form to keyword arguments of the call.
        count: number of samples per call, if it takes several.
        settings: arguments of [`~diffusion_grpo.policy.rollout.rollout`]: `num_inference_steps`, `noise_level` and, as
            `steps`, the steps of one sample.

    Raises:
        Exception: the error of the pipeline, if it takes the row in no form, or if it takes the row in one form but
            fails if a value of it is changed.
    """
    probe = _Probe(policy, row, arguments, count, settings)
    refusals: list[str | Exception] = []
    for form in (BATCHED, SINGLE, LISTED):
        try:
            reason = probe.why_not(form)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of the pipeline counts as an answer
            reason = error
        else:
            reason = reason or probe.what_is_lost()
        if reason is None:
            return Form(form, " ".join(str(refusals[0]).split()).rstrip(".") if refusals else None)
        refusals.append(reason)
    raise next(reason for reason in refusals if isinstance(reason, Exception))


class _Probe:
    """Short rollouts of one row, as it is and with one input changed."""

    def __init__(
        self, policy: DenoisingPolicy, row: dict[str, Any], arguments: Callable, count: int, settings: dict[str, Any]
    ):
        self.policy, self.row, self.arguments, self.count = policy, row, arguments, count
        self.steps = settings.pop("steps")
        self.settings = settings
        # prompts that are encoded one by one and kept cannot affect each other, and there are no other texts to try
        tried = {k: v for k, v in row.items() if not (policy.prompts.keeps_prompts and "prompt" in k)}
        self.changed = {name: other for name, value in tried.items() if (other := _change(value)) is not None}
        self.idle: list[str] = []  # inputs without effect on the last sample of a batch

    def why_not(self, form: str) -> str | None:
        """Return why samples cannot be given in this form; None if they can.

        Raises:
            Exception: the error of the pipeline.
        """
        self.idle, plain = [], self.latents(form)
        for name in self.changed if form == BATCHED else ():
            moved = (self.latents(form, name) - plain).abs().amax(1)
            own, others = moved[-1], moved[:-1].max() if self.count > 1 else 0.0
            if not _is_text(self.row[name]) and others > LEAST_SHARE * own:
                return f"in a batch, '{name}' of one sample changes other samples"
            if own == 0 and self.count > 1:
                self.idle.append(name)
        return None

    def what_is_lost(self) -> str | None:
        """Describe an input that is ignored in a batch but not for a single sample; return None if there is none.

        Raises:
            Exception: the error of the pipeline.
        """
        lost = next((name for name in self.idle if self.matters_alone(name)), None)
        return lost and f"in a batch, '{lost}' of the last sample is not used"

    def matters_alone(self, name: str) -> bool:
        """Return whether an input affects a single sample, in a form that the pipeline takes.

        Raises:
            Exception: the error of the pipeline, if it takes neither `single` nor `listed`, or if it fails on the
                changed row in the form that it takes.
        """
        try:
            form, plain = SINGLE, self.latents(SINGLE)
        except torch.OutOfMemoryError:
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
        seeds = [sample_seed("batching", place) for place in range(len(rows))]
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
