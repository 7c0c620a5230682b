"""What docs/coming_from/flow_grpo.md promises, against the reference systems' arithmetic written out in float64."""

import math

import pytest
import tiny_pipelines
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny_runs import PROMPTS, brightness, joined_trajectory, logged, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.algorithms.losses import kl_divergence
from diffusion_grpo.policy.drivers import Recorder
from diffusion_grpo.policy.rollout import DenoisingPolicy, rollout
from diffusion_grpo.policy.schedulers import stochastic_scheduler
from diffusion_grpo.policy.sde import cps, log_density, squared_error
from diffusion_grpo.policy.trajectory import RolloutRequest

SEEDS = [1, 2]
SHAPE = (3, 4, 2, 2)


def sigmas_of(steps, **config):
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.double()


# The log-probability of CPS


def their_cps(prediction, sample, sigma, sigma_next, level):
    """Flow-GRPO's `sde_type == 'cps'`: mean, std, and minus the squared distance as the log-probability."""
    std = sigma_next * math.sin(level * math.pi / 2)
    clean, noise = sample - sigma * prediction, sample + prediction * (1 - sigma)
    mean = clean * (1 - sigma_next) + noise * torch.sqrt(sigma_next**2 - std**2)
    return mean, std, lambda value: -((value - mean) ** 2).mean((1, 2, 3))


@pytest.mark.parametrize("step", [0, 4, 8])
def test_flow_grpos_log_probability_of_cps(step):
    sigma, sigma_next = sigmas_of(10, shift=3.0)[step : step + 2]
    torch.manual_seed(step)
    sample, prediction, other, noise = torch.randn(4, *SHAPE, dtype=torch.float64)
    prediction.requires_grad_()
    mean, std, score = their_cps(prediction, sample, sigma, sigma_next, 0.8)
    value = (mean + std * noise).detach()
    ours, own_std = cps(prediction, sample, sigma, sigma_next, noise_level=0.8)
    torch.testing.assert_close(squared_error(value, ours, own_std), score(value), rtol=1e-12, atol=0)

    gradients = [
        torch.autograd.grad(form(value, ours, own_std).sum(), prediction, retain_graph=True)[0]
        for form in (squared_error, log_density)
    ]
    torch.testing.assert_close(gradients[0], 2 * std**2 * gradients[1], rtol=1e-9, atol=0)
    # a ratio of theirs is ours to the power of 2 std^2, so that their clip range c is c / (2 std^2) here
    ref_mean, _, _ = their_cps(other, sample, sigma, sigma_next, 0.8)
    moved = [form(value, ref_mean, own_std) - form(value, ours, own_std) for form in (squared_error, log_density)]
    torch.testing.assert_close(moved[0], 2 * std**2 * moved[1], rtol=1e-9, atol=1e-12)
    # and their KL is ours: beta needs no factor
    theirs = ((mean - ref_mean) ** 2).mean((1, 2, 3)) / (2 * std**2)
    torch.testing.assert_close(kl_divergence(ours, ref_mean, own_std), theirs, rtol=1e-9, atol=0)


def test_what_is_held_fixed_does_not_count_in_a_squared_error():
    value, mean = torch.tensor([[1.0, 5.0], [2.0, 9.0]]), torch.zeros(2, 2)
    assert squared_error(value, mean, torch.tensor([1.0, 0.0])).tolist() == [-1.0, -4.0]


def test_the_setting_reaches_the_ratio(tmp_path):
    settings = {"sde_type": "cps", "max_steps": 1}
    forms = [trainer_for(tmp_path / form, log_prob_type=form, **settings) for form in ("gaussian", "squared_error")]
    for trainer in forms:
        trainer.train()
        assert logged(trainer, "ratio/max_error") == [0.0]
    gaussian, squared = (joined_trajectory(trainer) for trainer in forms)
    assert torch.equal(gaussian.next_latents, squared.next_latents)  # the rollout is the same
    assert (squared.log_probs < 0).all() and not torch.allclose(gaussian.log_probs, squared.log_probs)
    assert logged(forms[0], "grad_norm") != logged(forms[1], "grad_norm")


# Noise in the last step


