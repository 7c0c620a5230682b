"""GRPO's loss of steps and of tokens, losses per reward, weights of samples, and the value model's loss."""

import dataclasses
import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_grpo.algorithms.losses import (
    LossInputs,
    grpo,
    kl_divergence,
    loss_per_reward,
    sample_weights,
    sum_loss,
    token_kl_divergence,
    value_loss,
)
from diffusion_grpo.policy.sde import flow_sde, log_density
from diffusion_grpo.policy.trajectory import StepDistribution, StepScale


def inputs(ratio, advantages, **settings) -> LossInputs:
    """Inputs of three-dimensional latents whose ratios and advantages (for each reward, if lists) are given."""
    settings = {"epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.0, "ref_mean": None} | settings
    log_prob = torch.log(torch.tensor(ratio, dtype=torch.float64)).requires_grad_()
    return LossInputs(
        log_prob=log_prob,
        old_log_prob=torch.zeros_like(log_prob),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mean=torch.ones(len(ratio), 3, dtype=torch.float64, requires_grad=True),
        std=torch.tensor(0.5, dtype=torch.float64),
        **settings,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "passes", "side"),
    [
        (1.5, 1.0, -1.3, False, "high"),  # better and already more likely than allowed
        (0.5, -1.0, 0.9, False, "low"),  # worse and already less likely than allowed
        (0.5, 1.0, -0.5, True, None),  # better but less likely: always pulled back
        (1.5, -1.0, 1.5, True, None),  # worse but more likely: always pulled back
        (1.2, 1.0, -1.2, True, None),  # within 1 + epsilon_high, but not within 1 + epsilon
        (0.8, -1.0, 0.9, False, "low"),  # not within 1 - epsilon, though within 1 - epsilon_high
        (0.95, -1.0, 0.95, True, None),
    ],
)
def test_clip_acts_on_both_sides_and_only_outwards(ratio, advantage, loss, passes, side):
    given = inputs([ratio], [advantage])
    output = grpo(given)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    output.loss.backward()
    assert given.log_prob.grad.item() == (pytest.approx(-advantage * ratio) if passes else 0)
    assert output.metrics["clip_ratio/high_mean"] == (side == "high")
    assert output.metrics["clip_ratio/low_mean"] == (side == "low")
    assert output.metrics["clip_ratio/region_mean"] == (side is not None)


def test_metrics_are_shares_of_the_batch_without_gradient():
    output = grpo(inputs([1.5, 0.5, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], ref_mean=torch.zeros(4, 3), beta=0.25))
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == {
        "ratio/mean": pytest.approx(1.0),
        "ratio/min": pytest.approx(0.5),
        "ratio/max": pytest.approx(1.5),
        "clip_ratio/low_mean": 0.25,
        "clip_ratio/high_mean": 0.25,
        "clip_ratio/region_mean": 0.5,
        "kl": 2.0,  # 1**2 / (2 * 0.5**2)
        "loss/policy": pytest.approx((-1.3 + 0.9 - 1 + 1) / 4),
        "loss/kl": 0.5,
    }
    assert not any(value.requires_grad for value in output.metrics.values())
    assert output.loss.ndim == 0 and output.loss.requires_grad


@pytest.mark.parametrize("std_shape", [(), (4, 1, 1), (4, 3, 5)])
def test_kl_equals_torch_averaged_over_dimensions(std_shape):
    torch.manual_seed(0)
    mean, ref_mean = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    std = torch.rand(std_shape, dtype=torch.float64) + 0.1
    normals = [torch.distributions.Normal(m, std.expand(4, 3, 5)) for m in (mean, ref_mean)]
    expected = torch.distributions.kl_divergence(*normals).mean((1, 2))
    torch.testing.assert_close(kl_divergence(mean, ref_mean, std), expected, rtol=1e-12, atol=0)


def held_step():
    """A step of two samples of which 5 and 12 of 15 numbers move, its KL at each of them, and a reference."""
    torch.manual_seed(0)
    mean, ref_mean = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    moves = (torch.arange(15) < torch.tensor([[5], [12]])).view(2, 3, 5)
    std = torch.where(moves, torch.rand(2, 3, 5, dtype=torch.float64) + 0.1, 1.0)
    mean, ref_mean = mean.requires_grad_(), torch.where(moves, ref_mean, mean.detach())
    each = torch.distributions.kl_divergence(*(torch.distributions.Normal(m, std) for m in (mean, ref_mean)))
    scale = StepScale(*torch.tensor([[0.5, 0.5], [0.2, 0.2], [5.0, 12.0]], dtype=torch.float64))
    log_prob = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    step, reference = (StepDistribution(m, std, log_prob, scale) for m in (mean, ref_mean))
    return step, reference, torch.stack([values[moved].mean() for values, moved in zip(each, moves, strict=True)])


