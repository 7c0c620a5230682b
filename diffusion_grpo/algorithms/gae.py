"""Generalized advantage estimation, and PPO's loss for the value model."""

import torch
from torch import Tensor


def estimate_advantages(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Estimate advantages by GAE (arXiv 1506.02438) over the trained steps; the value after the last step is 0.

    `A_t = delta_t + gamma * lam * A_(t+1)` with `delta_t = r_t + gamma * V_(t+1) - V_t`. With `gamma = lam = 1`, `A_t`
    is the sum of the rewards from step t on, minus the value.

    Args:
        rewards: `(samples, steps)`, received after each step.
        values: `(samples, steps)`, of the state before each step.
        gamma: discount per step, in [0, 1].
        lam: 0 relies on the next value, 1 on the rewards alone.

    Returns:
        `(samples, steps)` float64.

    Examples:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3)
        >>> estimate_advantages(rewards, values, gamma=1.0, lam=1.0).tolist()
        [[1.0, 1.0, 1.0]]
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.empty_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        following = delta + gamma * lam * following
        advantages[:, step], next_value = following, values[:, step]
    return advantages


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Compute PPO's clipped value loss: half the mean of the larger squared error, with or without the clip.

    An unknown target counts as an error of 0, so that a known one weighs the same in any micro-batch. As in the code
    of PPO's authors (arXiv 1707.06347 leaves it out), a value that moved further than `clip` in the right direction
    gets no gradient.

    Args:
        values: `(batch, steps)` values under the current model, with gradient.
        old_values: `(batch, steps)` values at the rollout.
        returns: `(batch, steps)` targets; NaN where they are unknown.
    """
    is_known, returns = ~returns.isnan(), returns.nan_to_num()
    error = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error.masked_fill(~is_known, 0.0).mean()
