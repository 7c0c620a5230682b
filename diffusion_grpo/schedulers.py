"""The diffusers scheduler that runs a stochastic process.

In: a pipeline's scheduler. Out: one that keeps its class, its config and its schedule where it can, so that a pipeline
cannot tell the difference, and whose `step` asks a driver for the next latent; who drives (a rollout or a replay) is
decided in `rollout.py`, the arithmetic stands in `processes.py`.
"""

import copy
import functools
import inspect
from typing import Any, Protocol

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CosineDPMSolverMultistepScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    SchedulerMixin,
    UnCLIPScheduler,
    UniPCMultistepScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from .processes import (
    DEFAULT_NOISE_LEVELS,
    FLOW_PROCESSES,
    PROCESSES,
    MeanStd,
    ancestral,
    cps,
    dance_sde,
    ddim,
    flow_sde,
    log_density,
)

__all__ = [
    "DEFAULT_NOISE_LEVELS",
    "PROCESSES",
    "StochasticScheduler",
    "UnsupportedScheduler",
    "ancestral",
    "cps",
    "dance_sde",
    "ddim",
    "flow_sde",
    "log_density",
    "stochastic_scheduler",
]

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
    UnCLIPScheduler,
    *_FLOW_CAPABLE,
)
_EDM = (EDMEulerScheduler, EDMDPMSolverMultistepScheduler, CosineDPMSolverMultistepScheduler)
_DDIM_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
_CONSISTENCY = "is a consistency sampler: its steps jump to the clean sample and add all of the next noise anew"
_REFUSED = {  # part of a scheduler's name -> why it cannot be scored
    "LCM": _CONSISTENCY,
    "TCD": _CONSISTENCY,
    "CMStochastic": _CONSISTENCY,
    "SCM": _CONSISTENCY,
    "FlowMap": "is a flow-map sampler: its network predicts the jump between two given times, not a velocity",
    "Amused": "draws discrete tokens, which have no Gaussian density",
    "VQDiffusion": "draws discrete tokens, which have no Gaussian density",
    "Helios": "belongs to a rollout over chunks that build on each other, whose steps cannot be replayed one by one",
    "RePaint": "jumps back and forth in time and draws its own noise on the way",
}


class UnsupportedScheduler(ValueError):
    """The pipeline's scheduler does not take Gaussian steps that this library knows how to score."""


class StepDriver(Protocol):
    """Decides what each step of a stochastic scheduler does: see `rollout.py` for the two there are."""

    def step(self, scheduler: "StochasticScheduler", index: int, prediction: Tensor, timestep: Any, sample: Tensor):
        """Return the latent after step `index` (counted from 0 in this call of the pipeline)."""


