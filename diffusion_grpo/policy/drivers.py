"""Drivers decide what each step of a stochastic scheduler does: the recorder in a rollout, the teacher in a replay.

A driver gets each step of the pipeline's loop from the scheduler and returns the latent that the pipeline goes on
with. The recorder makes a `Trajectory`, the teacher the `StepDistribution` of one recorded step, the predictor a
`Prediction`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .input_watch import InputWatch
from .schedulers import StochasticScheduler
from .step_weights import weigh_steps
from .trajectory import (
    CleanSamples,
    Denoised,
    Prediction,
    Prefix,
    StepDistribution,
    StepScale,
    Trajectory,
    make_generators,
    sample_seed,
)


class UnsupportedPipeline(ValueError):
    """The pipeline's steps cannot be recorded and replayed one by one."""


class _Parts:
    """The latents that one step of the loop moves: one, or one for each scheduler (video and audio)."""

    def __init__(self):
        self.handed: list[Tensor] = []
        self.next: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.means: list[Tensor] = []

    def add(self, handed: Tensor, next_latents: Tensor, score: Tensor, mean: Tensor | None = None) -> None:
        """Add one latent's part of the step: its input, its output, the output's log-density, and perhaps its mean."""
        self.handed.append(handed)
        self.next.append(next_latents)
        self.scores.append(score)
        self.means += [] if mean is None else [mean]

    def log_prob(self) -> Tensor:
        """Return the (batch,) log-density of all parts, averaged over all their dimensions."""
        if len(self.scores) == 1:
            return self.scores[0]
        sizes = [part[0].numel() for part in self.next]
        return sum(size * score for size, score in zip(sizes, self.scores, strict=True)) / sum(sizes)


def _distribution(
    means: list[Tensor], stds: list[Tensor], log_prob: Tensor, scales: list[StepScale], predictions: list[Tensor]
) -> StepDistribution:
    """Build a step's distribution; flattened if the step moves several latents."""
    mean, std = means[0], stds[0]
    if len(means) > 1:
        std = _join([std.expand(mean.shape) for mean, std in zip(means, stds, strict=True)])
        mean = _join(means)
    if not (std > 0).all():  # what is held fixed: mean and reference mean are equal there
        std = torch.where(std > 0, std, 1.0)
    return StepDistribution(mean, std, log_prob, StepScale.join(scales), _join(predictions))


def _first_rows(values: Sequence[Tensor], sample: Tensor, count: int) -> list[Tensor]:
    """Return the first copy of each sample, of values that have one row per sample."""
    return [value[:count] if value.ndim and len(value) == len(sample) else value for value in values]


def _join(parts: list[Tensor]) -> Tensor:
    """Join several latents of each sample into one tensor, (batch, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


class Driver:
    """What all drivers share: the position in the loop, and which scheduler has taken which step.

    Attributes:
        initial_seeds: (batch,) of the samples' initial latents.
        needs_network: whether the network must really run for the current step.
        tokens: (batch, tokens) int64, what a language model in the pipeline's call wrote, or is to have written.
    """

    needs_network: bool

    def __init__(self, initial_seeds: Tensor, count: int, noise_level: float):
        self.initial_seeds, self.count, self.noise_level = initial_seeds, count, noise_level
        self.current = 0
        self.tokens: Tensor | None = None
        self.taken: set[tuple[StochasticScheduler, int]] = set()

    def enter(self, scheduler: StochasticScheduler, index: int) -> None:
        """Note that a scheduler takes step `index`; several schedulers take each step together."""
        if (scheduler, index) in self.taken or index + 1 < self.current:
            raise UnsupportedPipeline(
                "The pipeline runs its denoising loop several times in one call (chunks or stages that build on each "
                "other), and such steps cannot be replayed one by one. If it makes a long video in chunks, ask for as "
                "many frames as fit into one."
            )
        self.taken.add((scheduler, index))
        self.current = index + 1

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Look at what a network is called with; return what to call it with."""
        return args, kwargs

    def rows(self, sample: Tensor) -> int:
        """Return how often each sample is in the batch: twice if a pipeline keeps both halves of guidance."""
        if len(sample) % self.count:
            raise UnsupportedPipeline(
                f"The pipeline steps {len(sample)} latents at once where {self.count} samples were asked for; roll "
                "out one sample at a time (rollout_batch_size=1)."
            )
        return len(sample) // self.count


