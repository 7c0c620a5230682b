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


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """Plan that draws seeds and steps for every rollout of a run; the settings of these names say more."""

    seed: int
    num_generations: int
    num_inference_steps: int
    trainable_steps: range
    num_trained_steps: int
    step_selection: str = "rollout"
    step_interval: int = 25
    updates_per_rollout: int = 1
    samples_per_latent: int = 1
    shares_calls: bool = False
    is_noise_limited: bool = False
    is_renoised: bool = False
    shares_noise: bool = False

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


def make_sampling_plan(args: DiffusionGRPOConfig) -> SamplingPlan:
    """Make the plan of seeds and steps for rollouts."""
    return SamplingPlan(
        seed=args.seed,
        num_generations=args.num_generations,
        num_inference_steps=args.num_inference_steps,
        trainable_steps=args.trainable_steps,
        num_trained_steps=args.trained_count,
        step_selection=args.step_selection,
        step_interval=args.step_interval,
        updates_per_rollout=args.batch_sizes.updates_per_rollout,
        samples_per_latent=args.latent_sharing,
        shares_calls=args.shares_calls,
        is_noise_limited=args.is_noise_limited,
        is_renoised=args.is_renoised,
        shares_noise=args.recording.shares_noise,
    )
