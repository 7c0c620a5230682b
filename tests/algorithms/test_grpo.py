"""GRPO on recorded steps: which ratio it takes, and when it stops."""

import math
from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.algorithms.base import RatioError
from diffusion_grpo.algorithms.batch import Part
from diffusion_grpo.algorithms.grpo import GRPO
from diffusion_grpo.policy.trajectory import StepDistribution, Trajectory

RECORDED, ADVANTAGES = [0.5, -0.25], [1.0, -2.0]


class Replays:
    """A policy, or a reference, whose replay of a step is known; keeps how often it was asked."""

    def __init__(self, log_prob, mean=0.0):
        self.log_prob = torch.tensor(log_prob, requires_grad=True)
        self.mean, self.calls = torch.full((2, 3), mean), 0

    def replay(self, inputs, trajectory, step):
        assert inputs == {"prompt": ["a", "b"]} and step == 1
        self.calls += 1
        return StepDistribution(self.mean, torch.tensor(0.5), self.log_prob)


def make_part() -> Part:
    latents, seeds = torch.zeros(2, 1, 3), torch.arange(2)
    log_probs = torch.tensor(RECORDED)[:, None]
    trajectory = Trajectory(latents, latents, log_probs, torch.tensor([[1], [1]]), seeds, seeds, 4, 1.0)
    rows = [{"prompt": "a"}, {"prompt": "b"}]

    def make_inputs(rows):
        return {"prompt": [row["prompt"] for row in rows]}

    return Part(rows, trajectory, torch.tensor(ADVANTAGES), log_probs, make_inputs)


def surrogate(ratios, low=0.8, high=1.2):
    """The clipped objective in float64, summed over samples."""
    pairs = zip(ratios, ADVANTAGES, strict=True)
    return sum(max(-a * r, -a * min(max(r, low), high)) for r, a in pairs)


def test_a_reference_is_replayed_only_for_a_divergence_that_counts():
    reference = Replays(RECORDED, mean=1.0)
    GRPO(beta=0.0).loss(Replays(RECORDED), reference, make_part(), 1)
    assert reference.calls == 0
    output = GRPO(beta=0.3).loss(Replays(RECORDED), reference, make_part(), 1)
    assert reference.calls == 1 and output.metrics["kl"] == pytest.approx(1 / (2 * 0.25))
    assert output.loss.item() == pytest.approx(surrogate([1, 1]) + 2 * 0.3 * 2.0, rel=1e-6)


def test_the_first_replay_may_be_the_denominator():
    output = GRPO(anchor="own").loss(Replays([3.0, 4.0]), None, make_part(), 1)
    assert output.loss.item() == pytest.approx(surrogate([1, 1])) and output.drift > 1
    again = GRPO(anchor="replay", epsilon=0.2).loss(Replays([0.6, -0.25]), None, make_part(), 1)
    assert again.loss.item() == pytest.approx(surrogate([math.exp(0.1), 1]), rel=1e-6)


def test_a_ratio_that_is_not_one_after_a_rollout_stops_the_run():
    batch = SimpleNamespace(is_on_policy=True)
    assert GRPO(max_ratio_error=1e-3).check(batch, 1e-3) == {"ratio/max_error": 1e-3}
    with pytest.raises(RatioError, match="max_ratio_error=1e-03"):
        GRPO(max_ratio_error=1e-3).check(batch, 2e-3)
    assert GRPO(max_ratio_error=None).check(batch, 1.0) == {"ratio/max_error": 1.0}
    with pytest.raises(RatioError):  # measured against the rollout, whatever the anchor
        GRPO(anchor="own").check(batch, 1.0)
    assert GRPO().check(SimpleNamespace(is_on_policy=False), 1.0) == {}