def test_kl_is_averaged_over_the_numbers_that_move():
    step, reference, expected = held_step()
    exact = {"rtol": 1e-12, "atol": 0}
    torch.testing.assert_close(
        kl_divergence(step.mean, reference.mean, step.std, step.scale.moving), expected, **exact
    )
    torch.testing.assert_close(step.divergence(reference.mean), expected, **exact)
    given = dataclasses.replace(inputs([1.0, 1.0], [0.0, 0.0], beta=0.5), **step.loss_inputs(reference))
    output = grpo(given)
    torch.testing.assert_close(output.metrics["kl"], expected.mean().detach(), **exact)
    gradients = [torch.autograd.grad(loss, step.mean, retain_graph=True)[0] for loss in (output.loss, expected.mean())]
    assert output.loss.item() == pytest.approx(0.5 * expected.mean().item())
    torch.testing.assert_close(gradients[0], 0.5 * gradients[1], **exact)
    alone = sum_loss(grpo, given, torch.tensor([0.0, 1.0]))  # each sample keeps its own count
    torch.testing.assert_close(alone.metrics["kl"], expected[1].detach(), **exact)


def test_kl_is_measured_but_not_felt_with_beta_zero():
    given = inputs([1.0], [1.0], beta=0.0, ref_mean=torch.zeros(1, 3))
    assert grpo(given).loss.item() == grpo(dataclasses.replace(given, ref_mean=None)).loss.item()
    assert "kl" in grpo(given).metrics
    assert "kl" not in grpo(dataclasses.replace(given, ref_mean=None)).metrics


# rewards with a loss each


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 2.0], [1.0, -0.5]])
def test_where_nothing_is_clipped_losses_per_reward_are_the_loss_of_the_sum(weights):
    advantages = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = {"beta": 0.7, "ref_mean": torch.zeros(4, 3, dtype=torch.float64)}
    given = inputs([1.0, 0.95, 1.05, 1.25], advantages.tolist(), **settings)
    apart = loss_per_reward(grpo, weights)(given)
    summed = dataclasses.replace(given, advantages=advantages @ torch.tensor(weights, dtype=torch.float64))
    together = grpo(summed)
    gradients = [torch.autograd.grad(output.loss, [given.log_prob, given.mean]) for output in (apart, together)]
    assert apart.loss.item() == pytest.approx(together.loss.item(), rel=1e-12)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert apart.metrics["kl"] == together.metrics["kl"] and apart.metrics["clip_ratio/region_mean"] == 0


def test_a_negative_weight_turns_the_advantage_not_the_clip():
    negative = loss_per_reward(grpo, [1.0, -0.5])(inputs([1.5, 0.5], [[1.0, 2.0], [0.3, -1.0]]))
    positive = loss_per_reward(grpo, [1.0, 0.5])(inputs([1.5, 0.5], [[1.0, -2.0], [0.3, 1.0]]))
    assert negative.loss.item() == positive.loss.item()


def test_dancegrpos_loss_for_video():
    """Its training loop in float64: each reward clamped and clipped, weighted, divided by the steps outside."""
    ratio = torch.tensor([1.0002, 0.9998, 1.00005], dtype=torch.float64)
    advantages, coefficients, clip = torch.tensor([[9.0, -0.5], [-7.0, 0.2], [1.0, 1.0]]).double(), [1.0, 0.5], 1e-4
    expected = 0.0
    for column, coefficient in zip(advantages.clamp(-5, 5).T, coefficients, strict=True):
        unclipped, clipped = -column * ratio, -column * ratio.clamp(1 - clip, 1 + clip)
        expected += coefficient * torch.maximum(unclipped, clipped).mean()
    given = inputs(ratio.tolist(), advantages.clamp(-5, 5).tolist(), epsilon=clip, epsilon_high=clip)
    output = loss_per_reward(grpo, coefficients)(given)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert output.metrics["clip_ratio/high_mean"].item() == pytest.approx(1 / 6)  # one of three, of one of two rewards


# conversions that docs/coming_from/flow_grpo.md promises


