"""A learning rate that regulates itself: every update changes the policy's predictions by the same target."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..algorithms.batch import MicroBatch
from ..distributed.backend import DistributedBackend
from ..rollout.runtime import Metrics

START = 1e-3  # share of the learning rate at which the first update is made: a first step too large is not made good
GROWTH = 32.0  # of the rate from one update to the next, at most: a change far below the target measures badly
MEMORY = 5  # measurements whose median counts, since single ones may be several times as large as their neighbours
NAME = "StepSize"  # in trainer_state.json


class StepSize(TrainerCallback):
    """Scales the learning rate so that an update changes predictions by `change / sqrt(updates of the run)`.

    Before and after each update, the network predicts for the update's first micro-batch. The change of these
    predictions, relative to their size, divided by the learning rate is the gain of the update. The next rate is the
    target divided by the last gain or by the median of the last gains, whichever is larger, and never exceeds the
    learning rate of the settings. Schedules and warm-up multiply it: the optimizer has the scaled rate only while it
    steps. Predictions that a rollout recorded would save a pass, but only its first update starts from them, and half
    precision needs a second one beside each.
    """

    def __init__(
        self,
        change: float,
        predict: Callable[[MicroBatch], list[tuple[Tensor, Tensor]]],
        backend: DistributedBackend,
        metrics: Metrics,
    ):
        self._change, self._predict, self._backend, self.metrics = change, predict, backend, metrics
        self._hooks: list[Any] = []
        self._state: dict[str, Any] = {"rate": None, "gains": []}
        self.scale = START
        self.has_gradient = True  # else the next update is no measurement

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the rate of an optimizer while it steps."""
        if not self._hooks:  # before there is a schedule, which may begin at 0
            self._limit = float(optimizer.param_groups[0]["lr"])
        for hook in self._hooks:  # Trainer prepares an optimizer more than once
            hook.remove()
        self._hooks = [
            optimizer.register_step_pre_hook(self._scale_rates),
            optimizer.register_step_post_hook(self._restore_rates),
        ]

    def watch(self, batch: MicroBatch) -> None:
        """Predict for a micro-batch before the update that begins with it."""
        self._batch, self._before, self._used = batch, self._predict(batch), 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if not self._hooks:
            raise ValueError(
                "target_change scales the learning rate of an optimizer that the trainer makes; leave the optimizer "
                "out of the DeepSpeed configuration, and set optim, or leave target_change out."
            )
        # a part of trainer_state.json, and so of checkpoints
        self._state = state.stateful_callbacks.setdefault(NAME, {"rate": None, "gains": []})

    def on_step_end(self, args, state, control, **kwargs):
        if not self._used or not self.has_gradient:  # skipped (fp16), at a rate of 0, or by momentum
            return
        with self.metrics.time("time/update"):
            change = self._measure()
        self.metrics.add("prediction/change", change)
        rates, gains = [GROWTH * self._state["rate"]], self._state["gains"]
        if change > 0:  # else it is lost in rounding, and too small
            gains[:] = [*gains, change / self._used][-MEMORY:]
            rates.append(self._change / state.max_steps**0.5 / max(gains[-1], statistics.median(gains)))
        self._state["rate"] = min(rates)

    def _measure(self) -> float:
        """Return the root mean square of the change of the predictions, relative to their size, on all processes.

        Half precision rounds each prediction by about as much as an update changes it. The product of the changes of
        two nearby predictions, which are rounded independently, is that of the true changes on average.
        """
        sums = torch.zeros(2, device=self._backend.accelerator.device)
        for before, after in zip(self._before, self._predict(self._batch), strict=True):
            changes = [new - old for new, old in zip(after, before, strict=True)]
            sums += torch.stack([(changes[0] * changes[1]).sum(), (before[0] * before[1]).sum()]).to(sums)
        product, size = self._backend.gather(sums[None]).sum(0).tolist()
        return math.sqrt(max(product, 0.0) / size)

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        groups = optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        rate = self._limit * START if self._state["rate"] is None else min(self._state["rate"], self._limit)
        self._state["rate"], self.scale = rate, rate / self._limit if self._limit else 0.0
        for group in groups:
            group["lr"] = group["lr"] * self.scale
        self._used = float(groups[0]["lr"])

    def _restore_rates(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
