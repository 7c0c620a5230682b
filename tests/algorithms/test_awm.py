"""Advantage-weighted matching against the paper's formula: weights by time, the clip, the average."""

import math

import pytest
import torch
from renoised_parts import changed, gradient, mean, problem, squares
from torch.testing import assert_close

from diffusion_grpo.algorithms.awm import AWM, WEIGHTS

BY_HAND = {
    "ghuber": lambda d, t: t / 0.25 * ((d + 1e-10) ** 0.25 - (1e-10) ** 0.25),
    "uniform": lambda d, t: d,
    "t": lambda d, t: t * d,
    "t2": lambda d, t: t * t * d,
}


def reference_loss(given, weight="ghuber", before=None, clip=None, ema_beta=1.0, advantage_range=5.0):
    """(samples,) PPO's loss of exp(w(d_before) - w(d)), plus the distance to the average."""
    error, time = squares(given, given.clean), mean(given, given.sigma.expand(given.clean.shape))
    before = error.detach() if before is None else before
    losses = []
    for index, advantage in enumerate((given.advantages / advantage_range).tolist()):
        log_probs = [-BY_HAND[weight](d[index], time[index]) for d in (error, before)]
        ratio = torch.exp(log_probs[0] - log_probs[1])
        inside = ratio if clip is None else torch.clamp(ratio, 1 - clip, 1 + clip)
        losses.append(-torch.minimum(advantage * ratio, advantage * inside))
    return torch.stack(losses) + ema_beta * squares(given, given.clean, given.old)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sigma_by_element", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("has_old", [False, True])
def test_loss_and_gradient_of_a_first_replay(is_masked, sigma_by_element, weight, has_old):
    given = problem(is_masked=is_masked, sigma_by_element=sigma_by_element, has_old=has_old, has_weights=True)
    out = AWM(weight=weight, ema_beta=0.4).loss(given.policy, None, given.part, 3)
    losses = reference_loss(given, weight, ema_beta=0.4)
    assert_close(out.loss, (given.weights * losses).sum())
    assert_close(gradient(out.loss, given), gradient((given.weights * losses).sum(), given))
    assert [out.metrics[f"ratio/{name}"] for name in ("mean", "min", "max")] == [1.0] * 3
    moved = squares(given, given.clean, given.old).mean().item() if has_old else 0.0
    assert out.metrics["old/distance"] == pytest.approx(moved)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("is_masked", [False, True])
def test_loss_and_gradient_of_a_later_replay(weight, clip, is_masked):
    """Against what was recorded before the first update, with samples on both sides of the clip and inside."""
    given = problem(count=9, has_old=True, is_masked=is_masked, distance=0.5)
    before = squares(given, given.clean).detach() * torch.linspace(0.5, 1.5, 9, dtype=torch.float64)
    part = changed(given, old_log_probs=torch.stack([torch.full_like(before, math.nan), -before], dim=1))
    settings = {"weight": weight, "anchor": "rollout", "advantage_range": 2.0}
    out = AWM(clip=clip or 1.0, **settings).loss(given.policy, None, part, 3)
    losses = reference_loss(given, weight, before, clip, advantage_range=2.0)
    assert_close(out.loss, losses.sum())
    assert_close(gradient(out.loss, given), gradient(losses.sum(), given))
    assert out.metrics["ratio/min"] < 0.96 and out.metrics["ratio/max"] > 1.04


def test_the_pull_of_the_average_is_logged_apart_from_the_policy_gradient():
    given = problem(has_old=True, has_weights=True)
    out = AWM(ema_beta=0.3, beta=0.2).loss(given.policy, given.reference, given.part, 3)
    pull = 0.3 * squares(given, given.clean, given.old)
    policy = reference_loss(given, ema_beta=0.0)
    assert out.metrics["loss/ema"] == pytest.approx((given.weights * pull).mean().item())
    assert out.metrics["loss/policy"] == pytest.approx((given.weights * policy).mean().item())
    terms = sum(out.metrics[f"loss/{name}"] for name in ("policy", "ema", "kl"))
    assert terms == pytest.approx(out.loss.item() / len(given.part))
    clipped = AWM(ema_beta=0.0, clip=0.1, anchor="rollout").loss(given.policy, None, given.part, 3)
    assert "loss/ema" not in clipped.metrics


def test_ghuber_is_finite_with_its_gradient_at_a_perfect_prediction():
    given = problem(distance=0.0)
    out = AWM().loss(given.policy, None, given.part, 3)
    assert out.loss.isfinite() and gradient(out.loss, given).isfinite().all()
