"""Draw seeds and trained steps of a rollout's samples; they depend only on the run's seed and on positions."""

import dataclasses
import random

import torch
from torch import Tensor

from ..config.settings import DiffusionGRPOConfig
from ..policy.trajectory import choose_trained_steps, sample_seed


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """The seeds and trained steps of each sample of one process.

    Attributes:
        seeds: (samples,) int64 seeds for the noise of the steps, or for the noise that is added to finished samples.
        initial_seeds: (samples,) int64 seeds for the initial latent.
        steps: trained steps of each sample.
        noise_steps: steps of each sample that draw noise; None for all steps but the last.
        prefix_lengths: number of steps that each sample shares with all samples of the same initial latent; they also
            share the network call of the step after these. None if each sample makes all calls itself.
    """

    seeds: Tensor
    initial_seeds: Tensor
    steps: list[list[int]]
    noise_steps: list[range] | None
    prefix_lengths: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """Plan that draws seeds and steps for every rollout of a run.

    Attributes:
        seed: seed of the run.
        num_generations: number of samples per prompt.
        num_inference_steps: number of denoising steps.
        window: range [start, stop) of the steps that may be trained.
        window_size: number of consecutive steps in the window that a sample may train; None for all.
        window_order: how these steps are chosen: "random", drawn for each rollout; "per_prompt", drawn for each prompt
            of a rollout (Flash-GRPO, https://huggingface.co/papers/2605.15980); "sliding", moved by one step every
            `window_interval` updates, from the window's start to its end and over again (MixGRPO,
            https://huggingface.co/papers/2507.21802).
        window_interval: number of updates between two moves of a sliding window.
        updates_per_rollout: number of updates made on each rollout.
        timestep_fraction: share of the window's steps that are trained.
        permute_steps: whether each sample draws its own trained steps.
        same_initial_noise: whether all samples of a prompt start from the same initial latent.
        branches: number of samples that share an initial latent; None if each sample has its own.
        shares_calls: whether samples of one initial latent share the network calls up to their first noise.
        deterministic_outside_window: whether steps outside the window draw no noise.
        is_renoised: whether finished samples are noised again; the drawn steps are then spread over the window, one
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
    window_order: str = "random"
    window_interval: int = 25
    updates_per_rollout: int = 1
    same_initial_noise: bool = False
    branches: int | None = None
    shares_calls: bool = False
    deterministic_outside_window: bool = False
    is_renoised: bool = False
    shares_noise: bool = False

    def draw_window(self, generation: int, prompt: int = 0) -> tuple[int, int]:
        """Return the range [start, stop) of steps that samples may train: the window, or a part of it.

        Args:
            generation: index of the rollout.
            prompt: index of the prompt in the rollout; used if each prompt has its own window.
        """
        first, end = self.window
        if self.window_size is None:
            return first, end
        last = end - self.window_size
        if self.window_order == "sliding":
            moves = generation * self.updates_per_rollout // self.window_interval
            start = first + moves % (last - first + 1)
        else:
            name = f"window {self.seed} {generation}" + (f" {prompt}" if self.window_order == "per_prompt" else "")
            start = random.Random(name).randint(first, last)
        return start, start + self.window_size

    def latent_of(self, position: int) -> int:
        """Return the first position that shares its initial latent with `position`."""
        sharing = self.num_generations if self.same_initial_noise else self.branches or 1
        return position // sharing * sharing

    def draw(self, generation: int, positions: Tensor) -> RolloutPlan:
        """Draw seeds and steps of the samples at `positions` of one rollout."""
        drawn = positions.tolist()
        noisy = (positions // self.num_generations if self.shares_noise else positions).tolist()
        seeds = torch.tensor([sample_seed(self.seed, "noise", generation, position) for position in noisy])
        windows = [self.draw_window(generation, position // self.num_generations) for position in drawn]
        steps = [
            choose_trained_steps(
                self.num_inference_steps,
                window,
                self.timestep_fraction,
                seed[None] if self.permute_steps else None,
                is_stratified=self.is_renoised,
            )[0]
            for window, seed in zip(windows, seeds, strict=True)
        ]
        return RolloutPlan(
            seeds,
            torch.tensor([self._initial_seed(generation, position) for position in drawn]),
            steps,
            [range(*window) for window in windows] if self.deterministic_outside_window else None,
            self._count_shared_steps(windows),
        )

    def _count_shared_steps(self, windows: list[tuple[int, int]]) -> list[int] | None:
        """Return the number of steps before each sample's first noise; None if nothing is shared."""
        if not self.shares_calls:
            return None
        return [start if self.deterministic_outside_window else 0 for start, _ in windows]

    def _initial_seed(self, generation: int, position: int) -> int:
        if self.same_initial_noise:  # keeps the seeds of earlier versions
            return sample_seed(self.seed, "initial", generation, position // self.num_generations)
        return sample_seed(self.seed, "initial", generation, self.latent_of(position))


def make_sampling_plan(args: DiffusionGRPOConfig) -> SamplingPlan:
    """Make the plan of seeds and steps for rollouts."""
    return SamplingPlan(
        seed=args.seed,
        num_generations=args.num_generations,
        num_inference_steps=args.num_inference_steps,
        window=args.window,
        window_size=args.window_size,
        window_order=args.sde_window_order,
        window_interval=args.sde_window_interval,
        updates_per_rollout=args.batch_sizes.updates_per_rollout,
        timestep_fraction=args.timestep_fraction,
        permute_steps=args.permute_steps,
        same_initial_noise=args.shares_initial_noise,
        branches=args.branches,
        shares_calls=args.shares_calls,
        deterministic_outside_window=args.silent_outside_window,
        is_renoised=args.is_renoised,
        shares_noise=args.recording.shares_noise,
    )
