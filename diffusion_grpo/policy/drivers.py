"""The base of drivers, which decide what each step of a stochastic scheduler does.

A driver gets each step of the pipeline's loop from the scheduler and returns the latent with which the pipeline goes
on. The drivers of rollouts are in `recording.py`, those of replays and predictions in `replaying.py`.
"""

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
    """The base of all drivers: keeps the position in the loop, and which scheduler has taken which step.

    Attributes:
        initial_seeds: (batch,) seeds of the samples' initial latents.
        tokens: (batch, tokens) int64 tokens that a language model in the pipeline's call wrote, or must return.
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

    def note_call(self, number: int) -> None:
        """Note that the pipeline calls trained network `number` in the current step."""

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Inspect the arguments of a network's call; return the arguments to call it with."""
        return args, kwargs

    def rows(self, sample: Tensor) -> int:
        """Return how often each sample occurs in the batch: twice if a pipeline keeps both halves of guidance."""
        if len(sample) % self.count:
            raise UnsupportedPipeline(
                f"The pipeline steps {len(sample)} latents at once, but {self.count} samples were requested; roll out "
                "one sample at a time (rollout_batch_size=1)."
            )
        return len(sample) // self.count


class StepParts:
    """The latents that one step of the loop moves: one, or one for each scheduler (video and audio)."""

    def __init__(self):
        self.handed: list[Tensor] = []
        self.next: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.means: list[Tensor] = []

    def add(self, handed: Tensor, next_latents: Tensor, score: Tensor, mean: Tensor | None = None) -> None:
        """Add the part of one latent: its input, its output, the log-density, and optionally the mean."""
        self.handed.append(handed)
        self.next.append(next_latents)
        self.scores.append(score)
        self.means += [] if mean is None else [mean]

    def log_prob(self) -> Tensor:
        """Return the (batch,) log-density of all parts, averaged over all their dimensions."""
        return average_scores(self.scores, [part[0].numel() for part in self.next])


def average_scores(scores: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the (batch,) mean log-density of the latents that one step moves, weighted by their sizes."""
    if len(scores) == 1:
        return scores[0]
    return sum(size * score for size, score in zip(sizes, scores, strict=True)) / sum(sizes)


def first_rows(values: Sequence[Tensor], sample: Tensor, count: int) -> list[Tensor]:
    """Keep the first copy of each sample in values that have one row per row of `sample`."""
    return [value[:count] if value.ndim and len(value) == len(sample) else value for value in values]


def join_latents(parts: list[Tensor]) -> Tensor:
    """Join several latents of each sample into one tensor, (batch, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)


class OneStepDriver(Driver):
    """The base of drivers that go to one step without the network, and give that step a latent.

    Args:
        latents: (batch, ...) input of that step.
    """

    def __init__(self, index: int, latents: Tensor, initial_seeds: Tensor, tokens: Tensor | None, noise_level: float):
        super().__init__(initial_seeds, len(latents), noise_level)
        self.tokens, self.index = tokens, index
        self.latents = latents
        self.offset = 0  # in the flattened latents, if a step moves several

    @property
    def needs_network(self) -> bool:
        return self.current == self.index

    def hand_over(self, index: int, sample: Tensor) -> Tensor:
        """Return the output of a step that comes before the one in which the network runs."""
        if index < self.index - 1:
            return sample
        part, self.offset = take_part(self.latents, self.offset, sample, self.count)
        return torch.cat([part] * self.rows(sample)).to(sample)


def take_part(whole: Tensor, start: int, sample: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the next part of (batch, ...) joined latents, in the shape of `sample`, and the index of its end."""
    end = start + sample[0].numel()
    return whole.flatten(1)[:, start:end].reshape(count, *sample.shape[1:]), end


class ProbeDriver(Driver):
    """Goes through the whole loop without a network, notes which steps call the trained ones, and decodes nothing.

    Args:
        initial_seeds: (batch,) int64 seeds of the initial latents.
    """

    needs_network = False

    def __init__(self, initial_seeds: Tensor):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.passing: dict[int, set[int]] = {}

    def note_call(self, number: int) -> None:
        self.passing.setdefault(number, set()).add(self.current)

    def step(self, scheduler: Any, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        if index == scheduler.loop_length - 1:
            raise StepScored
        return sample
