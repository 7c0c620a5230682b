"""Generalized advantage estimation against its definition, and the clipped loss of the value model."""

import pytest
import torch

from diffusion_grpo.algorithms.advantages import estimate_advantages
from diffusion_grpo.algorithms.losses import value_loss


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma, lam):
    rewards, values = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    following = torch.cat([values[:, 1:], torch.zeros(7, 1)], 1)
    delta = rewards + gamma * following - values
    expected = torch.stack(
        [sum((gamma * lam) ** k * delta[:, step + k] for k in range(5 - step)) for step in range(5)], 1
    )
    torch.testing.assert_close(estimate_advantages(rewards, values, gamma, lam), expected, rtol=1e-12, atol=1e-12)


def test_without_discount_gae_is_the_reward_minus_the_value():
    values = torch.randn(6, 4, dtype=torch.float64)
    rewards = torch.zeros(6, 4, dtype=torch.float64)
    rewards[:, -1] = torch.randn(6)
    expected = rewards[:, -1:] - values
    torch.testing.assert_close(estimate_advantages(rewards, values, 1.0, 1.0), expected, rtol=0, atol=1e-14)


def test_clipped_value_loss():
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, float("nan")]])
    values = torch.tensor([[0.1, 0.5, 0.5, 9.0]], requires_grad=True)
    loss = value_loss(values, old, returns, clip=0.2)
    # inside; moved enough in the right direction; too far in the wrong one; no reward
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.5**2) / 4)
    loss.backward()
    assert values.grad.flatten().tolist() == pytest.approx([-0.9 / 4, 0.0, 1.5 / 4, 0.0])
    free = value_loss(values.detach(), old, returns, clip=None)
    assert free.item() == pytest.approx(0.5 * (0.9**2 + 0.5**2 + 1.5**2) / 4)
    nothing = value_loss(values[:, 3:], old[:, 3:], returns[:, 3:], clip=0.2)
    assert nothing.item() == 0.0 and nothing.requires_grad


def test_the_value_loss_does_not_depend_on_the_micro_batches():
    nan = float("nan")
    values, returns = torch.randn(4, 2), torch.tensor([[1.0, 0.5], [nan, nan], [nan, nan], [nan, nan]])
    halves = [value_loss(values[own], values[own] + 1, returns[own], clip=0.2) for own in (slice(0, 2), slice(2, 4))]
    whole = value_loss(values, values + 1, returns, clip=0.2)
    assert whole.item() == pytest.approx(sum(halves).item() / 2) and whole.item() > 0
