"""The base of drivers, which decide what each step of a stochastic scheduler does.

A driver gets each step of the pipeline's loop from the scheduler and returns the latent with which the pipeline goes
on. The drivers of rollouts are in `recording.py`, those of replays in `replaying.py`. `ProbeDriver` only notes which
steps call the trained networks. What drivers do with joined latents is here too.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .schedulers import StochasticScheduler


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