class Recorder(Driver):
    """Drives a rollout: draws noise where it is asked for, records what is trained.

    Args:
        seeds, initial_seeds: (batch,) int64.
        noise_steps: steps that draw noise, of all samples or one set per sample; None for all but the last.
        trained_steps: (batch, steps) int64; None for all but the last.
        noise_level: of the process.
        device: where the records are kept.
        is_complete: whether the call runs to its end.
        noise_in_last_step: whether the last step may draw noise.
    """

    needs_network = True

    def __init__(
        self,
        seeds: Tensor,
        initial_seeds: Tensor,
        noise_steps: set[int] | Sequence[set[int]] | None,
        trained_steps: Tensor | None,
        noise_level: float,
        device: str | torch.device,
        is_complete: bool = True,
        noise_in_last_step: bool = False,
        step_weight: str = "none",
        weighted_steps: Sequence[int] | None = None,
        keeps_means: bool = False,
    ):
        super().__init__(initial_seeds, len(seeds), noise_level)
        self.generators = make_generators(seeds)
        self.noise_steps = [noise_steps] * self.count if isinstance(noise_steps, set) else noise_steps
        self.trained_steps = trained_steps
        self.noise_in_last_step = noise_in_last_step
        self.device, self.is_complete = device, is_complete
        self.step_weight, self.weighted_steps, self.keeps_means = step_weight, weighted_steps, keeps_means
        self.records: dict[int, _Parts] = {}
        self.scales: dict[int, list[StepScale]] = {}
        self.left: dict[int, Tensor] = {}  # the last latent of each scheduler
        self.loop_length: int | None = None

    def _begin(self, scheduler: StochasticScheduler) -> None:
        """Take what depends on the loop's length from the loop itself: image-to-image starts in the middle."""
        self.loop_length = scheduler.loop_length
        noisy = [set(range(self.loop_length))] * self.count if self.noise_steps is None else self.noise_steps
        silent = set() if self.noise_in_last_step else {self.loop_length - 1}
        self.noise_steps = [steps - silent for steps in noisy]
        if self.trained_steps is None:
            self.trained_steps = torch.arange(self.loop_length - 1).expand(self.count, -1)
        trained = self.trained_steps.flatten().tolist()
        if trained and max(trained) >= self.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {self.loop_length} steps, and the last has no noise: trained steps must be below "
                f"{self.loop_length - 1}, got {sorted(set(trained))}; it makes fewer steps than num_inference_steps "
                "says (strength below 1), so raise num_inference_steps or set sde_window."
            )

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.loop_length is None:
            self._begin(scheduler)
        if not self.is_complete and self.records and index > self.trained_steps.max():
            raise StepScored
        self.enter(scheduler, index)
        self._note_scale(scheduler, index, timestep, sample)
        if any(index in steps for steps in self.noise_steps):
            latents = self._draw_next(scheduler, index, prediction, timestep, sample)
        else:
            latents = scheduler.deterministic(prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()  # pipelines write conditions into what they are handed
        return latents

    def _note_scale(self, scheduler, index: int, timestep: Any, sample: Tensor) -> None:
        """Note how far a step reaches if it may be trained: the weights of all trained steps depend on it."""
        if self.step_weight == "none" or index >= self.loop_length - 1:
            return
        if self.weighted_steps is None or index in self.weighted_steps:
            scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
            self.scales.setdefault(index, []).append(scale)

    def _draw_next(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        copies = self.rows(sample)
        is_noisy = torch.tensor([index in steps for steps in self.noise_steps])
        silent = None if is_noisy.all() else scheduler.deterministic(prediction, timestep, sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        shape = sample.shape[1:]
        noise = torch.stack(
            [
                torch.randn(shape, generator=generator) if noisy else torch.zeros(shape)
                for generator, noisy in zip(self.generators, is_noisy.tolist(), strict=True)
            ]
        )
        noise = torch.cat([noise] * copies) if copies > 1 else noise
        latents = (mean + std * noise.to(mean.device)).to(sample.dtype)
        if silent is not None:  # the others as in a step in which none draws noise
            mask = torch.cat([is_noisy] * copies).to(latents.device).view(-1, *[1] * len(shape))
            latents = torch.where(mask, latents, silent.to(latents))
        if index in self.trained_steps:
            handed = self.left.get(id(scheduler), sample)[: self.count].float()
            # scored as rounded: what replay is given back must be what was scored
            next_latents, mean, std = _first_rows((latents.float(), mean, std), sample, self.count)
            score = scheduler.log_prob(next_latents, mean, std)
            kept = [handed, next_latents, score] + ([mean] if self.keeps_means else [])
            kept = (x.clone().to(self.device) for x in kept)
            self.records.setdefault(index, _Parts()).add(*kept)
        return latents

    def _refuse_silent_steps(self) -> None:
        """Refuse a trained step in which its sample draws no noise, and so has no density."""
        for row, (steps, noisy) in enumerate(zip(self.trained_steps.tolist(), self.noise_steps, strict=True)):
            silent = [step for step in steps if step not in noisy]
            if silent:
                raise ValueError(
                    f"Sample {row} trains on step {silent[0]}, in which it draws no noise; noise_steps must contain "
                    "the trained steps of each sample."
                )

    def trajectory(self, **settings) -> Trajectory:
        """Return the recorded steps.

        Raises:
            UnsupportedPipeline: the loop ended before all trained steps were taken.
        """
        trained = [] if self.trained_steps is None else self.trained_steps.unique().tolist()
        missing = [step for step in trained if step not in self.records]
        if self.noise_steps is not None and not missing:
            self._refuse_silent_steps()
        if missing or not trained:
            raise UnsupportedPipeline(
                f"The pipeline took no step {missing or ''} through its scheduler; nothing can be recorded."
            )
        steps = {
            step: (
                _join(parts.handed),
                _join(parts.next),
                parts.log_prob(),
                _join(parts.means) if parts.means else None,
            )
            for step, parts in self.records.items()
        }
        latents, next_latents, log_probs, *means = (
            torch.stack(
                [
                    torch.stack([steps[step][i][row] for step in columns.tolist()])
                    for row, columns in enumerate(self.trained_steps)
                ]
            )
            for i in range(3 + self.keeps_means)
        )
        tokens = None if self.tokens is None else self.tokens.to(self.device)
        scales = {step: StepScale.join(parts) for step, parts in self.scales.items()}
        weights = weigh_steps(self.step_weight, scales, self.trained_steps)
        return Trajectory(
            latents,
            next_latents,
            log_probs,
            steps=self.trained_steps.clone(),
            tokens=tokens,
            step_weights=None if weights is None else weights.to(self.device),
            means=means[0] if means else None,
            **settings,
        )


class SolverRecorder(Driver):
    """Drives a rollout whose steps are the pipeline's own solver's, and keeps what the last one left.

    Attributes:
        left: (batch, ...) the last latent of each scheduler, by its id, in the order in which they take their steps.
    """

    needs_network = True

    def __init__(self, initial_seeds: Tensor):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.left: dict[int, Tensor] = {}

    def keep(self, scheduler: Any, latents: Tensor) -> None:
        """Keep what a step of the solver left."""
        self.rows(latents)  # refuses a batch that does not divide
        self.left[id(scheduler)] = latents.detach().clone()


def join_clean(recorder: Recorder | SolverRecorder) -> Tensor:
    """Return (batch, ...) float32 what the last step of a rollout left; several latents are joined.

    Raises:
        UnsupportedPipeline: no scheduler took a step.
    """
    parts = [latents[: recorder.count].float() for latents in recorder.left.values()]
    if not parts:
        raise UnsupportedPipeline("The pipeline took no step through its scheduler; nothing can be recorded.")
    return _join(parts)


class PrefixDriver(Driver):
    """Drives the first steps of a loop, without noise; keeps the latent that they lead to, and the next prediction.

    Args:
        length: number of steps.
        initial_seeds: (batch,) int64.
        device: where latent and prediction are kept.
    """

    def __init__(self, length: int, initial_seeds: Tensor, device: str | torch.device):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.length, self.device = length, device
        self.left: dict[int, Tensor] = {}  # the last latent of each scheduler
        self.predictions: list[Tensor] = []  # in step `length`, for each scheduler
        self.found: Prefix | None = None

    @property
    def needs_network(self) -> bool:
        return self.current <= self.length

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.length >= scheduler.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so samples cannot branch at step {self.length}, "
                "which must come before the last; choose an earlier one (sde_window)."
            )
        if index > self.length:  # only now has each of several schedulers its prediction
            self.found = self._collect()
            raise StepScored
        self.enter(scheduler, index)
        copies = self.rows(sample)
        if index == self.length:
            self.left.setdefault(id(scheduler), sample.clone())  # of step 0 the initial latent
            if copies == 1 and not scheduler.gets_more_of_network:
                self.predictions.append(prediction.flatten(1))
            return sample
        latents = scheduler.deterministic(prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()
        return latents

    def _collect(self) -> Prefix:
        latents = _join([part[: self.count].float() for part in self.left.values()])
        # not where the pipeline keeps both halves of guidance, or hands the scheduler more than the prediction
        is_shared = len(self.predictions) == len(self.left)
        return Prefix(
            latents.to(self.device),
            self.initial_seeds,
            self.length,
            torch.cat(self.predictions, dim=1).to(self.device) if is_shared else None,
            None if self.tokens is None else self.tokens.to(self.device),
        )


class Finisher(Driver):
    """Drives a call that ends as a rollout did, without the network: its last step returns what the rollout's did.

    Args:
        recorder: of that rollout.

    Raises:
        UnsupportedPipeline: the steps move several latents (video and sound).
    """

    needs_network = False

    def __init__(self, recorder: Recorder | SolverRecorder):
        super().__init__(recorder.initial_seeds, recorder.count, recorder.noise_level)
        self.tokens = recorder.tokens
        if len(recorder.left) != 1:
            raise UnsupportedPipeline(
                f"The pipeline's steps move {len(recorder.left)} latents at once (video and sound), and a reward that "
                "takes latents gets one; use a reward that takes the decoded samples."
            )
        (self.left,) = recorder.left.values()

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        return self.left.clone() if index == scheduler.loop_length - 1 else sample


class StepScored(Exception):
    """Raised to leave the pipeline: the step is scored, and later steps and the decoder are not needed."""


class _Follower(Driver):
    """What teacher and predictor share: both walk to one step without the network, and hand it a given latent.

    Args:
        index: the step at which the network runs.
        latents: (batch, ...) what that step is handed.
    """

    def __init__(self, index: int, latents: Tensor, initial_seeds: Tensor, tokens: Tensor | None, noise_level: float):
        super().__init__(initial_seeds, len(latents), noise_level)
        self.tokens, self.index = tokens, index
        self.latents = latents
        self.offset = 0  # into the flattened latents of a step that moves several

    @property
    def needs_network(self) -> bool:
        return self.current == self.index

    def hand_over(self, index: int, sample: Tensor) -> Tensor:
        """Return what a step before the one at which the network runs leaves behind."""
        if index < self.index - 1:
            return sample
        part, self.offset = take_part(self.latents, self.offset, sample, self.count)
        return torch.cat([part] * self.rows(sample)).to(sample)


def take_part(whole: Tensor, start: int, sample: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the next part of (batch, ...) flattened latents in the shape of a pipeline's, and where it ends."""
    end = start + sample[0].numel()
    return whole.flatten(1)[:, start:end].reshape(count, *sample.shape[1:]), end


class Teacher(_Follower):
    """Drives a replay: hands back what was recorded up to the replayed step, and scores that step.

    Args:
        index: the step.
        latents: (calls, ...) what that step is handed.
        next_latents: (batch, ...) what it left.
        noise_level: of the process.
        initial_seeds: (calls,) of the initial latents.
        tokens: (calls, tokens) what a language model in the pipeline's call wrote, if there is one.
        sources: (batch,) int64, the row of `latents` that each sample was handed; None where each has its own.
    """

    def __init__(
        self,
        index: int,
        latents: Tensor,
        next_latents: Tensor,
        noise_level: float,
        initial_seeds: Tensor,
        tokens: Tensor | None = None,
        sources: Tensor | None = None,
    ):
        super().__init__(index, latents, initial_seeds, tokens, noise_level)
        self.next_latents, self.next_offset, self.sources = next_latents, 0, sources
        self.parts, self.means, self.stds = _Parts(), [], []
        self.scales: list[StepScale] = []
        self.predictions: list[Tensor] = []
        self.scored: StepDistribution | None = None

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        self.rows(sample)  # refuses a batch that does not divide
        if index < self.index:
            return self.hand_over(index, sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        next_latents, self.next_offset = take_part(self.next_latents, self.next_offset, sample, len(self.next_latents))
        next_latents = next_latents.to(device=mean.device, dtype=torch.float32)
        mean, std = map(self._spread, _first_rows((mean, std), sample, self.count))
        scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
        self.scales.append(StepScale(*map(self._spread, (scale.std, scale.jacobian, scale.moving))))
        self.predictions.append(self._spread(scheduler.drop_variance(prediction, sample)[: self.count].detach()))
        self.parts.add(sample, next_latents, scheduler.log_prob(next_latents, mean, std))
        self.means.append(mean)
        self.stds.append(std)
        if self.next_offset >= self.next_latents[0].numel():
            log_prob = self.parts.log_prob()
            self.scored = _distribution(self.means, self.stds, log_prob, self.scales, self.predictions)
            raise StepScored
        return sample  # another scheduler steps the other part

    def _spread(self, values: Tensor) -> Tensor:
        """Return what has one row per call of the network with one row per sample."""
        is_spread = self.sources is not None and values.ndim > 0 and len(values) == self.count
        return values[self.sources.to(values.device)] if is_spread else values


class BranchRecorder(Recorder):
    """Drives a rollout that begins where a prefix has ended: without the network up to there, then as `Recorder`.

    The first step that its samples take themselves uses the prefix's prediction, if it has one.

    Args:
        prefix: of the samples, one row each.
        settings: of [`Recorder`].
    """

    def __init__(self, prefix: Prefix, *settings: Any):
        super().__init__(*settings)
        self.tokens, self.length, self.prediction = prefix.tokens, prefix.length, prefix.prediction
        self._offset = 0  # into that prediction, where a step moves several latents
        self._follower = _Follower(
            prefix.length, prefix.latents, prefix.initial_seeds, prefix.tokens, self.noise_level
        )

    @property
    def needs_network(self) -> bool:
        return self.current >= self.length + (self.prediction is not None)

    def _begin(self, scheduler: StochasticScheduler) -> None:
        super()._begin(scheduler)
        early = sorted({step for steps in self.noise_steps for step in steps if step < self.length})
        if early:
            raise ValueError(
                f"Samples that branch at step {self.length} cannot draw noise in step {early[0]} before it; let "
                "noise_steps begin there."
            )

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if index == self.length and self.prediction is not None:
            prediction = self._take_prediction(prediction)
        if index >= self.length:
            return super().step(scheduler, index, prediction, timestep, sample)
        if self.loop_length is None:
            self._begin(scheduler)
        self.enter(scheduler, index)
        self.rows(sample)  # refuses a batch that does not divide
        self._note_scale(scheduler, index, timestep, sample)
        latents = self._follower.hand_over(index, sample)
        self.left[id(scheduler)] = latents.clone()
        return latents

    def _take_prediction(self, blank: Tensor) -> Tensor:
        """Return the prefix's prediction in the shape of what the pipeline made without its network."""
        start, self._offset = self._offset, self._offset + blank[0].numel()
        return self.prediction[:, start : self._offset].reshape(blank.shape).to(blank)

    def trajectory(self, **settings) -> Trajectory:
        found = super().trajectory(**settings)
        if self.prediction is None:
            return found
        return dataclasses.replace(found, shared_steps=torch.full((self.count,), self.length, device=self.device))


class Predictor(_Follower):
    """Drives a prediction: hands one step a given latent, and keeps what the pipeline makes of it.

    Args:
        index: the step.
        latents: (batch, ...) what the step is handed.
        initial_seeds: (batch,) of the samples' initial latents.
        tokens: (batch, tokens) what a language model in the pipeline's call wrote, if there is one.
    """

    def __init__(self, index: int, latents: Tensor, initial_seeds: Tensor, tokens: Tensor | None = None):
        super().__init__(index, latents, initial_seeds, tokens, noise_level=0.0)
        self.predictions: list[Tensor] = []
        self.samples: list[Tensor] = []
        self.found: Prediction | None = None

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        if self.index >= scheduler.loop_length:
            raise ValueError(
                f"The pipeline takes {scheduler.loop_length} steps, so there is no step {self.index} to predict at; "
                "choose an earlier one (the first is 0)."
            )
        if index < self.index:
            return self.hand_over(index, sample)
        if self.index == 0:
            self._refuse_other_initial_latents(sample)
        prediction, sample = _first_rows((prediction, sample), sample, self.count)
        self.predictions.append(prediction)
        self.samples.append(sample)
        if sum(part[0].numel() for part in self.samples) >= self.latents[0].numel():
            self.found = Prediction(_join(self.predictions), _join(self.samples))
            raise StepScored
        return sample  # another scheduler steps the other part

    def _refuse_other_initial_latents(self, sample: Tensor) -> None:
        given, self.offset = take_part(self.latents, self.offset, sample, self.count)
        if not torch.equal(given.to(sample), sample[: self.count]):
            raise ValueError(
                "The latents given for step 0 are not the pipeline's initial latents, which no step before it could "
                "replace; predict at step 1 or later, or pass the initial_seeds of the rollout."
            )


class Denoiser(_Follower):
    """Drives a prediction on re-noised samples: hands one step its noised sample, and keeps what is predicted.

    Args:
        index: the step, 1 or later: the step before it hands the noised sample over.
        samples: the finished samples. Each one's `seeds` fixes its noise, which differs from step to step.
        networks: the trained ones; elements of the noised sample that they do not see are no target.

    Raises:
        UnsupportedPipeline: the pipeline changes every element of its latents between two steps, or the networks get
            nothing that is computed from them.
    """

    def __init__(self, index: int, samples: CleanSamples, networks: Sequence[nn.Module]):
        super().__init__(index, samples.latents, samples.initial_seeds, samples.tokens, noise_level=0.0)
        self.watch = InputWatch(networks)
        seeds = [sample_seed("renoise", int(seed), index) for seed in samples.seeds]
        self.generators = make_generators(torch.tensor(seeds))
        self.handed: list[Tensor] = []
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.found: Denoised | None = None

    def hand_over(self, index: int, sample: Tensor, scheduler: StochasticScheduler | None = None) -> Tensor:
        if index < self.index - 1:
            return sample
        clean, self.offset = take_part(self.latents, self.offset, sample, self.count)
        noise = torch.stack([torch.randn(sample.shape[1:], generator=generator) for generator in self.generators])
        clean, noise = (part.to(device=sample.device, dtype=torch.float32) for part in (clean, noise))
        handed = scheduler.renoise(clean, noise, sample[: self.count], self.index).to(sample.dtype)
        self.handed.append(handed)
        return torch.cat([self.watch.follow(handed)] * self.rows(sample))

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return self.watch.take_inputs(args, kwargs)

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        self.rows(sample)  # refuses a batch that does not divide
        if self.index >= scheduler.loop_length:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so there is no step {self.index} to train at; it "
                "makes fewer steps than num_inference_steps says (strength below 1), so raise num_inference_steps or "
                "set sde_window."
            )
        if index < self.index:
            return self.hand_over(index, sample, scheduler)
        sample, number = sample.detach(), len(self.parts)
        clean, share, origin, moves = scheduler.denoise(prediction, timestep, sample)
        clean, origin, arrived, share = _first_rows((clean, origin, sample, share), sample, self.count)
        stays, seen = self.handed[number] == arrived, self.watch.seen[number]
        if seen is None:
            raise UnsupportedPipeline(
                "The pipeline hands its network nothing that is computed from its latents, or not by torch, so that "
                "what it holds fixed in them cannot be found; train it on recorded steps (loss_type=grpo)."
            )
        moves = stays & seen if moves is None else stays & seen & moves[: self.count]
        self.parts.append((clean, share.expand(clean.shape), origin, moves))
        if sum(part[0][0].numel() for part in self.parts) >= self.latents[0].numel():
            self.found = self._collect(share)
            raise StepScored
        return sample  # another scheduler steps the other part

    def _collect(self, share: Tensor) -> Denoised:
        clean, shares, origin, moves = (_join(list(parts)) for parts in zip(*self.parts, strict=True))
        if not moves.flatten(1).any(1).all():
            raise UnsupportedPipeline(
                "The pipeline changes all its latents between two steps, so that no step is handed a re-noised sample "
                "as it was made; train it on recorded steps (loss_type=grpo)."
            )
        target = self.latents.to(clean).reshape(clean.shape)
        share = shares if len(self.parts) > 1 else share
        return Denoised(clean, target, share, origin, None if moves.all() else moves)
