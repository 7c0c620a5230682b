"""Drivers of rollouts: they draw noise, record trained steps, and keep finished latents.

A `Recorder` makes a `Trajectory`. If samples share their first calls, a `PrefixDriver` makes these calls and a
`BranchRecorder` continues from there.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .drivers import (
    Driver,
    JoinedLatents,
    OneStepDriver,
    StepScored,
    UnsupportedPipeline,
    average_scores,
    first_rows,
    join_latents,
)
from .schedulers import StochasticScheduler
from .trajectory import Prefix, RolloutRequest, StepScale, Trajectory, make_generators, weigh_steps


class Recorder(Driver):
    """Drives a rollout: draws noise in the steps that the request names, and records the trained ones."""

    needs_network = True

    def __init__(self, request: RolloutRequest, noise_level: float):
        super().__init__(request.initial_seeds)
        self.request, self.noise_level, self.generators = request, noise_level, make_generators(request.seeds)
        noisy, steps = (request.noise_steps, request.steps) if noise_level > 0 else ([], [[]] * self.count)
        self.noise_steps = _split_noise_steps(noisy, self.count)
        self.trained_steps: Tensor | None = None  # (batch, steps) int64; None: all but the last
        if steps is not None:
            rows = torch.tensor([list(row) for row in steps], dtype=torch.int64)
            self.trained_steps = rows.reshape(len(rows), -1)
        self.records: dict[int, list[list[Tensor]]] = {}  # of each latent: input, output, log-density, maybe mean
        self.scales: dict[int, list[StepScale]] = {}
        self.loop_length: int | None = None

    @property
    def records_steps(self) -> bool:
        """Whether any step is trained."""
        return self.trained_steps is None or bool(self.trained_steps.numel())

    def _begin(self, scheduler: StochasticScheduler) -> None:
        """Set what depends on the length of the loop, known only now: image-to-image starts in the middle."""
        self.loop_length = scheduler.loop_length
        noisy = [set(range(self.loop_length))] * self.count if self.noise_steps is None else self.noise_steps
        silent = set() if self.request.noise_in_last_step else {self.loop_length - 1}
        self.noise_steps = [steps - silent for steps in noisy]
        if self.trained_steps is None:
            self.trained_steps = torch.arange(self.loop_length - 1).expand(self.count, -1)
        trained = self.trained_steps.flatten().tolist()
        if trained and max(trained) >= self.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {self.loop_length} steps, and the last has no noise: trained steps must be below "
                f"{self.loop_length - 1}, got {sorted(set(trained))}; it makes fewer steps than num_inference_steps "
                "says (strength below 1), so raise num_inference_steps or set trained_steps."
            )

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.loop_length is None:
            self._begin(scheduler)
        if not self.request.is_complete and self.records and index > self.trained_steps.max():
            raise StepScored
        copies = self.enter(scheduler, index, sample)
        self._note_scale(scheduler, index, timestep, sample)
        is_noisy = torch.tensor([index in steps for steps in self.noise_steps])
        if not is_noisy.any():
            return self.leave(scheduler, scheduler.deterministic(prediction, timestep, sample))
        silent = None if is_noisy.all() else scheduler.deterministic(prediction, timestep, sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        noise = torch.cat([self._draw_noise(sample, is_noisy)] * copies)
        latents = (mean + std * noise.to(mean.device)).to(sample.dtype)
        if silent is not None:  # samples without noise, as in a step without noise
            mask = torch.cat([is_noisy] * copies).to(latents.device).view(-1, *[1] * (latents.ndim - 1))
            latents = torch.where(mask, latents, silent.to(latents))
        if index in self.trained_steps:
            self._record(scheduler, index, sample, latents, mean, std)
        return self.leave(scheduler, latents)

    def _note_scale(self, scheduler, index: int, timestep: Any, sample: Tensor) -> None:
        """Record the scale of a step that may be trained: the weights of all trained steps depend on it."""
        weighted = self.request.weighted_steps
        if self.request.step_weight == "none" or index >= self.loop_length - 1 or not self.records_steps:
            return
        if weighted is None or index in weighted:
            scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
            self.scales.setdefault(index, []).append(scale)

    def _draw_noise(self, sample: Tensor, is_noisy: Tensor) -> Tensor:
        """Draw each sample's noise from its own generator."""
        shape = sample.shape[1:]
        noise = [
            torch.randn(shape, generator=generator) if noisy else torch.zeros(shape)
            for generator, noisy in zip(self.generators, is_noisy.tolist(), strict=True)
        ]
        return torch.stack(noise)

    def _record(self, scheduler, index: int, sample: Tensor, latents: Tensor, mean: Tensor, std: Tensor) -> None:
        handed = self.left.get(id(scheduler), sample)[: self.count].float()
        # score the rounded latents, which are the ones that a replay gets
        next_latents, mean, std = first_rows((latents.float(), mean, std), sample, self.count)
        record = [handed, next_latents, scheduler.log_prob(next_latents, mean, std)]
        record += [mean] if self.request.keeps_means else []
        self.records.setdefault(index, []).append([x.clone().to(self.request.device) for x in record])

    def _refuse_silent_steps(self) -> None:
        """Refuse a trained step in which a sample draws no noise, and so has no density."""
        for row, (steps, noisy) in enumerate(zip(self.trained_steps.tolist(), self.noise_steps, strict=True)):
            silent = [step for step in steps if step not in noisy]
            if silent:
                raise ValueError(
                    f"Sample {row} trains on step {silent[0]}, in which it draws no noise; noise_steps must contain "
                    "the trained steps of each sample."
                )

    def trajectory(self) -> Trajectory:
        """Return the recorded steps."""
        trained = [] if self.trained_steps is None else self.trained_steps.unique().tolist()
        missing = [step for step in trained if step not in self.records]
        if self.noise_steps is not None and not missing:
            self._refuse_silent_steps()
        if missing or not trained:
            raise UnsupportedPipeline(
                f"The pipeline took no step {missing or ''} through its scheduler; nothing can be recorded."
            )
        joined = {step: _join_parts(parts) for step, parts in self.records.items()}
        columns = list(enumerate(self.trained_steps.tolist()))
        latents, next_latents, log_probs, *means = (
            torch.stack([torch.stack([joined[step][item][row] for step in steps]) for row, steps in columns])
            for item in range(3 + self.request.keeps_means)
        )
        scales = {step: StepScale.join(parts) for step, parts in self.scales.items()}
        weights = weigh_steps(self.request.step_weight, scales, self.trained_steps)
        return Trajectory(
            latents,
            next_latents,
            log_probs,
            steps=self.trained_steps.clone(),
            tokens=None if self.tokens is None else self.tokens.to(self.request.device),
            step_weights=None if weights is None else weights.to(self.request.device),
            means=means[0] if means else None,
            seeds=self.request.seeds,
            initial_seeds=self.initial_seeds,
            num_inference_steps=self.request.num_inference_steps,
            noise_level=self.noise_level,
        )