@pytest.mark.parametrize("step", [0, 1, 8])
def test_flow_grpos_kl_and_log_probability_convert(step):
    """Its step written as in its code, with g where ours has g * sqrt(-dt)."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas.double()  # of SD3.5-M
    sigma, sigma_next, sigma_max = sigmas[step], sigmas[step + 1], sigmas[1]
    sample, prediction, other, noise = torch.randn(4, 2, 3, 4, 4, dtype=torch.float64)
    dt = sigma_next - sigma
    g = torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))) * 0.7

    def their_mean(velocity):
        return sample * (1 + g**2 / (2 * sigma) * dt) + velocity * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt

    theirs = ((their_mean(prediction) - their_mean(other)) ** 2).mean((1, 2, 3)) / (2 * g**2)
    ours = [
        flow_sde(velocity, sample, sigma, sigma_next, sigma_max=sigma_max, noise_level=0.7)
        for velocity in (prediction, other)
    ]
    (mean, std), (ref_mean, _) = ours
    torch.testing.assert_close(theirs, -dt * kl_divergence(mean, ref_mean, std), rtol=1e-9, atol=0)
    drawn = mean + std * noise
    scale = g * torch.sqrt(-dt)
    density = -((drawn - their_mean(prediction)) ** 2) / (2 * scale**2) - torch.log(scale) - math.log(2 * math.pi) / 2
    torch.testing.assert_close(log_density(drawn, mean, std), density.mean((1, 2, 3)), rtol=1e-5, atol=1e-6)


# tokens: means over those that count, the clip of each, and TRL's estimate of the KL

MASK = torch.tensor([[True, True, True], [True, False, False]])


def token_inputs(ratios, advantages, **settings):
    """Two samples of three tokens and of one; what is masked must not matter."""
    given = inputs(ratios, advantages, epsilon=0.2)
    return dataclasses.replace(given, mean=None, std=None, mask=MASK, **settings)


def test_the_loss_is_a_mean_over_tokens_and_then_over_samples():
    given = token_inputs([[1.1, 0.9, 2.0], [0.5, 7.0, 7.0]], [1.0, -2.0])
    output = grpo(given)
    first = (-1.1 - 0.9 - 1.3) / 3  # the third is clipped
    second = 2 * 0.8  # clipped from below
    assert output.loss.item() == pytest.approx((first + second) / 2)
    output.loss.backward()
    expected = [[-1.1 / 3 / 2, -0.9 / 3 / 2, 0.0], [0.0, 0.0, 0.0]]
    assert torch.allclose(given.log_prob.grad, torch.tensor(expected, dtype=torch.float64))
    summed = loss_per_reward(grpo, [1.0, 3.0])(
        dataclasses.replace(given, advantages=torch.tensor([[1.0, 0], [-2, 0]]))
    )
    assert summed.loss.item() == pytest.approx(output.loss.item())
    assert [output.metrics[f"ratio/{name}"].item() for name in ("min", "max")] == pytest.approx([0.5, 2.0])
    assert output.metrics["clip_ratio/high_mean"].item() == pytest.approx((1 / 3 + 0) / 2)
    assert output.metrics["clip_ratio/low_mean"].item() == pytest.approx((0 + 1) / 2)
    assert output.metrics["ratio/mean"].item() == pytest.approx(((1.1 + 0.9 + 2.0) / 3 + 0.5) / 2)


def test_the_kl_is_trls_estimate_with_gradient():
    ref = torch.tensor([[-0.1, 0.2, 0.0], [0.3, 5.0, 5.0]], dtype=torch.float64)
    given = token_inputs([[1.0] * 3] * 2, [0.0, 0.0], beta=0.5, ref_log_prob=ref)
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


# samples whose advantage is 0 are left out of an update, as in Flow-GRPO's code


def inputs_of(advantages):
    torch.manual_seed(0)
    mean = torch.randn(len(advantages), 3, dtype=torch.float64, requires_grad=True)
    given = inputs([1.0] * len(advantages), advantages, epsilon_high=0.1, beta=0.3, ref_mean=torch.zeros_like(mean))
    return dataclasses.replace(given, log_prob=(mean**2).mean(1) * 1e-2, mean=mean)


def test_flow_grpos_update_without_zero_advantages():
    """Its mask, two micro-batches of what is left, and the mean over both; ours sums and divides by all."""
    advantages = [1.5, 0.0, -0.5, 0.0, 0.0, 0.0, 2.0, -1.0]
    whole = inputs_of(advantages)
    kept = [i for i, advantage in enumerate(advantages) if advantage != 0]
    theirs = 0.0
    for batch in (kept[:2], kept[2:]):
        ratio, advantage = torch.exp(whole.log_prob[batch]), whole.advantages[batch]
        policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
        kl = ((whole.mean[batch] ** 2).mean(1) / (2 * 0.5**2)).mean()
        theirs = theirs + (policy + 0.3 * kl) / 2
    weights = sample_weights(whole.advantages, torch.arange(8))
    assert weights.tolist() == [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 2.0]
    ours, terms = 0.0, 0.0
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):  # the second has nobody who counts
        names = ("log_prob", "old_log_prob", "advantages", "mean", "ref_mean")
        part = dataclasses.replace(whole, **{name: getattr(whole, name)[rows] for name in names})
        output = sum_loss(grpo, part, weights[rows])
        ours = ours + output.loss / 8
        terms = terms + (output.metrics["loss/policy"] + output.metrics["loss/kl"]) * len(weights[rows]) / 8
        assert ("ratio/mean" in output.metrics) == bool(weights[rows].any())  # of samples that count
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(terms, ours.detach(), rtol=1e-12, atol=0)  # what is logged adds up to the loss
    gradients = [torch.autograd.grad(loss, whole.mean, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_weights_are_of_what_is_trained():
    advantages = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0], [2.0, 2.0]])
    assert sample_weights(advantages, torch.tensor([0, 1, 2])).tolist() == [1.5, 0.0, 1.5, 1.5]
    assert sample_weights(torch.zeros(4), torch.arange(4)).tolist() == [0.0] * 4


def test_a_standard_deviation_of_each_sample_goes_with_it():
    given = inputs_of([1.0, 0.0])
    each = dataclasses.replace(given, std=torch.tensor([[0.5], [9.0]], dtype=torch.float64))
    whole = sum_loss(grpo, given, torch.tensor([2.0, 0.0])).loss
    torch.testing.assert_close(sum_loss(grpo, each, torch.tensor([2.0, 0.0])).loss, whole)


# the value model


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
