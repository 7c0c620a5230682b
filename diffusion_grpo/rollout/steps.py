"""Draw seeds and trained steps of a rollout's samples; they depend only on the run's seed and on positions."""

import dataclasses
import random

import torch
from torch import Tensor

from ..config.settings import DiffusionGRPOConfig
from ..policy.trajectory import make_generators, sample_seed


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """The (samples,) int64 seeds and the trained steps of each sample of one process."""

    seeds: Tensor
    initial_seeds: Tensor
    steps: list[list[int]]
    noise_steps: list[range] | None
    prefix_lengths: list[int] | None = None


class SamplingPlan:
    """Plan that draws seeds and steps for every rollout of a run."""

    def __init__(self, args: DiffusionGRPOConfig):
        self.seed, self.num_generations, self.samples_per_latent = args.seed, args.num_generations, args.latent_sharing
        self.trainable_steps, self.num_trained_steps = args.trainable_steps, args.trained_count
        self.step_selection, self.step_interval = args.step_selection, args.step_interval
        self.updates_per_rollout, self.shares_calls = args.batch_sizes.updates_per_rollout, args.shares_calls
        self.is_noise_limited, self.is_renoised = args.is_noise_limited, args.is_renoised
        self.shares_noise = args.recording.shares_noise

    def draw_steps(self, generation: int, prompt: int = 0) -> range:
        """Draw the consecutive steps that hold the trained ones of a prompt's samples, in rollout `generation`."""
        steps = self.trainable_steps
        if self.step_selection == "sample" or self.num_trained_steps == len(steps):
            return steps
        last = len(steps) - self.num_trained_steps
        if self.step_selection == "sliding":
            first = generation * self.updates_per_rollout // self.step_interval % (last + 1)
        else:
            name = f"window {self.seed} {generation}" + (f" {prompt}" if self.step_selection == "prompt" else "")
            first = random.Random(name).randint(0, last)
        return steps[first : first + self.num_trained_steps]

    def draw(self, generation: int, positions: Tensor) -> RolloutPlan:
        """Draw seeds and steps of the samples at `positions` of one rollout."""
        drawn = positions.tolist()
        noisy = (positions // self.num_generations if self.shares_noise else positions).tolist()
        seeds = torch.tensor([sample_seed(self.seed, "noise", generation, position) for position in noisy])
        latents = [position // self.samples_per_latent for position in drawn]
        held = [self.draw_steps(generation, position // self.num_generations) for position in drawn]
        draws = self.step_selection == "sample" and self.num_trained_steps < len(self.trainable_steps)
        return RolloutPlan(
            seeds,
            torch.tensor([sample_seed(self.seed, "initial", generation, latent) for latent in latents]),
            [
                choose_steps(steps, self.num_trained_steps, seed, self.is_renoised) if draws else list(steps)
                for steps, seed in zip(held, seeds.tolist(), strict=True)
            ],
            held if self.is_noise_limited else None,
            [steps.start if self.is_noise_limited else 0 for steps in held] if self.shares_calls else None,
        )


def choose_steps(steps: range, count: int, seed: int, is_stratified: bool = False) -> list[int]:
    """Draw `count` steps, ascending, all equally often; if stratified, one from each of as many equal parts."""
    (generator,) = make_generators(torch.tensor([seed]))
    if not is_stratified:
        return sorted(steps[index] for index in torch.randperm(len(steps), generator=generator)[:count].tolist())
    width = len(steps) / count  # parts of fractional length share edges, so one number places the steps of all
    places = torch.rand(count if width.is_integer() else 1, generator=generator).expand(count).tolist()
    return [steps[int((number + place) * width)] for number, place in enumerate(places)]