class BranchRecorder(Recorder):
    """Drives a rollout that branches from a prefix: without the network up to its end, then like `Recorder`."""

    def __init__(self, request: RolloutRequest, noise_level: float):
        super().__init__(request, noise_level)
        prefix = request.prefix
        self.tokens, self.length = prefix.tokens, prefix.length
        self.prediction = None if prefix.prediction is None else JoinedLatents(prefix.prediction)
        self._to_branch = OneStepDriver(prefix.length, prefix.latents, prefix.initial_seeds)

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
            prediction = self.prediction.take(prediction).to(prediction)  # in place of a blank one
        if index >= self.length:
            return super().step(scheduler, index, prediction, timestep, sample)
        if self.loop_length is None:
            self._begin(scheduler)
        self.enter(scheduler, index, sample)
        self._note_scale(scheduler, index, timestep, sample)
        return self.leave(scheduler, self._to_branch.hand_over(index, sample))

    def trajectory(self) -> Trajectory:
        trajectory = super().trajectory()
        if self.prediction is None:
            return trajectory
        shared = torch.full((self.count,), self.length, device=self.request.device)
        return dataclasses.replace(trajectory, shared_steps=shared)


class PrefixDriver(Driver):
    """Drives the first steps of a loop, without noise; keeps the resulting latent and the next prediction."""

    def __init__(self, length: int, initial_seeds: Tensor, device: str | torch.device):
        super().__init__(initial_seeds)
        self.length, self.device = length, device
        self.predictions: list[Tensor] = []  # of each scheduler in step `length`
        self.prefix: Prefix | None = None

    @property
    def needs_network(self) -> bool:
        return self.current <= self.length

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.length >= scheduler.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so samples cannot branch at step {self.length}, "
                "which must come before the last; choose an earlier one (trained_steps)."
            )
        if index > self.length:  # now each scheduler has its prediction
            self.prefix = self._collect()
            raise StepScored
        copies = self.enter(scheduler, index, sample)
        if index < self.length:
            return self.leave(scheduler, scheduler.deterministic(prediction, timestep, sample))
        if id(scheduler) not in self.left:  # the initial latent in step 0
            self.leave(scheduler, sample)
        if copies == 1 and not scheduler.gets_more_of_network:
            self.predictions.append(prediction.flatten(1))
        return sample

    def _collect(self) -> Prefix:
        # not if the pipeline keeps both halves of guidance, or gives the scheduler more than the prediction
        is_shared = len(self.predictions) == len(self.left)
        return Prefix(
            self.join_left().to(self.device),
            self.initial_seeds,
            self.length,
            torch.cat(self.predictions, dim=1).to(self.device) if is_shared else None,
            None if self.tokens is None else self.tokens.to(self.device),
        )


class SolverRecorder(Driver):
    """Drives a rollout with the pipeline's own solver, which calls `leave` with the output of each of its steps."""

    needs_network = True

    def leave(self, scheduler: Any, latents: Tensor) -> Tensor:
        latents = self.join_frames(latents)
        self.count_copies(latents)  # raises if the batch does not divide
        return super().leave(scheduler, latents)


class FinishDriver(Driver):
    """Drives a call without the network whose last step returns the output of a rollout's last step."""

    needs_network = False

    def __init__(self, recorder: Recorder | SolverRecorder):
        super().__init__(recorder.initial_seeds, recorder.tokens)
        if len(recorder.left) != 1:
            raise UnsupportedPipeline(
                f"The pipeline's steps change {len(recorder.left)} latents at once (video and sound), but a reward "
                "that takes latents receives only one; use a reward that takes the decoded samples."
            )
        (self.latents,) = recorder.left.values()

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        return self.latents.clone() if index == scheduler.loop_length - 1 else sample


def _join_parts(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Join what is recorded of each latent that a step moves."""
    handed, next_latents, scores, *means = zip(*parts, strict=True)
    score = average_scores(scores, next_latents)
    return [join_latents(handed), join_latents(next_latents), score, *map(join_latents, means)]


def _split_noise_steps(noise_steps: Sequence | None, count: int) -> list[set[int]] | None:
    """Return one set of steps per sample; None stays None."""
    if noise_steps is None:
        return None
    if not any(isinstance(steps, Collection) for steps in noise_steps):
        return [set(noise_steps)] * count
    if len(noise_steps) != count:
        raise ValueError(
            f"noise_steps has {len(noise_steps)} sequences of steps for {count} samples; give one per sample, or the "
            "steps of all."
        )
    return [set(steps) for steps in noise_steps]
