"""Seeds and trained steps of the samples of a rollout; they depend only on the run's seed and on positions."""

import dataclasses
import random

import torch
from torch import Tensor

from ..policy.trajectory import sample_seed, trained_steps


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """The seeds and trained steps of each sample of one process.

    Attributes:
        seeds: (samples,) int64, for the noise of the steps, or that is added to finished samples.
        initial_seeds: (samples,) int64, for the initial latent.
        steps: trained steps of each sample.
        noise_steps: steps that draw noise; None for all but the last.
    """

    seeds: Tensor
    initial_seeds: Tensor
    steps: list[list[int]]
    noise_steps: range | None


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """Draws seeds and steps for every rollout of a run.

    Attributes:
        seed: of the run.
        num_generations: samples of each prompt.
        num_inference_steps: length of the loop.
        window: [start, stop) of the steps that may be trained.
        window_size: number of consecutive steps in it that each rollout trains, drawn anew; None for all.
        timestep_fraction: share of the window's steps that is trained.
        permute_steps: whether each sample draws its own trained steps.
        same_initial_noise: whether all samples of a prompt start from the same initial latent.
        deterministic_outside_window: whether steps outside the window draw no noise.
        is_renoised: whether finished samples are noised again: the drawn steps are spread over the window then, one
            from each of as many equal parts.
        shares_noise: whether re-noised samples of a prompt share noise and steps.
    """

    seed: int
    num_generations: int
    num_inference_steps: int
    window: tuple[int, int]
    window_size: int | None = None
    timestep_fraction: float = 1.0
    permute_steps: bool = False
    same_initial_noise: bool = False
    deterministic_outside_window: bool = False
    is_renoised: bool = False
    shares_noise: bool = False

    def draw_window(self, generation: int) -> tuple[int, int]:
        """Return [start, stop) of the steps that one rollout may train: the window, or a random part of it."""
        start, stop = self.window
        if self.window_size is None:
            return start, stop
        start = random.Random(f"window {self.seed} {generation}").randint(start, stop - self.window_size)
        return start, start + self.window_size

    def draw(self, generation: int, positions: Tensor) -> RolloutPlan:
        """Return seeds and steps of the samples at `positions` of one rollout."""
        start, stop = self.draw_window(generation)
        drawn = positions // self.num_generations if self.shares_noise else positions
        noise = [sample_seed(self.seed, "noise", generation, position) for position in drawn.tolist()]
        shared = positions // self.num_generations if self.same_initial_noise else positions
        initial = [sample_seed(self.seed, "initial", generation, position) for position in shared.tolist()]
        seeds = torch.tensor(noise)
        steps = trained_steps(
            self.num_inference_steps,
            (start, stop),
            self.timestep_fraction,
            seeds if self.permute_steps else None,
            is_stratified=self.is_renoised,
        )
        return RolloutPlan(
            seeds,
            torch.tensor(initial),
            steps if self.permute_steps else steps * len(positions),
            range(start, stop) if self.deterministic_outside_window else None,
        )
