"""Mixins for consistency samplers: each step jumps to the clean sample and noises it again to the next level.

Such a step is a Gaussian, so it can be trained like any other (https://huggingface.co/papers/2404.03673). Where a step
is to be the same for all samples of an initial latent, its noise is drawn from the seed of that latent: the samples
are still those of the pipeline's own sampler.
"""

from typing import Any

import torch
from diffusers import CMStochasticIterativeScheduler, FlowMatchLCMScheduler, LCMScheduler, SchedulerMixin, TCDScheduler
from diffusers.schedulers import SCMScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from .sde import MeanStd
from .stochastic_steps import CleanEstimate, FlowSteps, PreservingSteps, StochasticScheduler
from .trajectory import make_generators, sample_seed


class ConsistencySteps(StochasticScheduler):
    """The base: a subclass gives the predicted clean sample and the levels of the schedule."""

    coordinates = "consistency"

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        """Step as in [`StochasticScheduler`]; a tuple's second value is the clean sample once the loop is over."""
        latents = super().step(model_output, timestep, sample, *args, return_dict=False, **kwargs)[0]
        return SchedulerOutput(prev_sample=latents) if return_dict else (latents, latents)

    def next_level(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return both factors after the current step; the last leaves the clean sample."""
        if self.index < self.loop_length - 1:
            return self.level(self.position + 1, sample)
        return torch.ones((), device=sample.device), torch.zeros((), device=sample.device)

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        return self.distribution(prediction, timestep, sample, 0.0)[0].to(sample.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        clean = self.denoise(prediction, timestep, sample).clean
        shared = self._shared_noise(sample) if noise_level < 1 else torch.zeros_like(clean)
        return self.sde(clean, shared, *self.next_level(sample), noise_level=noise_level)

    def _shared_noise(self, sample: Tensor) -> Tensor:
        """Return the noise, (batch, ...), that this step has for all samples of an initial latent."""
        seeds = [0] * len(sample) if self.driver is None else self.driver.initial_seeds.tolist()
        seeds = torch.tensor([sample_seed(seed, "consistency", self.position) for seed in seeds])
        noise = [torch.randn(sample.shape[1:], generator=generator) for generator in make_generators(seeds)]
        return torch.stack(noise * (len(sample) // len(noise))).to(sample.device)


class LCMSteps(ConsistencySteps, PreservingSteps):
    """Latent consistency models (https://huggingface.co/papers/2310.04378)."""

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        clean, _ = self.split(prediction, timestep, sample)
        if self.config.thresholding:
            clean = self._threshold_sample(clean)
        elif self.config.clip_sample:
            clean = clean.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)
        skip, out = self.get_scalings_for_boundary_condition_discrete(int(timestep))
        return self.estimate(out * clean + skip * sample.float(), timestep, sample)


class TCDSteps(ConsistencySteps, PreservingSteps):
    """Trajectory consistency (https://huggingface.co/papers/2402.19159): jumps part of the way, to add less noise."""

    coordinates = "trajectory"

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        is_last = self.index == self.loop_length - 1
        timestep_next = 0 if is_last else int(self.timesteps[self.position + 1])
        alpha_next = self.alpha(timestep_next, sample)
        # rounded as in diffusers, in float32
        alpha_between = self.alpha(torch.floor((1 - noise_level) * torch.tensor(timestep_next)), sample)
        return self.sde(*self.split(prediction, timestep, sample), alpha_next, alpha_between, noise_level=noise_level)


class SCMSteps(ConsistencySteps):
    """Continuous-time consistency (sCM, https://huggingface.co/papers/2410.11081) in angles: cos data + sin noise."""

    @property
    def loop_length(self) -> int:
        return len(self.timesteps) - 1 - self.first  # the schedule ends with the angle of the clean sample

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.timesteps[position].to(device=sample.device, dtype=torch.float32)
        return angle.cos(), angle.sin() * self.config.sigma_data

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        angle, sample = self.timesteps[self.position].to(device=sample.device, dtype=torch.float32), sample.float()
        clean = angle.cos() * sample - angle.sin() * prediction.float()
        return CleanEstimate(clean, angle.sin(), angle.cos() * sample)


class FlowConsistencySteps(ConsistencySteps, FlowSteps):
    """Consistency models of flow matching: (1 - sigma) * data + sigma * noise."""


class EDMConsistencySteps(ConsistencySteps):
    """Consistency models in EDM's coordinates (https://huggingface.co/papers/2303.01469): data + sigma * noise."""

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        least, most = self.config.sigma_min, self.config.sigma_max
        sigma = self.sigmas[position].to(device=sample.device, dtype=torch.float32).clamp(least, most)
        return torch.ones_like(sigma), (sigma**2 - least**2).sqrt() * self.config.s_noise

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        sigma, sample = self.sigmas[self.position].to(device=sample.device, dtype=torch.float32), sample.float()
        skip, out = self.get_scalings_for_boundary_condition(sigma)
        clean = out * prediction.float() + skip * sample
        clean = clean.clamp(-1, 1) if self.config.clip_denoised else clean
        return CleanEstimate.at_sigma(clean, sigma, sample)


CONSISTENCY_STEPS: dict[type[SchedulerMixin], type[StochasticScheduler]] = {
    LCMScheduler: LCMSteps,
    TCDScheduler: TCDSteps,
    SCMScheduler: SCMSteps,
    FlowMatchLCMScheduler: FlowConsistencySteps,
    CMStochasticIterativeScheduler: EDMConsistencySteps,
}
