"""Processes that turn a deterministic sampler into a stochastic policy, and the diffusers scheduler that runs them.

In: what the pipeline hands to `scheduler.step` (a prediction) and the latent it was made for. Out: mean and standard
deviation of the next latent. One pure float32 function a process; to add a process, add a function and a line in
`PROCESSES`. `stochastic_scheduler` wraps any diffusers scheduler, keeping its class, its config and its schedule, so
that a pipeline cannot tell the difference; who drives the steps (a rollout or a replay) is decided in `rollout.py`.
"""

import copy
import functools
import math
from typing import Any, Protocol

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

MeanStd = tuple[Tensor, Tensor]


def log_density(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Gaussian log-density of `value` (batch, ...), averaged over all but the batch dimension. Returns (batch,).

    The average, not the sum: at the sizes of latents a sum turns rounding into ratios far from 1.
    """
    density = -((value - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


def flow_sde(
    prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float, sigma_max: Tensor
) -> MeanStd:
    """Flow-GRPO's reverse SDE (https://huggingface.co/papers/2505.05470).

    Args:
        prediction: velocity v = noise - data at `sigma`, (batch, ...).
        sample: latent x at `sigma`, (batch, ...).
        sigma, sigma_next: noise levels in [0, 1], `sigma_next < sigma`; 0-dimensional or broadcastable to `sample`.
        noise_level: the paper's a.
        sigma_max: stands in for `sigma` in 1 - sigma where `sigma` is (almost) 1, usually the schedule's second sigma.
    """
    dt = sigma_next - sigma
    # solvers start the schedule at 1 or just below it, where 1 - sigma would blow the noise up
    bounded = torch.where(sigma > 0.99, torch.minimum(sigma, sigma_max), sigma)
    g = noise_level * torch.sqrt(sigma / (1 - bounded))
    mean = sample * (1 + g**2 / (2 * sigma) * dt) + prediction * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * torch.sqrt(-dt)


def dance_sde(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """DanceGRPO's SDE with constant noise (https://huggingface.co/papers/2505.07818); `noise_level` is its eta.

    Arguments as in [`flow_sde`].
    """
    dt = sigma_next - sigma
    clean = sample - sigma * prediction
    score = -(sample - (1 - sigma) * clean) / sigma**2
    mean = sample + prediction * dt - 0.5 * noise_level**2 * score * dt
    return mean, noise_level * torch.sqrt(-dt)


def cps(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """Coefficients-Preserving Sampling (https://huggingface.co/papers/2509.05952); `noise_level` in [0, 1].

    Fresh noise replaces predicted noise, so that each latent keeps exactly the noise its sigma says. Arguments as in
    [`flow_sde`].
    """
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = sample - sigma * prediction
    noise = sample + (1 - sigma) * prediction
    return (1 - sigma_next) * clean + torch.sqrt(sigma_next**2 - std**2) * noise, std


def ddim(
    prediction: Tensor,
    sample: Tensor,
    alpha_cumprod: Tensor,
    alpha_cumprod_next: Tensor,
    *,
    noise_level: float,
    prediction_type: str = "epsilon",
    clip_range: float | None = None,
) -> MeanStd:
    """DDIM with eta = `noise_level` (https://huggingface.co/papers/2010.02502), as DDPO trains it
    (https://huggingface.co/papers/2305.13301).

    Args:
        prediction: noise, v or clean sample at the current step, (batch, ...).
        sample: latent at the current step, (batch, ...).
        alpha_cumprod, alpha_cumprod_next: cumulative alphas of this step and of the one it leads to, in (0, 1].
        noise_level: eta; 1 gives DDPM's variance.
        prediction_type: "epsilon", "v_prediction" or "sample".
        clip_range: bound of the predicted clean sample, where the scheduler's config asks for one.
    """
    alpha, beta = alpha_cumprod, 1 - alpha_cumprod
    if prediction_type == "epsilon":
        clean, noise = (sample - beta.sqrt() * prediction) / alpha.sqrt(), prediction
    elif prediction_type == "v_prediction":
        clean = alpha.sqrt() * sample - beta.sqrt() * prediction
        noise = alpha.sqrt() * prediction + beta.sqrt() * sample
    elif prediction_type == "sample":
        clean, noise = prediction, (sample - alpha.sqrt() * prediction) / beta.sqrt()
    else:
        raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}.")
    if clip_range is not None:
        clean = clean.clamp(-clip_range, clip_range)
    beta_next = 1 - alpha_cumprod_next
    std = noise_level * torch.sqrt(beta_next / beta * (1 - alpha / alpha_cumprod_next))
    # clamped: with eta 1 from pure noise the root is 0, and rounding may put it below
    return alpha_cumprod_next.sqrt() * clean + torch.sqrt((beta_next - std**2).clamp(min=0)) * noise, std


FLOW_PROCESSES = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps}
PROCESSES = {**FLOW_PROCESSES, "ddim": ddim}
DEFAULT_NOISE_LEVELS = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8, "ddim": 1.0}

_FLOW_SCHEDULERS = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler)
_FLOW_CAPABLE = (
    UniPCMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    DEISMultistepScheduler,
)
_VARIANCE_PRESERVING = (
    DDIMScheduler,
    DDPMScheduler,
    PNDMScheduler,
    EulerDiscreteScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    *_FLOW_CAPABLE,
)


class UnsupportedScheduler(ValueError):
    """The pipeline's scheduler does not take Gaussian steps that this library knows how to score."""


class StepDriver(Protocol):
    """Decides what each step of a stochastic scheduler does: see `rollout.py` for the two there are."""

    def step(self, scheduler: "StochasticScheduler", index: int, prediction: Tensor, timestep: Any, sample: Tensor):
        """Return the latent after step `index` (counted from 0 in this call of the pipeline)."""


class StochasticScheduler:
    """Mixin in front of a diffusers scheduler: the schedule stays the original's, `step` asks the driver.

    Attributes:
        process: name of the process, a key of `PROCESSES`.
        driver: who decides what a step does; without one, steps are deterministic.
    """

    process: str
    driver: StepDriver | None = None
    index: int = 0
    first: int | None = None

    @property
    def position(self) -> int:
        """Where the current step stands in the whole schedule; image-to-image starts in the middle."""
        return self.first + self.index

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        """diffusers' `step`: the driver chooses the next latent. Returns `SchedulerOutput` or a tuple of one."""
        if self.first is None:
            self.first = self._first_position(timestep)
        if self.driver is None:
            latents = self.deterministic(model_output, timestep, sample)
        else:
            latents = self.driver.step(self, self.index, model_output, timestep, sample)
        self.index += 1
        self._step_index = self.position  # pipelines that mix in noise between steps read it
        return SchedulerOutput(prev_sample=latents) if return_dict else (latents,)

    def _first_position(self, timestep: Any) -> int:
        if self.begin_index is not None:
            return self.begin_index
        return int((self.timesteps == timestep).nonzero()[0])

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """The step without noise, (batch, ...) in the dtype of the pipeline."""
        raise NotImplementedError

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        """Mean (batch, ...) and std of the next latent, float32, with the gradient of `prediction`."""
        raise NotImplementedError


class _FlowScheduler(StochasticScheduler):
    def _sigmas(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        sigmas = self.sigmas.to(device=device, dtype=torch.float32)
        return sigmas[self.position], sigmas[self.position + 1], sigmas[1]

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        sigma, sigma_next, _ = self._sigmas(sample.device)
        # FlowMatchEulerDiscreteScheduler's own arithmetic: products in the prediction's dtype, the sum in float32
        return (sample.to(torch.float32) + (sigma_next - sigma) * prediction).to(prediction.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        sigma, sigma_next, sigma_max = self._sigmas(sample.device)
        prediction, sample = prediction.float(), sample.float()
        if self.config.get("invert_sigmas"):  # Mochi counts from data to noise
            sigma, sigma_next, sigma_max, prediction = 1 - sigma, 1 - sigma_next, 1 - sigma_max, -prediction
        extra = {"sigma_max": sigma_max} if self.process == "flow_sde" else {}
        process = FLOW_PROCESSES[self.process]
        return process(prediction, sample, sigma, sigma_next, noise_level=noise_level, **extra)


class _DDIMScheduler(StochasticScheduler):
    begin_index = None

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        return super(StochasticScheduler, self).step(prediction, timestep, sample, return_dict=False)[0]

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        alphas = self.alphas_cumprod.to(device=sample.device, dtype=torch.float32)
        timestep_next = int(timestep) - self.config.num_train_timesteps // self.num_inference_steps
        alpha_next = alphas[timestep_next] if timestep_next >= 0 else self.final_alpha_cumprod.to(alphas)
        return ddim(
            prediction.float(),
            sample.float(),
            alphas[int(timestep)],
            alpha_next,
            noise_level=noise_level,
            prediction_type=self.config.prediction_type,
            clip_range=self.config.clip_sample_range if self._clips else None,
        )

    @property
    def _clips(self) -> bool:
        # CogVideoX's scheduler has the option in its config and never reads it
        return self.config.clip_sample and not isinstance(self, CogVideoXDDIMScheduler)


@functools.cache
def _stochastic_class(kind: type, base: type) -> type:
    @functools.wraps(base.set_timesteps)  # pipelines look at the signature for `sigmas`, `timesteps` and `mu`
    def set_timesteps(self, *args, **kwargs):
        base.set_timesteps(self, *args, **kwargs)
        self.index, self.first = 0, None

    return type(f"Stochastic{base.__name__}", (kind, base), {"set_timesteps": set_timesteps})


def _is_flow(scheduler: SchedulerMixin) -> bool:
    if isinstance(scheduler, _FLOW_SCHEDULERS):
        return True
    return isinstance(scheduler, _FLOW_CAPABLE) and scheduler.config.prediction_type == "flow_prediction"


def _is_beyond_ddim(scheduler: SchedulerMixin) -> bool:
    """Dynamic thresholds and EDM's continuous timesteps have no counterpart in the `ddim` process."""
    return bool(scheduler.config.get("thresholding")) or scheduler.config.get("timestep_type") == "continuous"


def stochastic_scheduler(scheduler: SchedulerMixin, process: str = "auto") -> StochasticScheduler:
    """The scheduler to train with: the same schedule as `scheduler`, with `process` on top.

    Flow matching (Euler, Heun, or UniPC, DPM-Solver and DEIS set to flow prediction) keeps its own class, sigmas and
    shift. Variance-preserving schedulers become DDIM built from their config.

    Args:
        scheduler: the pipeline's own scheduler; it is not modified.
        process: a key of `PROCESSES`, or "auto": `flow_sde` for flow matching, `ddim` otherwise.

    Raises:
        ValueError: unknown process, or one that does not fit the scheduler.
        UnsupportedScheduler: the scheduler takes no Gaussian steps that are known here.
    """
    name = type(scheduler).__name__
    if process != "auto" and process not in PROCESSES:
        raise ValueError(f"sde_type must be auto or one of {', '.join(PROCESSES)}, got {process!r}.")
    if _is_flow(scheduler):
        kind, base, fitting = _FlowScheduler, type(scheduler), list(FLOW_PROCESSES)
        if isinstance(scheduler, FlowMatchHeunDiscreteScheduler):
            base = FlowMatchEulerDiscreteScheduler
        config = dict(scheduler.config)
    elif isinstance(scheduler, (CogVideoXDDIMScheduler, CogVideoXDPMScheduler)):
        kind, base, fitting, config = _DDIMScheduler, CogVideoXDDIMScheduler, ["ddim"], dict(scheduler.config)
    elif isinstance(scheduler, _VARIANCE_PRESERVING) and not _is_beyond_ddim(scheduler):
        # DDIM clips by default; only a config that says so may
        kind, base, fitting, config = (
            _DDIMScheduler,
            DDIMScheduler,
            ["ddim"],
            {"clip_sample": False, **scheduler.config},
        )
    else:
        raise UnsupportedScheduler(
            f"{name} takes no Gaussian steps that can be scored here; give the pipeline a flow-matching Euler, UniPC, "
            "DPM-Solver, DDIM, DDPM, PNDM or Euler scheduler."
        )
    if process != "auto" and process not in fitting:
        raise ValueError(f"sde_type={process!r} does not fit {name}; use auto or one of {', '.join(fitting)}.")
    if base is type(scheduler):  # with all that was set on it after it was built, such as set_shift
        stochastic = copy.copy(scheduler)
        stochastic.__class__ = _stochastic_class(kind, base)
    else:
        stochastic = _stochastic_class(kind, base).from_config(config)
    stochastic.process = fitting[0] if process == "auto" else process
    return stochastic
