"""The passes of a micro-batch, forward and backward, of the policy and the value model, without the optimizer.

A loss or gradient that is NaN or infinite stops the run before the weights move.
"""

import dataclasses
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import get_last_checkpoint

from ..algorithms.batch import MicroBatch, Part
from ..config.settings import DiffusionGRPOConfig
from ..policy.base import Policy
from ..rollout.runtime import Runtime
from ..rollout.value_model import ValueTargets
from .learner import Learner

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite.

    Examples:
        >>> refuse_non_finite(torch.tensor(float("nan")), "loss", update=3, output_dir=folder)
        Traceback (most recent call last):
        NonFiniteError: The loss of update 3 is nan. ...
    """


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a micro-batch in its update."""

    update: int
    count: int
    is_first: bool
    is_last: bool


class PolicyUpdate:
    """Training of the policy, and of the value model if there is one, on micro-batches."""

    def __init__(self, args: DiffusionGRPOConfig, learner: Learner, policy: Policy, runtime: Runtime):
        self._args, self._algorithm, self._policy, self._reference = args, learner.algorithm, policy, learner.reference
        self._weights, self._values = learner.weights, learner.values
        self._backend, self._monitor = runtime.backend, runtime.monitor
        self._metrics, self._progress = runtime.metrics, runtime.progress

    def train_policy(self, model: nn.Module, batch: MicroBatch, place: Place) -> Tensor:
        """Make one forward and one backward pass per part and trained step.

        Each loss is a sum over samples, divided by the trained steps of the whole micro-batch: every sample has the
        same weight, however the samples are split into parts.
        """
        backend, outputs = self._backend, []

        def compute(part: Any, step: int) -> Tensor:
            outputs.append(self._algorithm.loss(self._policy, self._reference, part, step))
            if not outputs[-1].loss.requires_grad:
                self._policy.refuse_step(step)
            return outputs[-1].loss

        total = torch.zeros((), device=self._args.device)
        passes = [one for turn in self._algorithm.passes(batch) for one in backend.equalize(turn, in_update=True)]
        if place.is_first or self._progress.stage != "training":
            self._progress.begin("training", len(passes) * place.count)
        for number, ((part, step), counts) in enumerate(passes, start=1):
            is_last = number == len(passes)
            with backend.accumulate(model, is_last):
                loss = backend.forward(model, compute, part, step)
                loss = loss * counts / (batch.num_trained_steps * place.count)
                if (is_last or self._monitor.is_alone) and self._weights.leave_some_without_gradient:
                    loss = loss + self._weights.zero()  # a single process may use DDP too
                if counts:
                    for name, value in outputs[-1].metrics.items():
                        self._metrics.add(name, value, outputs[-1].counts.get(name, count_measured(part, name)))
                self._monitor.defer(refuse_non_finite, loss.detach(), "loss", place.update, self._args.output_dir)
                if is_last:
                    drift = max((output.drift for output in outputs), key=lambda drift: (math.isnan(drift), drift))
                    self._metrics.add_all(self._monitor.defer(self._algorithm.check, batch, drift) or {})
                    if place.is_last:  # before the weights move
                        self._monitor.agree()
                backend.backward(loss * backend.groups.size)  # DDP averages; a context group needs the sum
            self._progress.advance()
            total += loss.detach()
            if place.is_first and number == 1:
                drift, logged = outputs[0].drift, outputs[0].metrics
                logger.debug("RL_METRIC: update %d, first pass: ratio off by %.3g, %s", place.update, drift, logged)
        return total

    def train_values(self, targets: ValueTargets, place: Place) -> None:
        """Make one forward and backward pass of the value model, which shares nothing with the policy."""
        loss = self._values.loss(targets, self._args.value_clip)
        self._monitor.defer(refuse_non_finite, loss.detach(), "value loss", place.update, self._args.output_dir)
        (loss / place.count).backward()  # in float32, and by no engine
        self._metrics.add("value/loss", loss.item())


def count_measured(part: Part, name: str) -> int:
    """Return the number of samples over which a metric of a pass is averaged; parts may differ in size."""
    # samples whose weight is 0 count only in the terms of the loss and in the size of its gradient
    if part.weights is None or name.startswith(("loss/", "grad_size/")):
        return len(part)
    return int((part.weights > 0).sum())


def refuse_non_finite(value: Tensor, name: str, update: int, output_dir: str) -> None:
    if torch.isfinite(value).all():
        return
    last = get_last_checkpoint(output_dir)
    raise NonFiniteError(
        f"The {name} of update {update} is {value.item()}. Newest complete checkpoint: {last or 'none'}. Try a lower "
        "learning rate, or float32."
    )
