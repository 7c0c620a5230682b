"""Drivers of rollouts: they draw noise, record trained steps, and keep finished latents.

A `Recorder` makes a `Trajectory`. If samples share their first calls, a `PrefixDriver` makes these calls and a
`BranchRecorder` continues from there.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .drivers import Driver, OneStepDriver, StepParts, StepScored, UnsupportedPipeline, first_rows, join_latents
from .schedulers import StochasticScheduler
from .step_weights import weigh_steps
from .trajectory import Prefix, RolloutRequest, StepScale, Trajectory, make_generators


class Recorder(Driver):
    """Drives a rollout: draws noise in the steps that the request names, and records the trained ones.

    Without a noise level, or without trained steps, nothing is recorded.
    """

    needs_network = True

    def __init__(self, request: RolloutRequest, noise_level: float):
        super().__init__(request.initial_seeds, len(request.seeds), noise_level)
        self.request, self.generators = request, make_generators(request.seeds)
        noisy, steps = (request.noise_steps, request.steps) if noise_level > 0 else ([], [[]] * self.count)
        self.noise_steps = _split_noise_steps(noisy, self.count)
        self.trained_steps: Tensor | None = None  # (batch, steps) int64; None: all but the last
        if steps is not None:
            rows = torch.tensor([list(row) for row in steps], dtype=torch.int64)
            self.trained_steps = rows.reshape(len(rows), -1)
        self.records: dict[int, StepParts] = {}
        self.scales: dict[int, list[StepScale]] = {}
        self.left: dict[int, Tensor] = {}  # the last latent of each scheduler
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
        self.enter(scheduler, index)
        self._note_scale(scheduler, index, timestep, sample)
        if any(index in steps for steps in self.noise_steps):
            latents = self._draw_next(scheduler, index, prediction, timestep, sample)
        else:
            latents = scheduler.deterministic(prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()  # pipelines write conditions into latents in place
        return latents

    def _note_scale(self, scheduler, index: int, timestep: Any, sample: Tensor) -> None:
        """Record the scale of a step that may be trained: the weights of all trained steps depend on it."""
        weighted = self.request.weighted_steps
        if self.request.step_weight == "none" or index >= self.loop_length - 1 or not self.records_steps:
            return
        if weighted is None or index in weighted:
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
        if silent is not None:  # samples without noise, as in a step without noise
            mask = torch.cat([is_noisy] * copies).to(latents.device).view(-1, *[1] * len(shape))
            latents = torch.where(mask, latents, silent.to(latents))
        if index in self.trained_steps:
            handed = self.left.get(id(scheduler), sample)[: self.count].float()
            # score the rounded latents, which are the ones that a replay gets
            next_latents, mean, std = first_rows((latents.float(), mean, std), sample, self.count)
            score = scheduler.log_prob(next_latents, mean, std)
            kept = [handed, next_latents, score] + ([mean] if self.request.keeps_means else [])
            kept = (x.clone().to(self.request.device) for x in kept)
            self.records.setdefault(index, StepParts()).add(*kept)
        return latents

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
        steps = {
            step: (
                join_latents(parts.handed),
                join_latents(parts.next),
                parts.log_prob(),
                join_latents(parts.means) if parts.means else None,
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
            for i in range(3 + self.request.keeps_means)
        )
        tokens = None if self.tokens is None else self.tokens.to(self.request.device)
        scales = {step: StepScale.join(parts) for step, parts in self.scales.items()}
        weights = weigh_steps(self.request.step_weight, scales, self.trained_steps)
        return Trajectory(
            latents,
            next_latents,
            log_probs,
            steps=self.trained_steps.clone(),
            tokens=tokens,
            step_weights=None if weights is None else weights.to(self.request.device),
            means=means[0] if means else None,
            seeds=self.request.seeds,
            initial_seeds=self.initial_seeds,
            num_inference_steps=self.request.num_inference_steps,
            noise_level=self.noise_level,
        )


class BranchRecorder(Recorder):
    """Drives a rollout that branches from a prefix: without the network up to its end, then like `Recorder`.

    The first step of the samples' own uses the prefix's prediction, if there is one.
    """

    def __init__(self, request: RolloutRequest, noise_level: float):
        super().__init__(request, noise_level)
        prefix = request.prefix
        self.tokens, self.length, self.prediction = prefix.tokens, prefix.length, prefix.prediction
        self._offset = 0  # in that prediction, if a step moves several latents
        self._to_branch = OneStepDriver(
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
        self.rows(sample)  # raises if the batch does not divide
        self._note_scale(scheduler, index, timestep, sample)
        latents = self._to_branch.hand_over(index, sample)
        self.left[id(scheduler)] = latents.clone()
        return latents

    def _take_prediction(self, blank: Tensor) -> Tensor:
        """Return the prefix's prediction in the shape of the blank one that the pipeline made without its network."""
        start, self._offset = self._offset, self._offset + blank[0].numel()
        return self.prediction[:, start : self._offset].reshape(blank.shape).to(blank)

    def trajectory(self) -> Trajectory:
        found = super().trajectory()
        if self.prediction is None:
            return found
        return dataclasses.replace(
            found, shared_steps=torch.full((self.count,), self.length, device=self.request.device)
        )


