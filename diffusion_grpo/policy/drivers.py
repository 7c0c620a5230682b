"""Drivers, which decide what each step of a stochastic scheduler does: their base, and those of rollouts.

A driver gets each step of the pipeline's loop from the scheduler and returns the latent with which the pipeline goes
on. A `Recorder` draws noise and records the trained steps as a `Trajectory`; if samples share their first calls, a
`PrefixDriver` makes these. `ProbeDriver` only notes which steps call the trained networks. Replays have drivers of
their own, in `replaying.py`. What drivers do with joined latents is here too.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .schedulers import StochasticScheduler
from .trajectory import Prefix, RolloutRequest, StepScale, Trajectory, make_generators, weigh_steps


class UnsupportedPipeline(ValueError):
    """The pipeline's steps cannot be recorded and replayed one by one.

    Examples:
        >>> run_prefix(pipe, inputs, 3, num_inference_steps=4, initial_seeds=[0, 1])
        Traceback (most recent call last):
        UnsupportedPipeline: The pipeline takes 4 steps, so samples cannot branch at step 3, ...
    """


class StepScored(Exception):
    """Raised to leave the pipeline: the step is scored, and later steps and the decoder are not needed."""


class Driver:
    """The base of all drivers: keeps the position in the loop, and what each scheduler has done.

    Attributes:
        initial_seeds: (batch,) seeds of the samples' initial latents.
        tokens: (batch, tokens) int64 tokens that a language model in the pipeline's call wrote, or must return.
        left: (batch, ...) the last latent of each scheduler, by its id, in the order in which they take their steps.
        network_steps: the steps in which the networks run; in others, only the shape of their output counts.
        output_ndim: how many axes the last output of a trained network has.
        latents: (batch, ...) what `hand_over` returns, joined.
    """

    network_steps = range(sys.maxsize)
    latents: Tensor

    def __init__(self, initial_seeds: Tensor, tokens: Tensor | None = None):
        self.initial_seeds, self.count, self.tokens = initial_seeds, len(initial_seeds), tokens
        self.current = self.output_ndim = 0
        self.left: dict[int, Tensor] = {}
        self._taken: set[tuple[StochasticScheduler, int]] = set()

    @property
    def needs_network(self) -> bool:
        """Whether the networks run in the current step."""
        return self.current in self.network_steps

    def enter(self, scheduler: StochasticScheduler, index: int, sample: Tensor) -> int:
        """Note that a scheduler takes step `index`, as several may together; return the copies of each sample."""
        if (scheduler, index) in self._taken or index + 1 < self.current:
            raise UnsupportedPipeline(
                "The pipeline runs its denoising loop several times in one call (chunks or stages that build on each "
                "other), and such steps cannot be replayed one by one. If it makes a long video in chunks, ask for as "
                "many frames as fit into one."
            )
        self._taken.add((scheduler, index))
        self.current = index + 1
        return self.count_copies(sample)

    def count_copies(self, sample: Tensor) -> int:
        """Return how often each sample occurs in the batch: twice if a pipeline keeps both halves of guidance."""
        if len(sample) % self.count:
            raise UnsupportedPipeline(
                f"The pipeline steps {len(sample)} latents at once, but {self.count} samples were requested; roll out "
                "one sample at a time (rollout_batch_size=1)."
            )
        return len(sample) // self.count

    def leave(self, scheduler: Any, latents: Tensor) -> Tensor:
        """Keep a copy of the output of a step, into which pipelines write conditions in place; return the output."""
        self.left[id(scheduler)] = latents.detach().clone()
        return latents

    def join_left(self) -> Tensor:
        """Return the (batch, ...) float32 latents that all schedulers left."""
        if not self.left:
            raise UnsupportedPipeline("The pipeline took no step through its scheduler; nothing can be recorded.")
        return join_latents([latents[: self.count].float() for latents in self.left.values()])

    def join_frames(self, batch: Tensor) -> Tensor:
        """Return (samples, frames, ...) if a pipeline steps as a batch what its network predicts as frames."""
        has_frames = self.output_ndim == batch.ndim + 1 and len(batch) % self.count == 0
        return batch.unflatten(0, (self.count, -1)) if has_frames else batch

    def hand_over(self, sample: Tensor) -> Tensor:
        """Return a scheduler's part of the joined `latents`, in place of the output of its step."""
        part, self.latents = split_off(self.latents, sample)
        return torch.cat([part] * (len(sample) // self.count)).to(sample)

    def take_inputs(self, number: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Inspect the arguments of a call of trained network `number`; return the arguments to call it with."""
        return args, kwargs


class Recorder(Driver):
    """Drives a rollout: draws noise in the steps that the request names, and records the trained ones.

    With a prefix, samples branch there: the network runs neither before nor for the prediction that they share.
    """

    def __init__(self, request: RolloutRequest, noise_level: float):
        super().__init__(request.initial_seeds)
        self.request, self.noise_level, self.generators = request, noise_level, make_generators(request.seeds)
        noisy, steps = (request.noise_steps, request.steps) if noise_level > 0 else ([[]] * self.count,) * 2
        self.noise_steps = None if noisy is None else [set(steps) for steps in noisy]
        self.trained_steps: Tensor | None = None  # (batch, steps) int64; None: all but the last
        if steps is not None:
            self.trained_steps = torch.tensor([list(row) for row in steps], dtype=torch.int64).reshape(len(steps), -1)
        self.records_steps = self.trained_steps is None or bool(self.trained_steps.numel())
        self.records: dict[int, list[list[Tensor]]] = {}  # of each latent: input, output, log-density, maybe mean
        self.scales: dict[int, list[StepScale]] = {}
        self.loop_length: int | None = None
        self.branch, self.prediction = 0, None
        if (prefix := request.prefix) is not None:
            self.tokens, self.branch = prefix.tokens, prefix.length
            self.latents, self.prediction = prefix.latents, prefix.prediction
            self.network_steps = range(prefix.length + (prefix.prediction is not None), sys.maxsize)

    def _begin(self, loop_length: int) -> None:
        """Set what depends on the length of the loop, known only now: image-to-image starts in the middle."""
        self.loop_length, last = loop_length, loop_length - 1
        noisy = [set(range(loop_length))] * self.count if self.noise_steps is None else self.noise_steps
        self.noise_steps = [steps - (set() if self.request.noise_in_last_step else {last}) for steps in noisy]
        if self.trained_steps is None:
            self.trained_steps = torch.arange(last).expand(self.count, -1)
        trained = self.trained_steps.tolist()
        if any(step >= last for row in trained for step in row):
            raise UnsupportedPipeline(
                f"The pipeline takes {loop_length} steps, and the last has no noise: trained steps must be below "
                f"{last}, got {sorted({step for row in trained for step in row})}; it makes fewer steps than "
                "num_inference_steps says (strength below 1), so raise num_inference_steps or set trained_steps."
            )
        early = sorted({step for steps in self.noise_steps for step in steps if step < self.branch})
        if early:
            raise ValueError(
                f"Samples that branch at step {self.branch} cannot draw noise in step {early[0]} before it; let "
                "noise_steps begin there."
            )
        for row, (steps, noisy_steps) in enumerate(zip(trained, self.noise_steps, strict=True)):
            if silent := sorted(set(steps) - noisy_steps):  # without noise, a step has no density
                raise ValueError(
                    f"Sample {row} trains on step {silent[0]}, in which it draws no noise; noise_steps must contain "
                    "the trained steps of each sample."
                )

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.loop_length is None:
            self._begin(scheduler.loop_length)
        if not self.request.is_complete and self.records and index > self.trained_steps.max():
            raise StepScored
        copies = self.enter(scheduler, index, sample)
        weighted = self.request.weighted_steps if self.request.step_weight != "none" and self.records_steps else ()
        if index < self.loop_length - 1 and (weighted is None or index in weighted):  # all these set the weights
            scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
            self.scales.setdefault(index, []).append(scale)
        if index < self.branch:
            return self.leave(scheduler, sample if index < self.branch - 1 else self.hand_over(sample))
        if index == self.branch and self.prediction is not None:
            part, self.prediction = split_off(self.prediction, prediction)
            prediction = part.to(prediction)  # in place of a blank one
        is_noisy = torch.tensor([index in steps for steps in self.noise_steps])
        if not is_noisy.any():
            return self.leave(scheduler, scheduler.deterministic(prediction, timestep, sample))
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        noise = [  # each sample's from its own generator
            torch.randn(sample.shape[1:], generator=generator) if noisy else torch.zeros(sample.shape[1:])
            for generator, noisy in zip(self.generators, is_noisy.tolist(), strict=True)
        ]
        latents = (mean + std * torch.stack(noise * copies).to(mean.device)).to(sample.dtype)
        if not is_noisy.all():  # samples without noise, as in a step without noise
            silent = scheduler.deterministic(prediction, timestep, sample).to(latents)
            mask = torch.cat([is_noisy] * copies).to(latents.device).view(-1, *[1] * (latents.ndim - 1))
            latents = torch.where(mask, latents, silent)
        if index in self.trained_steps:
            handed = self.left.get(id(scheduler), sample)[: self.count].float()
            # score the rounded latents, which are the ones that a replay gets
            next_latents, mean, std = first_rows((latents.float(), mean, std), sample, self.count)
            record = [handed, next_latents, scheduler.log_prob(next_latents, mean, std)]
            record += [mean] if self.request.keeps_means else []
            self.records.setdefault(index, []).append([x.clone().to(self.request.device) for x in record])
        return self.leave(scheduler, latents)

    def trajectory(self) -> Trajectory:
        """Return the recorded steps."""
        request, trained = self.request, [] if self.trained_steps is None else self.trained_steps.unique().tolist()
        missing = [step for step in trained if step not in self.records]
        if missing or not trained:
            steps = f"step {missing}" if missing else "step"
            raise UnsupportedPipeline(f"The pipeline took no {steps} through its scheduler; nothing can be recorded.")
        joined = {}  # a step may move several latents
        for step, parts in self.records.items():
            handed, next_latents, scores, *means = zip(*parts, strict=True)
            score = average_scores(scores, next_latents)
            joined[step] = [join_latents(handed), join_latents(next_latents), score, *map(join_latents, means)]
        columns = list(enumerate(self.trained_steps.tolist()))
        latents, next_latents, log_probs, *means = (
            torch.stack([torch.stack([joined[step][item][row] for step in steps]) for row, steps in columns])
            for item in range(3 + request.keeps_means)
        )
        weights, shared_steps = None, None
        if request.step_weight != "none":
            scales = {step: StepScale.join(parts) for step, parts in self.scales.items()}
            weights = weigh_steps(request.step_weight, scales, self.trained_steps).to(request.device)
        if request.prefix is not None and request.prefix.prediction is not None:
            shared_steps = torch.full((self.count,), self.branch, device=request.device)
        return Trajectory(
            latents,
            next_latents,
            log_probs,
            steps=self.trained_steps.clone(),
            tokens=None if self.tokens is None else self.tokens.to(request.device),
            step_weights=weights,
            means=means[0] if means else None,
            finished=self.join_left().to(request.device) if request.keeps_finished else None,
            shared_steps=shared_steps,
            seeds=request.seeds,
            initial_seeds=self.initial_seeds,
            num_inference_steps=request.num_inference_steps,
            noise_level=self.noise_level,
        )


class EntryRecorder(Recorder):
    """Drives a rollout without noise, and keeps the latents that enter one step of each sample."""

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if any(index in steps for steps in self.request.steps):
            handed = self.left.get(id(scheduler), sample)[: self.count].float()
            self.records.setdefault(index, []).append([handed.clone().to(self.request.device)])
        return super().step(scheduler, index, prediction, timestep, sample)

    @property
    def entered(self) -> Tensor:
        """The latents, (batch, ...) float32."""
        joined = {step: join_latents([part for (part,) in parts]) for step, parts in self.records.items()}
        return torch.stack([joined[step][row] for row, (step,) in enumerate(self.request.steps)])


class PrefixDriver(Driver):
    """Drives the first steps of a loop, without noise; keeps the resulting latent and the next prediction."""

    def __init__(self, length: int, initial_seeds: Tensor, device: str | torch.device):
        super().__init__(initial_seeds)
        self.length, self.device = length, device
        self.predictions: list[Tensor] = []  # of each scheduler in step `length`
        self.prefix: Prefix | None = None
        self.network_steps = range(length + 1)

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        if self.length >= scheduler.loop_length - 1:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so samples cannot branch at step {self.length}, "
                "which must come before the last; choose an earlier one (trained_steps)."
            )
        if index > self.length:  # now each scheduler has its prediction
            # not if the pipeline keeps both halves of guidance, or gives the scheduler more than the prediction
            is_shared = len(self.predictions) == len(self.left)
            self.prefix = Prefix(
                self.join_left().to(self.device),
                self.initial_seeds,
                self.length,
                torch.cat(self.predictions, dim=1).to(self.device) if is_shared else None,
                None if self.tokens is None else self.tokens.to(self.device),
            )
            raise StepScored
        copies = self.enter(scheduler, index, sample)
        if index < self.length:
            return self.leave(scheduler, scheduler.deterministic(prediction, timestep, sample))
        if id(scheduler) not in self.left:  # the initial latent in step 0
            self.leave(scheduler, sample)
        if copies == 1 and not scheduler.gets_more_of_network:
            self.predictions.append(prediction.flatten(1))
        return sample


class SolverRecorder(Driver):
    """Drives a rollout with the pipeline's own solver, which calls `leave` with the output of each of its steps."""

    def leave(self, scheduler: Any, latents: Tensor) -> Tensor:
        latents = self.join_frames(latents)
        self.count_copies(latents)  # raises if the batch does not divide
        return super().leave(scheduler, latents)


class FinishDriver(Driver):
    """Drives a call without the network whose last step returns the output of a rollout's last step."""

    network_steps = range(0)

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


class ProbeDriver(Driver):
    """Goes through the whole loop without a network, notes which steps call the trained ones, and decodes nothing."""

    network_steps = range(0)

    def __init__(self, initial_seeds: Tensor):
        super().__init__(initial_seeds)
        self.passing: dict[int, set[int]] = {}

    def take_inputs(self, number: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.passing.setdefault(number, set()).add(self.current)
        return args, kwargs

    def step(self, scheduler: Any, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index, sample)
        if index == scheduler.loop_length - 1:
            raise StepScored
        return sample


# A step moves one latent, or one for each scheduler (video and audio). Records hold them joined.


def split_off(joined: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of several joined latents, (batch, ...) in the shape of a sample, and the joined rest."""
    flat, size = joined.flatten(1), sample[0].numel()
    return flat[:, :size].reshape(len(joined), *sample.shape[1:]), flat[:, size:]


def join_latents(parts: Sequence[Tensor]) -> Tensor:
    """Join several latents of each sample into one tensor, (batch, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


def average_scores(scores: Sequence[Tensor], latents: Sequence[Tensor]) -> Tensor:
    """Return the (batch,) mean log-density of the latents that one step moves, weighted by their sizes."""
    if len(scores) == 1:
        return scores[0]
    sizes = [part[0].numel() for part in latents]
    return sum(size * score for size, score in zip(sizes, scores, strict=True)) / sum(sizes)


def first_rows(values: Sequence[Tensor], sample: Tensor, count: int) -> list[Tensor]:
    """Keep the first copy of each sample in values that have one row per row of `sample`."""
    return [value[:count] if value.ndim and len(value) == len(sample) else value for value in values]
