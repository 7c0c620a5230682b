"""A scheduler whose steps are known, a loop over it, and what a recorder makes of that."""

import torch

from diffusion_grpo.policy.drivers import Recorder
from diffusion_grpo.policy.stochastic_steps import CleanEstimate
from diffusion_grpo.policy.trajectory import RolloutRequest, StepScale

SEEDS = torch.tensor([3, 4])
STD = 0.5


class HalfSteps:
    """A scheduler that halves its latents, and whose log-density is the negative mean squared distance."""

    gets_more_of_network = False

    def __init__(self, loop_length=4):
        self.loop_length = loop_length

    def deterministic(self, prediction, timestep, sample):
        return sample / 2

    def distribution(self, prediction, timestep, sample, noise_level):
        return sample.float() / 2, torch.tensor(STD)

    def denoise(self, prediction, timestep, sample):
        return CleanEstimate(sample - prediction, torch.ones(()), sample)

    def scale(self, timestep, sample, noise_level, count=None):
        return StepScale(torch.full((len(sample),), STD), torch.ones(len(sample)), torch.ones(len(sample)))

    def log_prob(self, next_latents, mean, std):
        return -((next_latents - mean) ** 2).flatten(1).mean(1)


def run(driver, scheduler, latents):
    """Pass a loop; return what each step left."""
    left = []
    for index in range(scheduler.loop_length):
        latents = driver.step(scheduler, index, latents, None, latents)
        left.append(latents)
    return left


def record(latents=None, **settings):
    recorder = Recorder(RolloutRequest(SEEDS, SEEDS + 10, 4, **settings), 0.7)
    return recorder, run(recorder, HalfSteps(), torch.ones(2, 3) if latents is None else latents)
