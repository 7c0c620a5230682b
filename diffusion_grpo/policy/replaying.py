"""Drivers of replays and predictions: they go to one step without the network, and give that step a latent.

A `ReplayDriver` makes the `StepDistribution` of a recorded step, a `PredictDriver` makes a `Prediction`, and a
`RenoiseDriver` predicts finished samples that it has noised again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .drivers import (
    OneStepDriver,
    StepScored,
    UnsupportedPipeline,
    average_scores,
    first_rows,
    join_latents,
    take_part,
)
from .input_watch import InputWatch
from .schedulers import StochasticScheduler
from .trajectory import CleanSamples, Denoised, Prediction, StepDistribution, StepScale, make_generators, sample_seed


class ReplayDriver(OneStepDriver):
    """Drives a replay: gives the replayed step its recorded input, and scores its recorded output.

    Args:
        latents: (calls, ...) recorded input of the step.
        next_latents: (batch, ...) recorded output of the step.
        initial_seeds: (calls,) seeds of the initial latents.
        tokens: (calls, tokens) tokens that a language model in the pipeline's call wrote, if there is one.
        sources: (batch,) int64, the row of `latents` that each sample uses; None if each has its own row.
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
        self.moved: list[tuple[StochasticScheduler, Tensor, Tensor, Tensor]] = []  # + next latents, mean, std
        self.scales: list[StepScale] = []
        self.predictions: list[Tensor] = []
        self.velocities: list[Tensor] = []
        self.scored: StepDistribution | None = None

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        self.rows(sample)  # raises if the batch does not divide
        if index < self.index:
            return self.hand_over(index, sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        next_latents, self.next_offset = take_part(self.next_latents, self.next_offset, sample, len(self.next_latents))
        next_latents = next_latents.to(device=mean.device, dtype=torch.float32)
        mean, std = map(self._spread, first_rows((mean, std), sample, self.count))
        scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
        self.scales.append(StepScale(*map(self._spread, (scale.std, scale.jacobian, scale.moving))))
        self.predictions.append(self._spread(scheduler.drop_variance(prediction, sample)[: self.count].detach()))
        with torch.no_grad():
            velocity = scheduler.denoise(prediction, timestep, sample).velocity()
        self.velocities.append(self._spread(velocity[: self.count]))
        self.moved.append((scheduler, next_latents, mean, std))
        if self.next_offset >= self.next_latents[0].numel():
            self.scored = self._score()
            raise StepScored
        return sample  # another scheduler steps another latent

    def _spread(self, values: Tensor) -> Tensor:
        """Expand values with one row per call of the network to one row per sample."""
        is_spread = self.sources is not None and values.ndim > 0 and len(values) == self.count
        return values[self.sources.to(values.device)] if is_spread else values

    def _score(self) -> StepDistribution:
        """Build the distribution of the step, flattened if the step moves several latents."""
        schedulers, nexts, means, stds = (list(each) for each in zip(*self.moved, strict=True))
        sizes = [part[0].numel() for part in means]
        mean, std = join_latents(means), stds[0]
        if len(means) > 1:
            std = join_latents([each.expand(part.shape) for each, part in zip(stds, means, strict=True)])
            # cut out of the joined mean, so that gradients of log-probabilities reach it too
            cut = zip(mean.split(sizes, dim=1), means, strict=True)
            means = [values.view(part.shape) for values, part in cut]
        own = zip(schedulers, nexts, means, stds, strict=True)
        log_prob = average_scores([scheduler.log_prob(*values) for scheduler, *values in own], sizes)
        if not (std > 0).all():  # elements held fixed, whose mean equals the reference mean
            std = torch.where(std > 0, std, 1.0)
        joined = join_latents(self.predictions), join_latents(self.velocities)
        return StepDistribution(mean, std, log_prob, StepScale.join(self.scales), *joined)


class PredictDriver(OneStepDriver):
    """Drives a prediction: gives one step a latent, and keeps the pipeline's prediction for it.

    Args:
        latents: (batch, ...) input of the step.
        initial_seeds: (batch,) seeds of the samples' initial latents.
        tokens: (batch, tokens) tokens that a language model in the pipeline's call wrote, if there is one.
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
        prediction, sample = first_rows((prediction, sample), sample, self.count)
        self.predictions.append(prediction)
        self.samples.append(sample)
        if sum(part[0].numel() for part in self.samples) >= self.latents[0].numel():
            self.found = Prediction(join_latents(self.predictions), join_latents(self.samples))
            raise StepScored
        return sample  # another scheduler steps another latent

    def _refuse_other_initial_latents(self, sample: Tensor) -> None:
        given, self.offset = take_part(self.latents, self.offset, sample, self.count)
        if not torch.equal(given.to(sample), sample[: self.count]):
            raise ValueError(
                "The latents given for step 0 are not the pipeline's initial latents, which no step before it could "
                "replace; predict at step 1 or later, or pass the initial_seeds of the rollout."
            )


class RenoiseDriver(OneStepDriver):
    """Drives a prediction on re-noised samples: gives one step the noised samples, and keeps the predictions."""

    def __init__(self, index: int, samples: CleanSamples, networks: Sequence[nn.Module]):
        super().__init__(index, samples.latents, samples.initial_seeds, samples.tokens, noise_level=0.0)
        self.watch = InputWatch(networks)
        seeds = [sample_seed("renoise", int(seed), index) for seed in samples.seeds]
        self.generators = make_generators(torch.tensor(seeds))
        self.handed: list[Tensor] = []
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
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
        self.rows(sample)  # raises if the batch does not divide
        if self.index >= scheduler.loop_length:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so there is no step {self.index} to train at; it "
                "makes fewer steps than num_inference_steps says (strength below 1), so raise num_inference_steps or "
                "set trained_steps."
            )
        if index < self.index:
            return self.hand_over(index, sample, scheduler)
        sample, number = sample.detach(), len(self.parts)
        clean, sigma, origin, moves = scheduler.denoise(prediction, timestep, sample)
        still = scheduler.clean_at_zero(prediction, timestep, sample)
        clean, origin, arrived, sigma, still = first_rows((clean, origin, sample, sigma, still), sample, self.count)
        stays, seen = self.handed[number] == arrived, self.watch.seen[number]
        if seen is None:
            raise UnsupportedPipeline(
                "The pipeline passes its network nothing that torch has computed from the latents, so it is unknown "
                "which parts of the latents stay fixed; train it on recorded steps (loss_type=grpo)."
            )
        moves = stays & seen if moves is None else stays & seen & moves[: self.count]
        self.parts.append((clean, sigma.expand(clean.shape), origin, moves, still))
        if sum(part[0][0].numel() for part in self.parts) >= self.latents[0].numel():
            self.found = self._collect(sigma)
            raise StepScored
        return sample  # another scheduler steps another latent

    def _collect(self, sigma: Tensor) -> Denoised:
        clean, sigmas, origin, moves, still = (join_latents(list(parts)) for parts in zip(*self.parts, strict=True))
        if not moves.flatten(1).any(1).all():
            raise UnsupportedPipeline(
                "The pipeline changes all its latents between two steps, so a re-noised sample would not reach any "
                "step unchanged; train it on recorded steps (loss_type=grpo)."
            )
        target = self.latents.to(clean).reshape(clean.shape)
        sigma = sigmas if len(self.parts) > 1 else sigma
        return Denoised(clean, target, sigma, origin, None if moves.all() else moves, still)
