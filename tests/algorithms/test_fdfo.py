"""Finite-difference flow optimisation against a reference in float64, and what its runs record."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import joined_trajectory, latent_mean, logged, trainer_for
from torch.testing import assert_close

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.batch import Part
from diffusion_grpo.algorithms.fdfo import FDFO
from diffusion_grpo.policy.trajectory import StepDistribution, StepScale, Trajectory
from diffusion_grpo.rewards import groupwise, takes_latents

LATENTS = torch.tensor([7, 8, 7, 8, 7, 7])  # two of one prompt, interleaved, with four samples and with two
JACOBIAN, STD = 0.25, 0.5


def problem():
    """A step of flow matching whose mean is x - 0.25 v, from one v per latent, and a linear map that finishes it."""
    drawn = torch.Generator().manual_seed(0)
    start, velocity, noise = (torch.randn(6, 3, 4, generator=drawn, dtype=torch.float64) for _ in range(3))
    start, velocity = (each[LATENTS - 7].clone() for each in (start, velocity))
    velocity.requires_grad_()
    finished = 3.0 * (start - JACOBIAN * velocity.detach() + STD * noise)
    steps = torch.zeros(6, 1, dtype=torch.int64)
    latents = start[:, None]
    trajectory = Trajectory(
        latents, latents, torch.zeros(6, 1), steps, LATENTS, LATENTS, 4, 0.7, finished=finished.float()
    )
    advantages = torch.tensor([1.0, -2.0, 0.5, 0.7, -0.5, 0.0], dtype=torch.float64)
    part = Part([{}] * 6, trajectory, advantages, trajectory.log_probs, lambda rows: {})
    part.groups, part.group_size = torch.zeros_like(LATENTS), 6

    def replay(shift=0.0, **arguments):
        scale = StepScale(torch.full((6,), STD), torch.full((6,), JACOBIAN), torch.full((6,), 12.0))
        return StepDistribution(start - JACOBIAN * velocity + shift, torch.tensor(STD), torch.zeros(6), scale)

    return part, velocity, finished, SimpleNamespace(replay=replay)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.5, 0.0, 1.5, 1.5, 0.0, 1.5])])
def test_the_velocity_falls_along_the_covariance_of_advantages_and_finished_samples(weights):
    part, velocity, finished, policy = problem()
    part.weights = weights
    out = FDFO().loss(policy, None, part, 0)
    (found,) = torch.autograd.grad(out.loss, velocity)
    counted = torch.ones(6) if weights is None else weights
    for latent in (7, 8):
        members = [index for index in range(6) if LATENTS[index] == latent]
        middle = sum(finished[index] for index in members) / len(members)
        size = (sum(((finished[index] - middle) ** 2).mean() for index in members) / len(members)).sqrt()
        for index in members:
            pull = counted[index] * part.advantages[index] * (finished[index] - middle) / size
            assert_close(found[index], pull / 12, rtol=1e-5, atol=1e-6)  # minus the gradient is the fall
    assert out.metrics["loss/policy"] == pytest.approx(out.loss.item() / 6, rel=1e-5)


def test_a_part_of_a_group_is_refused():
    part, _, _, policy = problem()
    part.group_size = 8
    with pytest.raises(ValueError, match="fdfo"):
        FDFO().loss(policy, None, part, 0)


def test_the_divergence_from_the_reference_is_weighted_by_beta():
    part, _, _, policy = problem()
    distant = SimpleNamespace(replay=lambda **arguments: policy.replay(shift=0.1))
    plain, pulled = (FDFO(beta=beta).loss(policy, distant, part, 0) for beta in (0.0, 0.3))
    divergence = 0.1**2 / (2 * STD**2)
    assert_close(pulled.loss - plain.loss, torch.tensor(6 * 0.3 * divergence, dtype=torch.float64))
    assert pulled.metrics["kl"] == pytest.approx(divergence) and pulled.metrics["loss/kl"] == pytest.approx(
        0.3 * divergence
    )


STEPS = {"samples_per_latent": "group", "trained_steps": [0, 1], "noisy_steps": "trained"}


def test_a_rollout_keeps_finished_latents_beside_its_steps(tmp_path):
    scored = []

    def noting(latents, **columns):
        scored.append(latents.clone())
        return latent_mean(latents)

    noting.takes_latents = True
    trainer = trainer_for(tmp_path, loss_type="fdfo", num_iterations=2, rewards=noting, **STEPS)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0] and min(logged(trainer, "fdfo/spread")) > 0
    kept = joined_trajectory(trainer)
    assert torch.equal(kept.finished, torch.cat(scored)) and kept.latents.shape[1] == 1


@groupwise
@takes_latents
def larger(latents, **columns):
    """1 for the sample of a pair that `latent_mean` prefers."""
    means = latent_mean(latents)
    return (means == means.max()).float()


def test_pairs_and_two_steps_learn_from_a_reward_that_only_compares(tmp_path):
    settings = STEPS | {"num_generations": 2, "trained_steps": [0, 2], "max_steps": 6, "learning_rate": 0.01}
    settings |= {"eval_strategy": "steps", "eval_steps": 6, "eval_on_start": True}
    trainer = trainer_for(tmp_path, loss_type="fdfo", rewards=larger, eval_reward_funcs=latent_mean, **settings)
    trainer.train()
    assert logged(trainer, "rewards/larger/mean") == [0.5] * 6
    start, end = logged(trainer, "eval_rewards/latent_mean/mean")
    assert end > start + 0.1


@pytest.mark.parametrize("settings", [{"samples_per_latent": 1}, {"per_device_train_batch_size": 2}])
def test_groups_that_cannot_be_compared_are_refused(tmp_path, settings):
    with pytest.raises(ValueError, match="loss_type='fdfo'"):
        trainer_for(tmp_path, loss_type="fdfo", **STEPS | settings)


@pytest.mark.parametrize("name", ["epsilon", "epsilon_high"])
def test_a_clip_range_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} has no effect"):
        DiffusionGRPOConfig(str(tmp_path), use_cpu=True, loss_type="fdfo", **{name: 0.3})