class PrefixDriver(Driver):
    """Drives the first steps of a loop, without noise; keeps the resulting latent and the next prediction.

    Args:
        initial_seeds: (batch,) int64 seeds of the initial latents.
    """

    def __init__(self, length: int, initial_seeds: Tensor, device: str | torch.device):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.length, self.device = length, device
        self.left: dict[int, Tensor] = {}  # the last latent of each scheduler
        self.predictions: list[Tensor] = []  # of each scheduler in step `length`
        self.found: Prefix | None = None

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
            self.found = self._collect()
            raise StepScored
        self.enter(scheduler, index)
        copies = self.rows(sample)
        if index == self.length:
            self.left.setdefault(id(scheduler), sample.clone())  # the initial latent in step 0
            if copies == 1 and not scheduler.gets_more_of_network:
                self.predictions.append(prediction.flatten(1))
            return sample
        latents = scheduler.deterministic(prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()
        return latents

    def _collect(self) -> Prefix:
        latents = join_latents([part[: self.count].float() for part in self.left.values()])
        # not if the pipeline keeps both halves of guidance, or gives the scheduler more than the prediction
        is_shared = len(self.predictions) == len(self.left)
        return Prefix(
            latents.to(self.device),
            self.initial_seeds,
            self.length,
            torch.cat(self.predictions, dim=1).to(self.device) if is_shared else None,
            None if self.tokens is None else self.tokens.to(self.device),
        )


class SolverRecorder(Driver):
    """Drives a rollout with the pipeline's own solver, and keeps the output of its last step.

    Attributes:
        left: (batch, ...) the last latent of each scheduler, by its id, in the order in which they take their steps.
    """

    needs_network = True

    def __init__(self, initial_seeds: Tensor):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.left: dict[int, Tensor] = {}

    def keep(self, scheduler: Any, latents: Tensor) -> None:
        """Keep the output of a step of the solver."""
        self.rows(latents)  # raises if the batch does not divide
        self.left[id(scheduler)] = latents.detach().clone()


def join_clean(recorder: Recorder | SolverRecorder) -> Tensor:
    """Return the (batch, ...) float32 output of the last step of a rollout; several latents are joined."""
    parts = [latents[: recorder.count].float() for latents in recorder.left.values()]
    if not parts:
        raise UnsupportedPipeline("The pipeline took no step through its scheduler; nothing can be recorded.")
    return join_latents(parts)


class FinishDriver(Driver):
    """Drives a call without the network whose last step returns the output of a rollout's last step."""

    needs_network = False

    def __init__(self, recorder: Recorder | SolverRecorder):
        super().__init__(recorder.initial_seeds, recorder.count, recorder.noise_level)
        self.tokens = recorder.tokens
        if len(recorder.left) != 1:
            raise UnsupportedPipeline(
                f"The pipeline's steps change {len(recorder.left)} latents at once (video and sound), but a reward "
                "that takes latents receives only one; use a reward that takes the decoded samples."
            )
        (self.left,) = recorder.left.values()

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        return self.left.clone() if index == scheduler.loop_length - 1 else sample


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