@pytest.mark.parametrize("process", ["flow_sde", "dance_sde"])
def test_noise_in_the_last_step_is_one_more_step_of_the_process(process):
    pipe, inputs = tiny_pipelines.build("sd3")
    policy, made = DenoisingPolicy(pipe, sde_type=process), []
    for last in (False, True):
        latents = []
        call = dict(seeds=[11, 12], initial_seeds=SEEDS, num_inference_steps=4, noise_level=0.5)
        _, trajectory = rollout(policy, inputs, noise_in_last_step=last, latents=latents, is_decoded=False, **call)
        made.append((torch.stack(latents).double(), trajectory))
    (plain, before), (noisy, after) = made
    assert torch.equal(before.next_latents, after.next_latents) and torch.equal(before.log_probs, after.log_probs)
    assert after.steps.tolist() == [[0, 1, 2]] * 2  # it is never trained

    sigmas = policy.scheduler.sigmas.double()
    x, sigma = after.next_latents[:, -1].double(), sigmas[3]
    velocity = (x - plain) / sigma  # the step without noise is Euler's
    clean = x - sigma * velocity
    score = -(x - (1 - sigma) * clean) / sigma**2
    g = 0.5 * (torch.sqrt(sigma / (1 - sigma)) if process == "flow_sde" else 1)
    mean = x - sigma * (velocity - g**2 / 2 * score)
    noise = []
    for seed in (11, 12):
        generator = torch.Generator().manual_seed(seed)
        noise.append([torch.randn(x.shape[1:], generator=generator) for _ in range(4)][-1])
    expected = mean + g * torch.sqrt(sigma) * torch.stack(noise).double()
    torch.testing.assert_close(noisy, expected, rtol=1e-4, atol=1e-4)
    assert (noisy - plain).abs().max() > 0.01


@pytest.mark.parametrize(("name", "process"), [("sd3", "cps"), ("sd3", "precise"), ("cosmos", "ancestral")])
def test_processes_whose_noise_vanishes_have_none_in_the_last_step(name, process):
    pipe, inputs = tiny_pipelines.build(name)
    policy, made = DenoisingPolicy(pipe, sde_type=process), []
    for last in (False, True):
        call = dict(seeds=SEEDS, num_inference_steps=3, noise_in_last_step=last, is_decoded=False)
        latents = []
        rollout(policy, inputs, latents=latents, **call)
        made.append(torch.stack(latents))
    assert made[0].isfinite().all() and torch.equal(*made)


def steps_of_a_loop(begin, noise_steps, noise_in_last_step):
    """Which steps of a loop of 6 that begins at `begin` drew noise."""
    scheduler = stochastic_scheduler(FlowMatchEulerDiscreteScheduler(shift=3.0))
    scheduler.set_timesteps(6)
    scheduler.set_begin_index(begin)
    seeds = torch.tensor(SEEDS)
    noisy = None if noise_steps is None else [noise_steps] * 2
    settings = {"steps": [[0], [0]], "noise_steps": noisy, "noise_in_last_step": noise_in_last_step}
    scheduler.driver = Recorder(RolloutRequest(seeds, seeds, 6, **settings), 0.7)
    x, prediction, drawn = torch.ones(2, 1, 2, 2), torch.zeros(2, 1, 2, 2), set()
    for index, timestep in enumerate(scheduler.timesteps[begin:]):
        after = scheduler.step(prediction, timestep, x, return_dict=False)[0]
        drawn |= {index} if not torch.equal(after, x) else set()
    return drawn


@pytest.mark.parametrize("noise_steps", [None, set(range(6))], ids=["default", "all"])
@pytest.mark.parametrize("begin", [0, 2])
def test_the_last_step_of_a_loop_is_where_it_ends(begin, noise_steps):
    """Image-to-image begins in the middle, so that its last step has another number than `num_inference_steps` - 1."""
    every = set(range(6 - begin))
    assert steps_of_a_loop(begin, noise_steps, False) == every - {5 - begin}
    assert steps_of_a_loop(begin, noise_steps, True) == every
    assert steps_of_a_loop(0, {0, 1, 2}, True) == {0, 1, 2}  # a window


# Samples whose advantage is 0


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the first update."""

    def __init__(self):
        self.gradients = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_group_of_equals(images, prompts, **columns):
    """Rewards of the first prompt differ, those of the others are equal."""
    values = brightness(images)
    return [value if prompt == PROMPTS[0] else 1.0 for value, prompt in zip(values, prompts, strict=True)]


def test_dropping_a_group_of_equals_doubles_what_the_other_says(tmp_path):
    gradients = []
    for drop in (False, True):
        keep = KeepGradients()
        settings = {"drop_zero_advantages": drop, "max_steps": 1, "max_grad_norm": 0, "beta": 0.1}
        settings |= {"shuffle_dataset": False, "callbacks": [keep]}
        trainer = trainer_for(tmp_path / str(drop), rewards=one_group_of_equals, **settings)
        trainer.train()
        assert logged(trainer, "frac_reward_zero_std") == [0.5] and logged(trainer, "ratio/max_error") == [0.0]
        gradients.append(keep.gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], 2 * gradient, rtol=1e-4, atol=1e-9)
