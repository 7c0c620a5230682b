"""Mixins that make a diffusers scheduler stochastic: its schedule stays, its `step` asks a driver.

A driver (`drivers.py`) chooses the next latent; a mixin gives it mean and std, or the step without noise. There is one
mixin for each kind of coordinates. The arithmetic is in `sde.py`; `schedulers.py` chooses the mixin of a
scheduler.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CosineDPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
)
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from .sde import SDE, Coordinates, MeanStd, ancestral, ddim, split_prediction
from .trajectory import StepScale

EDM_SCHEDULERS = (EDMEulerScheduler, EDMDPMSolverMultistepScheduler, CosineDPMSolverMultistepScheduler)


class UnsupportedScheduler(ValueError):
    """The pipeline's scheduler does not take Gaussian steps that this library knows how to score.

    Examples:
        >>> from diffusers import HeliosScheduler
        >>> from diffusion_grpo.policy.schedulers import stochastic_scheduler
        >>> stochastic_scheduler(HeliosScheduler())
        Traceback (most recent call last):
        UnsupportedScheduler: HeliosScheduler belongs to a rollout over chunks ...
    """


class CleanEstimate(NamedTuple):
    """The clean sample that a step predicts, and its relation to the prediction, `v = (origin - clean) / sigma`.

    Attributes:
        clean: (batch, ...) float32, the predicted clean sample.
        origin: (batch, ...) starting point of `v`: the latent itself for flow matching.
        moves: (batch, ...) bool, True for elements that the step moves; None for all.
    """

    clean: Tensor
    sigma: Tensor
    origin: Tensor
    moves: Tensor | None = None

    @classmethod
    def at_sigma(cls, clean: Tensor, sigma: Tensor, sample: Tensor) -> "CleanEstimate":
        """Return the estimate for a latent that is data + sigma * noise."""
        return cls(clean, sigma / torch.sqrt(1 + sigma**2), sample / (1 + sigma**2))

    def velocity(self) -> Tensor:
        """Return `v`, (batch, ...) float32; 0 for elements that the step does not move."""
        velocity = (self.origin - self.clean) / self.sigma
        return velocity if self.moves is None else velocity * self.moves


class StochasticScheduler:
    """Mixin in front of a diffusers scheduler: it keeps the schedule, but `step` asks the driver."""

    coordinates: Coordinates
    sde: SDE
    log_prob: Callable[[Tensor, Tensor, Tensor], Tensor]  # of next latents, by mean and std: (batch,)
    driver: Any = None  # see `drivers.py`
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
        """The current step's index in the whole schedule; image-to-image starts in the middle."""
        return self.first + self.index

    @property
    def loop_length(self) -> int:
        """Number of steps of this loop, known from its first step on."""
        return len(self.timesteps) - self.first

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Scale the network's input if the class itself does."""
        scale = getattr(super(), "scale_model_input", None)
        return sample if scale is None else scale(sample, *args, **kwargs)

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        """Step as in diffusers, but let the driver choose the next latent. Return `SchedulerOutput` or a tuple."""
        self.locate(timestep)
        self._step_index = self.position
        self.options = {name: value for name, value in kwargs.items() if value is not None}
        try:
            if self.driver is None:
                latents = self.deterministic(model_output, timestep, sample)
            else:
                joined = self.driver.join_frames(sample)
                has_frames = joined is not sample
                prediction = model_output.unflatten(0, joined.shape[:2]) if has_frames else model_output
                latents = self.driver.step(self, self.index, prediction, timestep, joined)
                latents = latents.flatten(0, 1) if has_frames else latents
        finally:  # replays leave the pipeline here by an exception
            self.options = {}
        self.index += 1
        self._step_index = self.position  # read by pipelines that add noise between steps
        return SchedulerOutput(prev_sample=latents) if return_dict else (latents,)

    def locate(self, timestep: Any) -> None:
        """At the first step of the loop, note where in the schedule it starts."""
        if self.first is not None:
            return
        self.first = self.begin_index
        if self.first is None:
            if torch.is_tensor(timestep) and timestep.ndim:
                timestep = timestep.flatten()[0]
            self.first = int((self.timesteps == timestep).nonzero()[0])

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """Return the next latent without noise, (batch, ...) in the dtype of the pipeline."""
        raise NotImplementedError

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        """Return mean (batch, ...) and std of the next latent, float32, with the gradient of `prediction`."""
        raise NotImplementedError

    def unclipped(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        """Like `distribution`, but linear in the network's prediction: nothing is clipped or replaced."""
        return self.distribution(prediction, timestep, sample, noise_level)

    @property
    def gets_more_of_network(self) -> bool:
        """Whether the pipeline gives the current step more than the prediction of its network."""
        given = (value for name, value in self.options.items() if name != "per_token_timesteps")
        return any(torch.is_tensor(value) and value.ndim > 0 for value in given)  # scalars are times

    @torch.no_grad()
    def scale(self, timestep: Any, sample: Tensor, noise_level: float, count: int | None = None) -> StepScale:
        """Measure the scale of a step's noise and of its prediction's effect; neither depends on the prediction."""
        zeros = torch.zeros_like(sample, dtype=torch.float32)
        still, std = self.unclipped(zeros, timestep, zeros, noise_level)
        jacobian = (self.unclipped(zeros + 1, timestep, zeros, noise_level)[0] - still).abs()
        rows = slice(len(sample) if count is None else count)
        std, jacobian = (x.expand(sample.shape)[rows].flatten(1) for x in (std, jacobian))
        moves = (std > 0) | ((std == 0).all(1, keepdim=True))  # without noise, all elements count
        moving = moves.sum(1)
        return StepScale((std * moves).sum(1) / moving, (jacobian * moves).sum(1) / moving, moving.float())

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the clean sample and of the noise in the input of a step of the schedule; float32."""
        raise NotImplementedError

    def renoise(self, clean: Tensor, noise: Tensor, sample: Tensor, index: int) -> Tensor:
        """Return clean samples noised to the level of the input of step `index` of the loop; float32.

        Elements that are held fixed are taken from `sample`, the input of the current step.
        """
        signal, deviation = self.level(self.first + index, sample)
        return signal * clean + deviation * noise

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        """Return the clean sample that the current step predicts, float32, with the gradient of `prediction`."""
        raise NotImplementedError

    @torch.no_grad()
    def clean_at_zero(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """Return the clean sample that follows from a prediction of 0; float32."""
        with self._ignoring_options():
            return self.denoise(torch.zeros_like(prediction), timestep, sample).clean

    @contextlib.contextmanager
    def _ignoring_options(self) -> Iterator[None]:
        """Ignore the options of the current step, in which Cosmos gives a clean sample made by the network."""
        options, self.options = self.options, {}
        try:
            yield
        finally:
            self.options = options


class FlowSteps(StochasticScheduler):
    """Latents are (1 - sigma) * data + sigma * noise: flow matching, with sigmas of the step or of each token."""

    coordinates = "flow"

    def _sigmas(self, device: torch.device) -> tuple[Tensor, Tensor]:
        sigmas = self.sigmas.to(device=device, dtype=torch.float32)
        return sigmas[self.position], sigmas[self.position + 1]

    def _token_sigmas(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return this and the next sigma of each token, (batch, tokens, 1), if each token has a timestep."""
        schedule = self.sigmas.to(device=device, dtype=torch.float32)
        now = self.options["per_token_timesteps"].to(schedule) / self.config.num_train_timesteps
        below = torch.where(schedule[:, None, None] < now[None] - 1e-6, schedule[:, None, None], 0.0)
        return now[..., None], below.amax(0)[..., None]

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if "per_token_timesteps" in self.options:
            sigma_next, sigma = self._token_sigmas(sample.device)  # diffusers inverts the sign of the step here
        else:
            sigma, sigma_next = self._sigmas(sample.device)
        # FlowMatchEulerDiscreteScheduler's own arithmetic: products in the prediction's dtype, the sum in float32
        return (sample.to(torch.float32) + (sigma_next - sigma) * prediction).to(prediction.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        sigma, sigma_next = self._sigmas(sample.device)
        prediction, sample = prediction.float(), sample.float()
        schedule = self.sigmas.to(sigma)
        ends = {"sigma_max": schedule[1], "sigma_min": schedule[-1]}  # keywords that are offered to SDEs
        if self.config.get("invert_sigmas"):  # Mochi's sigmas run from data to noise
            sigma, sigma_next, prediction = 1 - sigma, 1 - sigma_next, -prediction
            ends = {name: 1 - value for name, value in ends.items()}
        if sigma > 1:
            raise UnsupportedScheduler(
                f"{type(self).__bases__[1].__name__} runs through sigma {float(sigma):.3g} here, but the SDEs of "
                "flow matching need sigmas between 0 and 1."
            )
        if "per_token_timesteps" in self.options:
            sigma, sigma_next = self._token_sigmas(sample.device)
            still = sigma_next >= sigma  # tokens of a condition are clean from the start
            sigma, sigma_next = torch.where(still, 1.0, sigma), torch.where(still, 0.5, sigma_next)
            mean, std = self.sde(-prediction, sample, sigma, sigma_next, noise_level=noise_level, **ends)
            return torch.where(still, sample, mean), torch.where(still, 0.0, std)
        return self.sde(prediction, sample, sigma, sigma_next, noise_level=noise_level, **ends)

    def _held_tokens(self, sample: Tensor) -> Tensor | None:
        """Return which tokens are held fixed, (batch, tokens, 1) bool; None without a timestep per token."""
        if "per_token_timesteps" not in self.options:
            return None
        sigma, sigma_next = self._token_sigmas(sample.device)
        return sigma_next >= sigma

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        sigma = self.sigmas[position].to(device=sample.device, dtype=torch.float32)
        sigma = 1 - sigma if self.config.get("invert_sigmas") else sigma
        return 1 - sigma, sigma

    def renoise(self, clean: Tensor, noise: Tensor, sample: Tensor, index: int) -> Tensor:
        noised, held = super().renoise(clean, noise, sample, index), self._held_tokens(sample)
        return noised if held is None else torch.where(held, sample.float(), noised)

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        prediction, sample = prediction.float(), sample.float()
        (_, sigma), held = self.level(self.position, sample), self._held_tokens(sample)
        if self.config.get("invert_sigmas") or held is not None:  # both invert the sign of the step
            prediction = -prediction
        moves = None if held is None else ~held.expand(sample.shape)
        return CleanEstimate(sample - sigma * prediction, sigma, sample, moves)


class FlowMapSteps(FlowSteps):
    """The same for a network that predicts the jump to the next time, which is the step without noise (AnyFlow)."""

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        sigma, sigma_next = self.sigmas[self.position : self.position + 2]  # float64, as is diffusers' own step
        return (sample - (sigma - sigma_next) * prediction.to(sigma.dtype)).to(prediction.dtype)


class PackedFlowSteps(FlowSteps):
    """The same for one sample without an axis of the batch, and a prediction that points to the data (MiniMax-H3)."""

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        (latents,) = super().step(-model_output[None], timestep, sample[None], *args, return_dict=False, **kwargs)
        return SchedulerOutput(prev_sample=latents[0]) if return_dict else (latents[0],)


class PreservingSteps(StochasticScheduler):
    """The base for variance-preserving latents: sqrt(alpha) * data + sqrt(1 - alpha) * noise."""

    coordinates = "variance_preserving"

    @property
    def prediction_type(self) -> str:
        """What the network predicts: "epsilon", "v_prediction" or "sample"."""
        return self.config.prediction_type

    def alpha(self, timestep: Any, sample: Tensor) -> Tensor:
        """Return the cumulative alpha of a timestep, float32, broadcastable to the sample."""
        return self.alphas_cumprod[int(timestep)].to(device=sample.device, dtype=torch.float32)

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        alpha = self.alpha(self.timesteps[position], sample)
        return alpha.sqrt(), (1 - alpha).sqrt()

    def split(self, prediction: Tensor, timestep: Any, sample: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clean sample and the noise that the network predicts."""
        return split_prediction(prediction.float(), sample.float(), self.alpha(timestep, sample), self.prediction_type)

    def estimate(self, clean: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        """Return a predicted clean sample with its relation to the prediction."""
        alpha = self.alpha(timestep, sample)
        return CleanEstimate(clean, (1 - alpha).sqrt(), alpha.sqrt() * sample.float())

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        return self.estimate(self.split(prediction, timestep, sample)[0], timestep, sample)


class DDIMSteps(PreservingSteps):
    """DDIM for epsilon-, v- and sample-prediction."""

    begin_index = None

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, **kwargs):
        """Drop the learned variance that some networks predict as well: DDIM's variance is given by eta."""
        if model_output.ndim > 1 and model_output.shape[1] == 2 * sample.shape[1]:
            model_output = model_output.chunk(2, dim=1)[0]
        return super().step(model_output, timestep, sample, *args, **kwargs)

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        return super(StochasticScheduler, self).step(prediction, timestep, sample, return_dict=False)[0]

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        # CogVideoX's scheduler has the option in its config but never reads it
        is_read = not isinstance(self, CogVideoXDDIMScheduler)
        clips = is_read and (self.config.clip_sample or self.config.thresholding)
        return self._move(prediction, timestep, sample, noise_level, self._clip if clips else None)

    def unclipped(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        return self._move(prediction, timestep, sample, noise_level, None)

    def _move(
        self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float, clip: Callable | None
    ) -> MeanStd:
        timestep_next = int(timestep) - self.config.num_train_timesteps // self.num_inference_steps
        alpha = self.alpha(timestep, sample)
        return self.sde(
            prediction.float(),
            sample.float(),
            alpha,
            self.alpha(timestep_next, sample) if timestep_next >= 0 else self.final_alpha_cumprod.to(alpha),
            noise_level=noise_level,
            prediction_type=self.config.prediction_type,
            clip=clip,
        )

    def _clip(self, clean: Tensor) -> Tensor:
        if self.config.thresholding:
            return self._threshold_sample(clean)
        return clean.clamp(-self.config.clip_sample_range, self.config.clip_sample_range)


class CosineSteps(PreservingSteps):
    """Stable Cascade's cosine schedule: time runs from 1 to 0."""

    begin_index = None
    prediction_type = "epsilon"

    def alpha(self, timestep: Any, sample: Tensor) -> Tensor:
        alpha = self._alpha_cumprod(timestep.reshape(-1), sample.device)
        return alpha.float().view(-1, *[1] * (sample.ndim - 1))

    def _alphas(self, timestep: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        timestep_next = self.previous_timestep(timestep).to(timestep)
        return self.alpha(timestep, sample), self.alpha(timestep_next, sample)

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        alphas = self._alphas(timestep, sample)
        return ddim(prediction.float(), sample.float(), *alphas, noise_level=0.0)[0].to(sample.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        alphas = self._alphas(timestep, sample)
        return self.sde(prediction.float(), sample.float(), *alphas, noise_level=noise_level)


class _StepOrEstimate:
    """The tuple that EDM's `step` returns: the next latent, and the estimated clean sample.

    Each is computed when it is read, because Cosmos calls `step` twice per step: first it reads only the estimate, to
    apply guidance and conditions to it, then it takes the step with the result.
    """

    def __init__(self, step: Callable[[], Tensor], estimate: Callable[[], Tensor]):
        self.parts = (step, estimate)

    def __getitem__(self, index: int) -> Tensor:
        return self.parts[index]()


class SigmaSteps(StochasticScheduler):
    """Latents are data + sigma * noise: EDM, Euler with continuous timesteps, Euler for flows with sigmas above 1."""

    coordinates = "sigma"

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *args, return_dict: bool = True, **kwargs):
        """Take a step as in [`StochasticScheduler`]; EDM's tuple also holds the estimated clean sample."""
        take = functools.partial(super().step, model_output, timestep, sample, *args, **kwargs)
        if return_dict or not isinstance(self, EDMEulerScheduler):
            return take(return_dict=return_dict)
        estimate = functools.partial(self._estimate, model_output, timestep, sample)
        return _StepOrEstimate(lambda: take(return_dict=False)[0], estimate)

    def _estimate(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.locate(timestep)
        self._step_index = self.position + 1  # as in diffusers; pipelines that take no step undo it
        return self._clean(prediction, sample, self.sigmas[self.position])

    def _clean(self, prediction: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        if "pred_original_sample" in self.options:  # Cosmos does the preconditioning itself
            return self.options["pred_original_sample"].float()
        if isinstance(self, EDM_SCHEDULERS):
            return self.precondition_outputs(sample, prediction, sigma)
        if isinstance(self, FlowMatchEulerDiscreteScheduler) or self.config.prediction_type == "epsilon":
            return sample - sigma * prediction
        if self.config.prediction_type == "v_prediction":
            return prediction * (-sigma / (sigma**2 + 1) ** 0.5) + (sample / (sigma**2 + 1))
        return prediction

    def deterministic(self, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if isinstance(self, (EulerDiscreteScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler)):
            clean = {k: v for k, v in self.options.items() if k == "pred_original_sample"}
            return super(StochasticScheduler, self).step(prediction, timestep, sample, return_dict=False, **clean)[0]
        return ancestral(*self._clean_step(prediction, sample), noise_level=0.0)[0].to(sample.dtype)

    def distribution(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        return self.sde(*self._clean_step(prediction, sample), noise_level=noise_level)

    def unclipped(self, prediction: Tensor, timestep: Any, sample: Tensor, noise_level: float) -> MeanStd:
        with self._ignoring_options():
            return self.distribution(prediction, timestep, sample, noise_level)

    def level(self, position: int, sample: Tensor) -> tuple[Tensor, Tensor]:
        sigma = self.sigmas[position].to(device=sample.device, dtype=torch.float32)
        return torch.ones_like(sigma), sigma

    def denoise(self, prediction: Tensor, timestep: Any, sample: Tensor) -> CleanEstimate:
        clean, sample, sigma, _ = self._clean_step(prediction, sample)
        return CleanEstimate.at_sigma(clean, sigma, sample)

    def _clean_step(self, prediction: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the predicted clean sample, the sample, and the sigmas of this step and of the next."""
        sigmas = self.sigmas.to(device=sample.device, dtype=torch.float32)
        sigma, sigma_next = sigmas[self.position], sigmas[self.position + 1]
        prediction, sample = prediction.float(), sample.float()
        return self._clean(prediction, sample, sigma), sample, sigma, sigma_next


@functools.cache
def stochastic_class(kind: type, base: type) -> type:
    """Return the class of a stochastic scheduler: the mixin `kind` in front of diffusers' class `base`."""
    parameters = inspect.signature(base.set_timesteps).parameters

    @functools.wraps(base.set_timesteps)  # pipelines search the signature for `sigmas`, `timesteps` and `mu`
    def set_timesteps(self, *args, **kwargs):
        base.set_timesteps(self, *args, **kwargs)
        self.index, self.first = 0, None
        if self.original is not None:  # a pipeline may read its sigmas
            theirs = inspect.signature(self.original.set_timesteps).parameters
            named = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
            self.original.set_timesteps(**{name: value for name, value in named.items() if name in theirs})

    return type(f"Stochastic{base.__name__}", (kind, base), {"set_timesteps": set_timesteps})
