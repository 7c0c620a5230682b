"""Schedulers whose steps ask a driver: their place in the schedule, and what they hand on."""

import copy

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from diffusion_grpo.policy.schedulers import stochastic_scheduler
from diffusion_grpo.policy.stochastic_steps import CleanEstimate, UnsupportedScheduler


class Driver:
    """Notes the steps that it is asked for, and leaves zeros."""

    def __init__(self):
        self.steps = []

    def step(self, scheduler, index, prediction, timestep, sample):
        self.steps.append((index, scheduler.position, dict(scheduler.options)))
        return torch.zeros_like(sample)


def flow(steps=4, begin=None, **config):
    scheduler = stochastic_scheduler(FlowMatchEulerDiscreteScheduler(**config))
    scheduler.set_timesteps(steps)
    if begin is not None:
        scheduler.set_begin_index(begin)
    return scheduler


def test_a_driver_chooses_the_next_latent():
    scheduler, driver = flow(), Driver()
    scheduler.driver = driver
    sample = torch.ones(2, 3)
    for timestep in scheduler.timesteps:
        assert torch.equal(scheduler.step(sample, timestep, sample, return_dict=False)[0], torch.zeros(2, 3))
    assert [(index, position) for index, position, _ in driver.steps] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert scheduler.loop_length == 4


@pytest.mark.parametrize("told", [True, False], ids=["begin index", "timestep"])
def test_a_loop_may_start_in_the_middle_of_the_schedule(told):
    scheduler, driver = flow(begin=2 if told else None), Driver()
    scheduler.driver = driver
    for timestep in scheduler.timesteps[2:]:
        scheduler.step(torch.ones(1, 3), timestep, torch.ones(1, 3))
    assert [(index, position) for index, position, _ in driver.steps] == [(0, 2), (1, 3)]
    assert scheduler.loop_length == 2


def test_arguments_of_a_step_are_seen_in_it_and_gone_after_it():
    scheduler, driver = flow(), Driver()
    scheduler.driver = driver
    scheduler.step(torch.ones(1, 3), scheduler.timesteps[0], torch.ones(1, 3), generator=None, s_churn=0.1)
    assert driver.steps[0][2] == {"s_churn": 0.1} and scheduler.options == {}


def test_without_a_driver_a_step_is_deterministic_and_a_copy_keeps_its_place():
    scheduler = flow()
    sample, velocity = torch.randn(2, 3), torch.randn(2, 3)
    sigma, sigma_next = scheduler.sigmas[0], scheduler.sigmas[1]
    found = scheduler.step(velocity, scheduler.timesteps[0], sample).prev_sample
    torch.testing.assert_close(found, sample + (sigma_next - sigma) * velocity)
    assert copy.deepcopy(scheduler).position == scheduler.position == 1


def test_a_distribution_keeps_the_gradient_and_its_density_is_that_of_the_process():
    scheduler = flow()
    scheduler.step(torch.zeros(1, 3), scheduler.timesteps[0], torch.zeros(1, 3))
    prediction = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    mean, std = scheduler.distribution(prediction, scheduler.timesteps[1], torch.randn(2, 3), 0.7)
    assert mean.dtype == torch.float32 and std > 0 and mean.requires_grad
    value = torch.randn(2, 3)
    expected = torch.distributions.Normal(mean, std).log_prob(value).mean(1)
    torch.testing.assert_close(scheduler.log_prob(value, mean, std), expected)


def test_sigmas_above_one_do_not_fit_a_flow():
    scheduler = flow()
    scheduler.sigmas = scheduler.sigmas * 3
    scheduler.step(torch.zeros(1, 3), scheduler.timesteps[0], torch.zeros(1, 3))
    with pytest.raises(UnsupportedScheduler, match="runs through sigma .* need sigmas between 0 and 1"):
        scheduler.distribution(torch.zeros(1, 3), scheduler.timesteps[1], torch.zeros(1, 3), 0.7)


def test_ddim_steps_leave_out_a_learned_variance():
    scheduler = stochastic_scheduler(DDIMScheduler(clip_sample=False))
    scheduler.set_timesteps(4)
    sample, noise = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    both = torch.cat([noise, torch.full_like(noise, 9.0)], dim=1)
    timestep = scheduler.timesteps[1]
    means = [scheduler.distribution(given, timestep, sample, 1.0)[0] for given in (noise, both)]
    assert torch.equal(*means)


def test_elements_that_a_step_does_not_move_have_no_velocity():
    parts = torch.tensor([[1.0, 2.0]]), torch.tensor(0.5), torch.zeros(1, 2)  # clean, sigma, origin
    assert CleanEstimate(*parts).velocity().tolist() == [[-2.0, -4.0]]
    assert CleanEstimate(*parts, moves=torch.tensor([[True, False]])).velocity().tolist() == [[-2.0, 0.0]]
