"""GRPO's loss of tokens: means over the tokens that count, the clip of each, and TRL's estimate of the KL."""

import math

import pytest
import torch

from diffusion_grpo.algorithms.losses import LossInputs, grpo, loss_per_reward, token_kl_divergence

MASK = torch.tensor([[True, True, True], [True, False, False]])


def inputs(ratios, advantages, beta=0.0, ref_log_prob=None):
    """Two samples of three tokens and of one; what is masked must not matter."""
    log_prob = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return LossInputs(
        log_prob=log_prob,
        old_log_prob=torch.zeros(2, 3, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mean=None,
        std=None,
        ref_mean=None,
        epsilon=0.2,
        epsilon_high=0.3,
        beta=beta,
        mask=MASK,
        ref_log_prob=ref_log_prob,
    )


def test_the_loss_is_a_mean_over_tokens_and_then_over_samples():
    given = inputs([[1.1, 0.9, 2.0], [0.5, 7.0, 7.0]], [1.0, -2.0])
    output = grpo(given)
    first = (-1.1 - 0.9 - 1.3) / 3  # the third is clipped
    second = 2 * 0.8  # clipped from below
    assert output.loss.item() == pytest.approx((first + second) / 2)
    output.loss.backward()
    expected = [[-1.1 / 3 / 2, -0.9 / 3 / 2, 0.0], [0.0, 0.0, 0.0]]
    assert torch.allclose(given.log_prob.grad, torch.tensor(expected, dtype=torch.float64))
    assert output.metrics["clip_ratio/high_mean"].item() == pytest.approx((1 / 3 + 0) / 2)
    assert output.metrics["clip_ratio/low_mean"].item() == pytest.approx((0 + 1) / 2)
    assert output.metrics["ratio/mean"].item() == pytest.approx(((1.1 + 0.9 + 2.0) / 3 + 0.5) / 2)


def test_the_kl_is_trls_estimate_with_gradient():
    ref = torch.tensor([[-0.1, 0.2, 0.0], [0.3, 5.0, 5.0]], dtype=torch.float64)
    given = inputs([[1.0] * 3] * 2, [0.0, 0.0], beta=0.5, ref_log_prob=ref)
    output = grpo(given)
    k3 = [[math.exp(d) - d - 1 for d in row] for row in ref.tolist()]
    kl = (sum(k3[0]) / 3 + k3[1][0]) / 2
    assert output.metrics["kl"].item() == pytest.approx(kl) and output.loss.item() == pytest.approx(0.5 * kl)
    output.loss.backward()
    assert given.log_prob.grad[0, 0].item() == pytest.approx(0.5 * (1 - math.exp(-0.1)) / 3 / 2)
    assert given.log_prob.grad[1, 0] < 0 and (given.log_prob.grad[1, 1:] == 0).all()


def test_the_kl_of_equals_is_zero_and_its_mean_is_the_true_one():
    """On average over tokens drawn from the policy, k3 is the KL divergence."""
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 12, dtype=torch.float64).log_softmax(1)
    assert (token_kl_divergence(policy, policy) == 0).all()
    mean = (policy.exp() * token_kl_divergence(policy, reference)).sum()
    assert mean.item() == pytest.approx((policy.exp() * (policy - reference)).sum().item())


def test_an_advantage_for_each_reward():
    given = inputs([[1.1, 0.9, 2.0], [0.5, 7.0, 7.0]], [[1.0, 0.0], [-2.0, 0.0]])
    alone = grpo(inputs([[1.1, 0.9, 2.0], [0.5, 7.0, 7.0]], [1.0, -2.0]))
    assert loss_per_reward(grpo, [1.0, 3.0])(given).loss.item() == pytest.approx(alone.loss.item())
