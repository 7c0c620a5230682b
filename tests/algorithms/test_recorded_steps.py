"""GRPO-Guard, DPPO and step weights against references in float64, and what they promise on the first pass."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from recorded import make_policy

from diffusion_grpo.algorithms.base import RatioError
from diffusion_grpo.algorithms.batch import Part
from diffusion_grpo.algorithms.grpo import GRPO
from diffusion_grpo.algorithms.losses import LossInputs, dppo, grpo, grpo_guard, loss_per_reward
from diffusion_grpo.algorithms.registry import load_algorithm
from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.policy.trajectory import STEP_WEIGHTS, StepDistribution, StepScale

SEEDS = [11, 12]


# The losses of a step


def step_inputs(move, advantages, *, std=(0.3, 0.6, 0.3, 0.6), beta=0.0):
    """A step of four samples of twenty numbers, whose means have moved by `move` of a std since the rollout."""
    drawn = torch.Generator().manual_seed(0)
    std = torch.tensor(std, dtype=torch.float64)
    old_mean, noise, direction, ref_mean = torch.randn(4, 4, 20, generator=drawn, dtype=torch.float64)
    next_latents = old_mean + std[:, None] * noise
    mean = (old_mean + move * std[:, None] * direction).requires_grad_()
    normal = torch.distributions.Normal
    return LossInputs(
        log_prob=normal(mean, std[:, None]).log_prob(next_latents).mean(1),
        old_log_prob=normal(old_mean, std[:, None]).log_prob(next_latents).mean(1),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mean=mean,
        std=std[:, None],
        ref_mean=ref_mean if beta else None,
        epsilon=0.1,
        epsilon_high=0.1,
        beta=beta,
        noise=std,
        jacobian=torch.tensor([0.05, 0.1, 0.2, 0.4], dtype=torch.float64),
        old_divergence=((mean - old_mean) ** 2).mean(1) / (2 * std**2),
    )


def gradient(inputs, loss, **settings):
    return torch.autograd.grad(loss(inputs, **settings).loss, inputs.mean, retain_graph=True)[0]


@pytest.mark.parametrize("clip_range", [1e-4, 0.02, 1.0])
def test_guard_equals_its_paper_sample_by_sample(clip_range):
    given = step_inputs(0.3, [1.0, -2.0, 0.5, -0.5], beta=0.7)
    mean, std, advantages = given.mean.detach(), given.std.detach(), given.advantages.tolist()
    expected, clipped = 0.0, 0
    for i in range(4):  # the bias is that of the sample, not of the batch
        bias = given.old_divergence[i].item()
        ratio = math.exp((given.log_prob[i].item() - given.old_log_prob[i].item() + bias) * std[i].item())
        bounded = min(max(ratio, 1 - clip_range), 1 + clip_range)
        expected += max(-advantages[i] * ratio, -advantages[i] * bounded) / given.jacobian[i].item() / 4
        clipped += (ratio > 1 + clip_range and advantages[i] > 0) or (ratio < 1 - clip_range and advantages[i] < 0)
    kl = ((mean - given.ref_mean) ** 2 / (2 * std**2)).mean().item()
    output = grpo_guard(given, clip_range=clip_range)
    assert output.loss.item() == pytest.approx(expected + 0.7 * kl, rel=1e-12)  # the KL is not divided
    assert output.metrics["loss/policy"].item() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["loss/kl"].item() == pytest.approx(0.7 * kl, rel=1e-12)
    assert output.metrics["clip_ratio/region_mean"].item() == clipped / 4
    assert output.metrics["kl/old"].item() == pytest.approx(given.old_divergence.mean().item())


@pytest.mark.parametrize("threshold", [1e-3, 0.03, 10.0])
def test_dppo_equals_its_paper(threshold):
    given = step_inputs(0.3, [1.0, -2.0, 0.5, -0.5], beta=0.7)
    expected, masked = 0.0, []
    for i, advantage in enumerate(given.advantages.tolist()):
        ratio = math.exp(given.log_prob[i].item() - given.old_log_prob[i].item())
        is_out = (ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0)
        masked.append(given.old_divergence[i].item() >= threshold and is_out)
        expected += 0.0 if masked[-1] else -advantage * ratio / 4
    output = dppo(given, threshold=threshold)
    assert output.metrics["loss/policy"].item() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["clip_ratio/region_mean"].item() == sum(masked) / 4
    size = gradient(dataclasses.replace(given, beta=0.0, ref_mean=None), dppo, threshold=threshold).abs().amax(1)
    assert (size == 0).tolist() == masked


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_kept"),
    [(1.1, 1.0, False), (0.9, -1.0, False), (1.1, -1.0, True), (0.9, 1.0, True), (1.1, 0.0, True), (0.9, 0.0, True)]
    + [(1.0, 1.0, True), (1.0, -1.0, True)],
)
def test_dppos_mask_acts_on_one_side_only_and_only_far_away(ratio, advantage, is_kept):
    given = dataclasses.replace(
        step_inputs(0.0, [advantage] * 4),
        log_prob=torch.full((4,), math.log(ratio), dtype=torch.float64, requires_grad=True),
        old_log_prob=torch.zeros(4, dtype=torch.float64),
        old_divergence=torch.tensor([1e-6, 0.99e-5, 1e-5, 1.0], dtype=torch.float64),
    )
    output = dppo(given)
    output.loss.backward()
    assert output.metrics["clip_ratio/region_mean"] == (0 if is_kept else 0.5)
    kept = [True, True, is_kept, is_kept]
    assert given.log_prob.grad.tolist() == pytest.approx([-advantage * ratio / 4 * each for each in kept])


def test_on_the_first_pass_all_have_grpos_gradient_up_to_the_weights():
    given = step_inputs(0.0, [1.0, -2.0, 0.5, -0.5])
    plain = gradient(given, grpo)
    assert plain.abs().max() > 0 and torch.equal(gradient(given, dppo), plain)
    weights = given.noise / given.jacobian
    torch.testing.assert_close(gradient(given, grpo_guard), weights[:, None] * plain, rtol=1e-12, atol=0)
    weighted = dataclasses.replace(given, advantages=given.advantages * weights)
    torch.testing.assert_close(gradient(weighted, grpo), weights[:, None] * plain, rtol=1e-12, atol=0)


def test_terms_of_a_loss_per_reward_are_those_of_the_sum():
    given = step_inputs(0.3, [1.0, -2.0, 0.5, -0.5], beta=0.7)
    columns = dataclasses.replace(given, advantages=torch.stack([given.advantages, -given.advantages], 1))
    output = loss_per_reward(dppo, [0.5, 2.0])(columns)
    terms = output.metrics["loss/policy"] + output.metrics["loss/kl"]
    assert output.loss.item() == pytest.approx(terms.item(), rel=1e-12) and output.metrics["loss/kl"] > 0


# Weights of the steps


def weighted(name, **settings):
    policy, inputs = make_policy(sde_type=settings.pop("process", "flow_sde"))
    settings = {"seeds": SEEDS, "num_inference_steps": 6, "is_complete": False} | settings
    _, trajectory = rollout(policy, inputs, step_weight=name, **settings)
    return policy, inputs, trajectory


@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "wan_sde", "cps", "precise"])
@pytest.mark.parametrize("name", [name for name in STEP_WEIGHTS if name != "none"])
def test_weights_are_those_of_their_papers(process, name):
    policy, inputs, trajectory = weighted(name, process=process)
    expected, reach = [], []
    for step in range(5):
        now = replay(policy, inputs, trajectory, step)
        (slope,) = torch.autograd.grad(now.log_prob[0], now.mean, retain_graph=True)
        moved = (slope[0] * now.std**2 / (trajectory.next_latents[0, step] - now.mean[0])).mean()  # 1 / n
        assert moved.item() * now.mean[0].numel() == pytest.approx(1, rel=1e-3)
        std, jacobian = now.std.double().flatten()[0], now.scale.jacobian[0].double()
        reach.append(std / jacobian)
        expected.append(2.25 * std if name == "noise" else std / jacobian)
    expected = torch.stack(expected)
    if name == "velocity":
        expected = expected / torch.stack(reach).mean()
        assert trajectory.step_weights.mean(1).tolist() == pytest.approx([1, 1])
        size = trajectory.step_weights[0].double() / torch.stack(reach)  # weight * |J| / std
        torch.testing.assert_close(size, size[:1].expand(5), rtol=1e-5, atol=0)
    torch.testing.assert_close(trajectory.step_weights.double(), expected.expand(2, 5), rtol=1e-4, atol=0)


def test_a_step_drawn_from_the_window_has_its_weight_in_the_window():
    """Though no other is trained or has noise: over many rollouts all steps then count alike."""
    every = weighted("velocity")[2].step_weights[0]
    own = weighted("velocity", steps=[[1], [3]], noise_steps=[1, 3], weighted_steps=range(5), is_complete=True)[2]
    torch.testing.assert_close(own.step_weights, every[[1, 3]][:, None])
    window = weighted("velocity", steps=[[1], [2]], weighted_steps=range(1, 3), is_complete=True)[2]
    torch.testing.assert_close(window.step_weights[:, 0], every[1:3] / every[1:3].mean())
    assert weighted("none")[2].step_weights is None


def test_video_and_sound_weigh_as_one_step():
    policy, inputs = make_policy("ltx2")
    settings = {"seeds": SEEDS, "num_inference_steps": 4, "is_complete": False}
    _, trajectory = rollout(policy, inputs, step_weight="guard", keeps_means=True, **settings)
    for step in range(3):
        now = replay(policy, inputs, trajectory, step)
        assert now.prediction.shape == now.mean.shape and now.scale.moving.tolist() == [now.mean[0].numel()] * 2
        torch.testing.assert_close(trajectory.step_weights[:, step], now.scale.std / now.scale.jacobian)
        assert torch.equal(trajectory.means[:, step], now.mean)


# The algorithm around them


def part_of(policy, inputs, trajectory, advantages):
    log_probs = trajectory.log_probs
    rows = [{}] * len(trajectory)
    return Part(rows, trajectory, torch.tensor(advantages), log_probs, lambda rows: inputs)


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard", "dppo"])
def test_the_weight_multiplies_the_policy_term_alone(loss):
    policy, inputs, trajectory = weighted("velocity")
    plain = dataclasses.replace(trajectory, step_weights=None)
    algorithm = load_algorithm(loss, anchor="own")
    for step in (0, 4):
        once, other = (
            algorithm.loss(policy, None, part_of(policy, inputs, each, [1.0, -0.5]), step)
            for each in (plain, trajectory)
        )
        weight = trajectory.step_weights[0, step].item()
        assert other.metrics["ratio/mean"] == 1 and weight != pytest.approx(1, abs=0.05)
        name = f"grad_size/step_{step:02d}"
        assert other.metrics["loss/policy"] == pytest.approx(weight * once.metrics["loss/policy"], rel=1e-5)
        assert other.metrics[name] == pytest.approx(weight * once.metrics[name], rel=1e-5) and once.metrics[name] > 0


class Shifted:
    """A reference whose means are some way off."""

    def __init__(self, policy):
        self.policy = policy

    @torch.no_grad()
    def replay(self, **arguments):
        now = self.policy.replay(**arguments)
        return dataclasses.replace(now, mean=now.mean + 0.01)


@pytest.mark.parametrize(("name", "loss", "beta"), [("sd3", "grpo", 0.0), ("ltx2", "grpo_guard", 0.5)])
def test_the_logged_size_is_that_of_the_gradient_at_the_predictions(monkeypatch, name, loss, beta):
    """At all of them together: LTX-2 makes video and sound."""
    pipe, inputs = tiny_pipelines.build(name)
    policy, handed = DenoisingPolicy(pipe), []
    settings = {"seeds": SEEDS, "num_inference_steps": 4, "is_complete": False, "keeps_means": True}
    _, trajectory = rollout(policy, inputs, **settings)
    kind = type(policy.scheduler)
    real = kind.distribution

    def watched(scheduler, prediction, *rest):
        handed.append(prediction)
        return real(scheduler, prediction, *rest)

    monkeypatch.setattr(kind, "distribution", watched)
    algorithm = load_algorithm(loss, anchor="own", beta=beta)
    part = part_of(policy, inputs, trajectory, [1.0, -0.5])
    output = algorithm.loss(policy, Shifted(policy) if beta else None, part, 1)
    found = torch.autograd.grad(output.loss, [prediction for prediction in handed if prediction.requires_grad])
    expected = torch.cat([part.flatten(1) for part in found], 1).norm(dim=1).mean().item()
    assert len(found) == (2 if name == "ltx2" else 1) and output.metrics["grad_size/step_01"] == pytest.approx(
        expected, rel=1e-4
    )


class Fixed:
    """A policy or a reference that replays one given distribution."""

    def __init__(self, now):
        self.now = now

    def replay(self, **arguments):
        return self.now


def distribution(prediction, log_prob=0.0):
    """A step of 400 numbers whose mean is 0.2 * prediction, with std 0.5; of each sample, if given a list."""
    prediction = torch.tensor(prediction).view(-1, 1).repeat(1, 400).requires_grad_()
    scale = StepScale(*(torch.tensor([value] * len(prediction)) for value in (0.5, 0.2, 400.0)))
    mean, kept = 0.2 * prediction, prediction.detach()
    return StepDistribution(mean, torch.tensor(0.5), mean.mean(1) * 0 + log_prob, scale, kept, velocity=kept)


def test_the_prediction_is_compared_with_the_references():
    """Of the samples that count."""
    _, inputs, trajectory = weighted("none")
    now, reference = Fixed(distribution([1.2, 1.6])), Fixed(distribution([1.0, 1.0]))
    part = part_of(None, inputs, trajectory, [1.0, 0.0])
    part.weights = torch.tensor([2.0, 0.0])
    output = GRPO(beta=0.1).loss(now, reference, part, 0)
    assert output.metrics["velocity/ratio_to_ref"] == pytest.approx(1.2)
    assert "velocity/ratio_to_ref" not in GRPO().loss(now, reference, part, 0).metrics  # it is not asked


@pytest.mark.parametrize("name", ["sd15", "cogvideox", "kandinsky_prior", "svd", "sd3"])
def test_what_is_compared_is_v_whatever_the_network_predicts(name):
    """Of epsilon, v, clean sample, EDM and velocity, in float64: v = a noise - b data where x = a data + b noise."""
    policy, inputs = make_policy(name)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4, is_complete=False)
    scheduler = policy.scheduler
    for step in (0, 2):
        now = replay(policy, inputs, trajectory, step)
        prediction, x = now.prediction.double(), trajectory.latents[:, step].double()
        if name == "sd3":
            expected = prediction  # noise - data
        else:
            if name == "svd":
                alpha = 1 / (1 + scheduler.sigmas[step].double() ** 2)
            else:
                alpha = scheduler.alphas_cumprod[scheduler.timesteps[step]].double()
            a, b = alpha.sqrt(), (1 - alpha).sqrt()
            x = a * x if name == "svd" else x
            kinds = {"epsilon": (x - b * prediction) / a, "v_prediction": a * x - b * prediction, "sample": prediction}
            data = kinds[scheduler.config.prediction_type]
            expected = a * (x - a * data) / b - b * data
        size = float(expected.abs().max())
        torch.testing.assert_close(now.velocity.double(), expected, rtol=1e-4, atol=1e-5 * size)
        assert not now.velocity.requires_grad
        twice = dataclasses.replace(now, velocity=2 * now.velocity)
        assert twice.compare(now)["velocity/ratio_to_ref"].tolist() == pytest.approx([2, 2])


# How far a replay may be from the rollout


def checked(drift, algorithm):
    """What the check after one pass gives, where the replay's log-probability is off by log(1 + drift)."""
    _, inputs, trajectory = weighted("none", num_inference_steps=3)
    part = part_of(None, inputs, trajectory[[0]], [1.0])
    part.old_log_probs = part.old_log_probs + 1.0  # of a replay: what counts is the rollout
    now = distribution(1.2, float(trajectory.log_probs[0, 0]) + math.log1p(drift))
    return algorithm.check(SimpleNamespace(is_on_policy=True), algorithm.loss(Fixed(now), None, part, 0).drift)


def test_in_half_precision_rounding_is_warned_of_once_and_more_than_that_stops(caplog):
    # |J| / std * rms(prediction) * 0.25 = 0.2 / 0.5 * 1.2 / 4 = 0.12
    bound = math.expm1(0.12**2 / 2 + 6 * 0.12 / math.sqrt(400))
    algorithm = GRPO(is_half_precision=True, anchor="own")
    checked(5e-5, algorithm)
    assert not caplog.records
    for _ in range(2):
        assert checked(0.98 * bound, algorithm)["ratio/max_error"] == pytest.approx(0.98 * bound, rel=1e-4)
    assert len(caplog.records) == 1 and "rounding in half precision explains" in caplog.text
    for drift in (1.02 * bound, float("nan")):
        with pytest.raises(RatioError, match="than half precision explains"):
            checked(drift, algorithm)
        checked(5e-5, algorithm)  # what is found is forgotten
