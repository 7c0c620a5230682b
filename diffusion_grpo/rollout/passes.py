"""Make passes without gradients.

They give log-probabilities of recorded steps, their divergence from a reference, and predictions on re-noised
samples.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..algorithms.base import Reference
from ..algorithms.batch import MicroBatch, Part, RecordedClean, Rows
from ..config.settings import DiffusionGRPOConfig
from ..data.inputs import PipelineInputs
from ..policy.base import Policy
from ..policy.token_process import TokenDistribution
from ..policy.trajectory import CleanSamples, StepDistribution, Trajectory
from .buffer import RolloutBuffer
from .runtime import Runtime

PASSES_MEASURED = 3  # of a micro-batch, at most, for the change of an update


class MovingCopy(Protocol):
    """A moving copy of the policy's weights."""

    has_moved: bool

    def place(self, is_shown: bool) -> contextlib.AbstractContextManager:
        """Use the copy's weights (`is_shown`) or the policy's own inside this context."""


class Passes:
    """Passes without gradient: old values of recorded steps, comparisons with the reference, predictions."""

    def __init__(
        self,
        args: DiffusionGRPOConfig,
        policy: Policy,
        inputs: PipelineInputs,
        runtime: Runtime,
        *,
        reference: Reference | None = None,
        old_policy: MovingCopy | None = None,
        run: Callable = lambda method, *args: method(*args),
    ):
        self._args, self._policy, self._inputs, self.run = args, policy, inputs, run
        self._backend, self._metrics = runtime.backend, runtime.metrics
        self._reference, self._old_policy = reference, old_policy
        self.recording, self._anchor = args.recording, args.anchor

    def show_sampler(self) -> contextlib.AbstractContextManager:
        """Use the weights of the policy that makes rollouts inside this context."""
        return self._show_old() if self.recording.sampler == "old" else contextlib.nullcontext()

    def _show_old(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._old_policy is None else self._old_policy.place(is_shown=True)

    def record_old(self, buffer: RolloutBuffer) -> None:
        """Record what updates need of the policy that made a rollout, before the first of them moves it."""
        is_clean = self.recording.keeps == "clean"
        if self._anchor == "replay":
            self.run(self._record_errors if is_clean else self._record_anchor, buffer)
        if self._old_policy is not None:
            with self._show_old():
                self.run(self._record_old_clean, buffer)
            buffer.has_current_old = not self._old_policy.has_moved
        if self._anchor == "rollout" and is_clean and not buffer.has_current_old:
            self.run(self._record_first_pass, buffer)

    def _record_anchor(self, buffer: RolloutBuffer) -> None:
        """Set the old log-probabilities from replays in the micro-batches that are trained; add means if needed."""
        keeps_means = self.recording.old == "mean"
        log_probs, means = zip(*[self.anchor(buffer.part(chunk), keeps_means) for chunk in buffer.chunks()])
        buffer.old_log_probs = torch.cat(log_probs)
        if keeps_means:
            buffer.add_to_samples("means", [mean for part in means for mean in part])

    def _record_errors(self, buffer: RolloutBuffer) -> None:
        """Set the old log-probabilities to the negative errors of re-noised samples; keep the first predictions."""
        errors, recorded = [], None
        for chunk in buffer.chunks():
            values, first = self.measure_errors(buffer.part(chunk))
            errors.append(values)
            recorded = recorded or first
        buffer.old_log_probs, buffer.recorded_clean = torch.cat(errors), recorded

    def _record_first_pass(self, buffer: RolloutBuffer) -> None:
        """Keep the predictions of the rollout's first pass alone."""
        buffer.recorded_clean = self.measure_errors(buffer.part(buffer.chunks()[0]), passes=1)[1]

    def _record_old_clean(self, buffer: RolloutBuffer) -> None:
        """Add the old policy's prediction of each re-noised sample at each of its steps."""
        clean = [steps for chunk in buffer.chunks() for steps in self.predict_clean(buffer.part(chunk))]
        buffer.add_to_samples("old_clean", [steps[None] for steps in clean])

    def anchor(self, batch: MicroBatch, keeps_means: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Return (batch, steps) log-probabilities and, if wanted, each sample's (1, steps, ...) float32 means."""
        means = [torch.empty_like(sample.next_latents) for sample in batch.samples] if keeps_means else []

        def measure(now: StepDistribution | TokenDistribution, places: list[tuple[int, int]]) -> Tensor:
            for (index, column), mean in zip(places, now.mean if keeps_means else (), strict=keeps_means):
                means[index][0, column] = mean.view_as(means[index][0, column]).to(means[index])
            return now.log_prob

        return self._measure(
            batch, lambda places, part, step: measure(self._policy.replay(**part.replay_arguments(step)), places)
        ), means

    def measure_errors(self, batch: MicroBatch, passes: int | None = None) -> tuple[Tensor, RecordedClean]:
        """Return (batch, steps) negative denoising errors, and the first pass's predictions by seed and step."""
        first: RecordedClean = {}

        def measure(places: list[tuple[int, int]], part: Part, step: int) -> Tensor:
            now, samples = self._policy.denoise(part.inputs, part.trajectory, step), part.trajectory
            if not first:
                seeds = samples.initial_seeds.tolist()
                first.update({(seed, step): clean.to(samples.latents) for seed, clean in zip(seeds, now.clean)})
            return -now.error()

        return self._measure(batch, measure, passes), first

    @torch.no_grad()
    def predict_clean(self, batch: MicroBatch) -> list[Tensor]:
        """Return the current policy's prediction of each re-noised sample, one (steps, ...) tensor per sample."""
        predictions: list[list[Tensor]] = [[] for _ in batch.samples]
        parts = batch.parts
        for (number, step), is_own in self._passes(batch):
            whole = parts[number]
            part = whole.at_step(step)
            clean = self._policy.denoise(part.inputs, part.trajectory, step).clean
            is_trained = (whole.trajectory.steps == step).any(1)
            indices = [index for index, kept in zip(batch.calls[number], is_trained.tolist(), strict=True) if kept]
            if is_own:  # not a pass repeated to keep processes in step
                for index, sample in zip(indices, clean, strict=True):
                    predictions[index].append(sample.to(batch.samples[index].latents))
        return [torch.stack(steps) for steps in predictions]

    @torch.no_grad()
    def predict_twice(self, batch: MicroBatch) -> list[tuple[Tensor, Tensor]]:
        """Return the policy's predictions in a few passes of a micro-batch, for its samples and for nearby latents."""
        parts, predictions, passes = batch.parts, [], self._passes(batch)
        for (number, step), is_own in passes[:: math.ceil(len(passes) / PASSES_MEASURED)]:
            part = parts[number].at_step(step)
            nearby = dataclasses.replace(part, trajectory=part.trajectory.perturb())
            pair = (self._predict(part, step), self._predict(nearby, step))
            predictions += [pair] if is_own else []
        return predictions

    def _predict(self, part: Part, step: int) -> Tensor:
        if self.recording.keeps == "entered":
            return self._policy.predict_entry(part.inputs, part.trajectory).float()
        if isinstance(part.trajectory, CleanSamples):
            return self._policy.denoise(part.inputs, part.trajectory, step).prediction.float()
        return self._policy.replay(**part.replay_arguments(step)).prediction.float()

    def sequence_log_ratio(self, batch: MicroBatch) -> Tensor:
        """Return each sample's log-ratio, (batch,), averaged over its trained steps."""
        now = self.anchor(batch)[0]
        return batch.mean_over_steps(now - batch.old_log_probs.to(now))

    def compare(self, batch: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        """Compare the policy with the reference: (batch, steps) divergences, and the means of other metrics."""
        compared: dict[str, Tensor] = {}

        def measure(places: list[tuple[int, int]], part: Part, step: int) -> Tensor:
            distance, others = self._compare_pass(part, step)
            for name, values in others.items():
                by_pass = compared.setdefault(name, torch.full_like(batch.old_log_probs, torch.nan))
                for (index, column), value in zip(places, values.tolist(), strict=True):
                    by_pass[index, column] = value
            return distance

        divergences = self._measure(batch, measure)
        return divergences, {name: values.double().mean().item() for name, values in compared.items()}

    def _compare_pass(self, part: Part, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (batch,) distances of one pass from the reference, and its other metrics."""
        if self.recording.keeps == "entered":
            now = self._policy.finish(part.inputs, part.trajectory, is_decoded=False)
            return now.distance(self._reference.finish(part.inputs, part.trajectory)), {}
        if isinstance(part.trajectory, CleanSamples):
            now, other = (each.denoise(part.inputs, part.trajectory, step) for each in (self._policy, self._reference))
            return now.error(other.clean), now.compare(other)
        arguments = part.replay_arguments(step)
        now, other = self._policy.replay(**arguments), self._reference.replay(**arguments)
        return now.divergence(other.mean), now.compare(other)

    def rollout_divergences(self, rows: Rows, samples: list[Trajectory]) -> Tensor:
        """Return (samples, steps) KL divergences from the reference, in the batches of the rollout."""
        size, parts = self._args.rollout_call_size, []
        for start in range(0, len(rows), size):
            few, part = rows[start : start + size], samples[start : start + size]
            old = torch.cat([sample.log_probs for sample in part])
            batch = MicroBatch(few, part, self._inputs.parts(few), torch.zeros(len(few)), old, self._inputs)
            divergences, compared = self.compare(batch)
            parts.append(divergences)
            for name, value in compared.items() if self._args.beta == 0 else ():  # else updates measure them
                self._metrics.add(name, value, len(batch))
        return torch.cat(parts)

    @torch.no_grad()
    def _measure(self, batch: MicroBatch, measure: Callable[..., Tensor], passes: int | None = None) -> Tensor:
        """Return the results of `measure`, (batch, steps), at each trained step, or at those of the first `passes`.

        It gets the place of each sample's result (index in the micro-batch, column of the step), part and step.
        """
        values = torch.full_like(batch.old_log_probs, torch.nan)
        parts = batch.parts
        for (number, step), _ in self._passes(batch)[:passes]:  # a repeated pass gives the same values
            indices, whole = batch.calls[number], parts[number]
            part = whole.at_step(step)
            measured = values[indices]
            where = whole.trajectory.steps == step
            places = [(indices[row], column) for row, column in where.nonzero().tolist()]
            measured[where] = measure(places, part, step).to(measured)
            values[indices] = measured
        return values

    def _passes(self, batch: MicroBatch) -> list[tuple[tuple[int, int], bool]]:
        """Return each pass as the index of its call and its step, and whether it counts; processes stay in step."""
        turns = batch.passes(take_turns=len(self._policy.component) > 1)
        return [one for turn in turns for one in self._backend.equalize(turn)]
