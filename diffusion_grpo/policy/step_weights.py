"""Weights of the policy term per recorded step, which make steps with different noise count equally.

The policy gradient of a step is proportional to |J| / std, with J = d mean / d prediction and std the step's noise,
and differs by a factor of up to thirty between the steps of one schedule. To add a weight, write a function here and
an entry of `STEP_WEIGHTS`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .trajectory import StepScale

StepWeight = Callable[[StepScale, Sequence[StepScale]], Tensor]


def noise(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return 2.25 * std: steps with more room to explore count more (TempFlow-GRPO, 2508.04324)."""
    return 2.25 * own.std


def velocity(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return std / |J|, divided by its mean over the steps that may be trained (Flash-GRPO, 2605.15980).

    The gradient with respect to the prediction is then as large at each step.
    """
    return guard(own, every) / torch.stack([guard(each, every) for each in every]).mean(0)


def guard(own: StepScale, every: Sequence[StepScale]) -> Tensor:
    """Return std / |J|, the weight of GRPO-Guard (2510.22319) at a ratio of 1; like `velocity`, but not normalised."""
    return own.std / own.jacobian


# by the value of the setting `step_weight`; arguments are the scale of a step and those of all trainable steps
STEP_WEIGHTS: dict[str, StepWeight | None] = {"none": None, "noise": noise, "velocity": velocity, "guard": guard}


def weigh_steps(name: str, scales: dict[int, StepScale], steps: Tensor) -> Tensor | None:
    """Return the (batch, steps) float32 weights of the trained steps; None for "none".

    Args:
        steps: (batch, steps) int64, indices of the trained steps.
    """
    weight = STEP_WEIGHTS[name]
    if weight is None:
        return None
    every = list(scales.values())
    found = {step: weight(scale, every).float().cpu() for step, scale in scales.items()}
    rows = [[found[step][row] for step in columns] for row, columns in enumerate(steps.tolist())]
    return torch.stack([torch.stack(row) for row in rows])