class StochasticScheduler:
    """Mixin in front of a diffusers scheduler: the schedule stays the original's, `step` asks the driver.

    What the class in use lacks and the original has (`sigmas`, `variance_type`, ...) is the original's.

    Attributes:
        process: name of the process, a key of `PROCESSES`.
        driver: who decides what a step does; without one, steps are deterministic. Copies share it.
        original: a copy of the pipeline's own scheduler, with the same timesteps set.
    """

    process: str
    driver: StepDriver | None = None
    original: SchedulerMixin | None = None
    index: int = 0
    first: int | None = None
    options: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None or name.startswith("__") or not hasattr(original, name):
                raise
            return getattr(original, name)

    def __deepcopy__(self, memo: dict) -> "StochasticScheduler":
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__ = {k: v if k == "driver" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()}
        return clone

    @property
    def position(self) -> int:
        """Where the current step stands in the whole schedule; image-to-image starts in the middle."""
        return self.first + self.index

    @property
    def loop_length(self) -> int:
        """Steps of this loop; known from its first step on."""
        return len(self.timesteps) - self.first

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The class's own scaling of the network's input, or none."""
        scale = getattr(super(), "scale_model_input", None)
        return sample if scale is None else scale(sample, *args, **kwargs)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        """diffusers' `step`: the driver chooses the next latent. Returns `SchedulerOutput` or a tuple of one."""
        if self.first is None:
            self.first = self._first_position(timestep)
        self._step_index = self.position
        self.options = {name: value for name, value in kwargs.items() if value is not None}
        if self.driver is None:
            latents = self.deterministic(model_output, timestep, sample)
        else:
            latents = self.driver.step(self, self.index, model_output, timestep, sample)
        self.options = {}
        self.index += 1
        self._step_index = self.position  # pipelines that mix in noise between steps read it
        return SchedulerOutput(prev_sample=latents) if return_dict else (latents,)

    def _first_position(self, timestep: Any) -> int:
        if self.begin_index is not None:
            return self.begin_index
        if torch.is_tensor(timestep) and timestep.ndim:
            timestep = timestep.flatten()[0]
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

    def _token_sigmas(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Sigmas where each token has its own timestep: (batch, tokens, 1), the next one is the schedule's below."""
        schedule = self.sigmas.to(device=device, dtype=torch.float32)
        now = self.options["per_token_timesteps"].to(schedule) / self.config.num_train_timesteps
        below = torch.where(schedule[:, None, None] < now[None] - 1e-6, schedule[:, None, None], 0.0)
        return now[..., None], below.amax(0)[..., None], schedule[1]

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if "per_token_timesteps" in self.options:
            sigma_next, sigma, _ = self._token_sigmas(sample.device)  # diffusers turns the sign of the step here
        else:
            sigma, sigma_next, _ = self._sigmas(sample.device)
        # FlowMatchEulerDiscreteScheduler's own arithmetic: products in the prediction's dtype, the sum in float32
        return (sample.to(torch.float32) + (sigma_next - sigma) * prediction).to(prediction.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        sigma, sigma_next, sigma_max = self._sigmas(sample.device)
        prediction, sample = prediction.float(), sample.float()
        if self.config.get("invert_sigmas"):  # Mochi counts from data to noise
            sigma, sigma_next, sigma_max, prediction = 1 - sigma, 1 - sigma_next, 1 - sigma_max, -prediction
        process = FLOW_PROCESSES[self.process]
        if sigma > 1:
            raise UnsupportedScheduler(
                f"{type(self).__bases__[1].__name__} runs through sigma {float(sigma):.3g} here, but the processes of "
                "flow matching need sigmas between 0 and 1."
            )
        if "per_token_timesteps" in self.options:
            sigma, sigma_next, sigma_max = self._token_sigmas(sample.device)
            still = sigma_next >= sigma  # a condition's tokens: clean from the start
            sigma, sigma_next = torch.where(still, 1.0, sigma), torch.where(still, 0.5, sigma_next)
            extra = {"sigma_max": sigma_max} if self.process == "flow_sde" else {}
            mean, std = process(-prediction, sample, sigma, sigma_next, noise_level=noise_level, **extra)
            return torch.where(still, sample, mean), torch.where(still, 0.0, std)
        extra = {"sigma_max": sigma_max} if self.process == "flow_sde" else {}
        return process(prediction, sample, sigma, sigma_next, noise_level=noise_level, **extra)


class _DDIMScheduler(StochasticScheduler):
    begin_index = None

    def _prediction(self, prediction: Tensor, sample: Tensor) -> Tensor:
        """Without the learned variance that some networks predict beside it: DDIM's variance is given by eta."""
        learns_variance = prediction.ndim > 1 and prediction.shape[1] == 2 * sample.shape[1]
        return prediction.chunk(2, dim=1)[0] if learns_variance else prediction

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        prediction = self._prediction(prediction, sample)
        return super(StochasticScheduler, self).step(prediction, timestep, sample, return_dict=False)[0]

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        alphas = self.alphas_cumprod.to(device=sample.device, dtype=torch.float32)
        timestep_next = int(timestep) - self.config.num_train_timesteps // self.num_inference_steps
        alpha_next = alphas[timestep_next] if timestep_next >= 0 else self.final_alpha_cumprod.to(alphas)
        return ddim(
            self._prediction(prediction, sample).float(),
            sample.float(),
            alphas[int(timestep)],
            alpha_next,
            noise_level=noise_level,
            prediction_type=self.config.prediction_type,
            clip=self._clip if self._clips else None,
        )

    @property
    def _clips(self) -> bool:
        # CogVideoX's scheduler has the option in its config and never reads it
        if isinstance(self, CogVideoXDDIMScheduler):
            return False
        return bool(self.config.clip_sample or self.config.thresholding)

    def _clip(self, clean: Tensor) -> Tensor:
        if self.config.thresholding:
            return self._threshold_sample(clean)
        return clean.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)


class _CosineScheduler(StochasticScheduler):
    """Stable Cascade's: time runs from 1 to 0, and so does what each latent keeps of the data."""

    begin_index = None

    def _alphas(self, timestep: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, *[1] * (sample.ndim - 1))
        timestep_next = self.previous_timestep(timestep).to(timestep)
        alphas = [self._alpha_cumprod(t, sample.device).float().view(shape) for t in (timestep, timestep_next)]
        return alphas[0], alphas[1]

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        return self.distribution(prediction, timestep, sample, 0.0)[0].to(sample.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        return ddim(prediction.float(), sample.float(), *self._alphas(timestep, sample), noise_level=noise_level)


class _SigmaScheduler(StochasticScheduler):
    """Latents are data + sigma * noise: EDM, and Euler with continuous timesteps."""

    def _clean(self, prediction: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        if "pred_original_sample" in self.options:  # Cosmos preconditions by itself
            return self.options["pred_original_sample"].float()
        if isinstance(self, _EDM):
            return self.precondition_outputs(sample, prediction, sigma)
        if self.config.prediction_type == "epsilon":
            return sample - sigma * prediction
        if self.config.prediction_type == "v_prediction":
            return prediction * (-sigma / (sigma**2 + 1) ** 0.5) + (sample / (sigma**2 + 1))
        return prediction

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if isinstance(self, (EulerDiscreteScheduler, EDMEulerScheduler)):
            given = {k: v for k, v in self.options.items() if k == "pred_original_sample"}
            return super(StochasticScheduler, self).step(prediction, timestep, sample, return_dict=False, **given)[0]
        return self.distribution(prediction, timestep, sample, 0.0)[0].to(sample.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        sigmas = self.sigmas.to(device=sample.device, dtype=torch.float32)
        sigma, sigma_next = sigmas[self.position], sigmas[self.position + 1]
        prediction, sample = prediction.float(), sample.float()
        return ancestral(self._clean(prediction, sample, sigma), sample, sigma, sigma_next, noise_level=noise_level)


@functools.cache
def _stochastic_class(kind: type, base: type) -> type:
    own = inspect.signature(base.set_timesteps).parameters

    @functools.wraps(base.set_timesteps)  # pipelines look at the signature for `sigmas`, `timesteps` and `mu`
    def set_timesteps(self, *args, **kwargs):
        base.set_timesteps(self, *args, **kwargs)
        self.index, self.first = 0, None
        if self.original is not None:  # whose sigmas a pipeline may read
            theirs = inspect.signature(self.original.set_timesteps).parameters
            named = dict(zip(list(own)[1:], args, strict=False)) | kwargs
            self.original.set_timesteps(**{name: value for name, value in named.items() if name in theirs})

    return type(f"Stochastic{base.__name__}", (kind, base), {"set_timesteps": set_timesteps})


def _is_flow(scheduler: SchedulerMixin) -> bool:
    if isinstance(scheduler, _FLOW_SCHEDULERS):
        return True
    return isinstance(scheduler, _FLOW_CAPABLE) and scheduler.config.prediction_type == "flow_prediction"


def _kind(scheduler: SchedulerMixin) -> tuple[type, type, list[str]] | None:
    """Mixin, diffusers class and processes for a scheduler; None where there are none."""
    if _is_flow(scheduler):
        is_heun = isinstance(scheduler, FlowMatchHeunDiscreteScheduler)
        base = FlowMatchEulerDiscreteScheduler if is_heun else type(scheduler)
        return _FlowScheduler, base, list(FLOW_PROCESSES)
    if isinstance(scheduler, (CogVideoXDDIMScheduler, CogVideoXDPMScheduler)):
        return _DDIMScheduler, CogVideoXDDIMScheduler, ["ddim"]
    if isinstance(scheduler, _EDM):
        return _SigmaScheduler, type(scheduler), ["ancestral"]
    if isinstance(scheduler, DDPMWuerstchenScheduler):
        return _CosineScheduler, type(scheduler), ["ddim"]
    if isinstance(scheduler, EulerDiscreteScheduler) and scheduler.config.timestep_type == "continuous":
        return _SigmaScheduler, type(scheduler), ["ancestral"]
    if isinstance(scheduler, _VARIANCE_PRESERVING):
        return _DDIMScheduler, DDIMScheduler, ["ddim"]
    return None


def _refusal(scheduler: SchedulerMixin) -> UnsupportedScheduler:
    name = type(scheduler).__name__
    reasons = [reason for part, reason in _REFUSED.items() if name.startswith(part)]
    if reasons:
        return UnsupportedScheduler(f"{name} {reasons[0]}.")
    return UnsupportedScheduler(
        f"{name} takes no Gaussian steps that can be scored here; give the pipeline a flow-matching Euler, UniPC, "
        "DPM-Solver, DDIM, DDPM, PNDM or Euler scheduler."
    )


def _ddim_config(scheduler: SchedulerMixin) -> dict[str, Any]:
    """A config from which DDIM gets the noise schedule of any variance-preserving scheduler."""
    config = {"clip_sample": False, **scheduler.config}  # DDIM clips by default; only a config that says so may
    if config.get("beta_schedule", "linear") not in _DDIM_BETA_SCHEDULES:
        config["trained_betas"] = scheduler.betas.tolist()
        config["_use_default_values"] = ()  # or from_config would drop what was left at its default before
    return config


def stochastic_scheduler(scheduler: SchedulerMixin, process: str = "auto") -> StochasticScheduler:
    """The scheduler to train with: the same schedule as `scheduler`, with `process` on top.

    Flow matching (Euler, Heun, or UniPC, DPM-Solver and DEIS set to flow prediction), EDM and Euler with continuous
    timesteps keep their own class, sigmas and shift. Other variance-preserving schedulers become DDIM built from their
    config.

    Args:
        scheduler: the pipeline's own scheduler; it is not modified.
        process: a key of `PROCESSES`, or "auto": `flow_sde` for flow matching, `ancestral` for EDM, `ddim` otherwise.

    Raises:
        ValueError: unknown process, or one that does not fit the scheduler.
        UnsupportedScheduler: the scheduler takes no Gaussian steps that are known here.
    """
    name = type(scheduler).__name__
    if process != "auto" and process not in PROCESSES:
        raise ValueError(f"sde_type must be auto or one of {', '.join(PROCESSES)}, got {process!r}.")
    found = _kind(scheduler)
    if found is None:
        raise _refusal(scheduler)
    kind, base, fitting = found
    if process != "auto" and process not in fitting:
        raise ValueError(f"sde_type={process!r} does not fit {name}; use auto or one of {', '.join(fitting)}.")
    if base is type(scheduler):  # with all that was set on it after it was built, such as set_shift
        stochastic = copy.copy(scheduler)
        stochastic.__class__ = _stochastic_class(kind, base)
    else:
        config = _ddim_config(scheduler) if base is DDIMScheduler else dict(scheduler.config)
        stochastic = _stochastic_class(kind, base).from_config(config)
        stochastic.original = copy.deepcopy(scheduler)
    stochastic.process = fitting[0] if process == "auto" else process
    return stochastic
