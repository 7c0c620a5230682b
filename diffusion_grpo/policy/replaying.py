"""Drivers of replays: they go to one step without the network, and give that step a latent.

A `ReplayDriver` makes the `StepDistribution` of a recorded step, a `RenoiseDriver` predicts finished samples that it
has noised again, and a `LastStepsDriver` takes the remaining steps. `InputWatch` finds out which elements of a latent
the networks get.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from .drivers import Driver, StepScored, UnsupportedPipeline, average_scores, first_rows, join_latents, split_off
from .schedulers import StochasticScheduler
from .trajectory import (
    CleanSamples,
    Denoised,
    StepDistribution,
    StepScale,
    Trajectory,
    first_of_each,
    make_generators,
    sample_seed,
)


class ReplayDriver(Driver):
    """Drives a replay; `sources` (batch,) int64 is the row of the call's inputs that each sample uses."""

    def __init__(self, index: int, trajectory: Trajectory, sources: Tensor | None = None):
        rows, columns = (trajectory.steps == index).nonzero(as_tuple=True)
        if len(rows) != len(trajectory):
            raise ValueError(
                f"step {index} was recorded for {len(rows)} of {len(trajectory)} samples; select those first."
            )
        firsts = slice(None) if sources is None else first_of_each(sources)
        tokens = None if trajectory.tokens is None else trajectory.tokens[firsts]
        super().__init__(trajectory.initial_seeds[firsts], tokens)
        self.index, self.network_steps, self.sources = index, range(index, index + 1), sources
        self.latents = trajectory.latents[rows, columns][firsts]
        self.next_latents, self.noise_level = trajectory.next_latents[rows, columns], trajectory.noise_level
        # of each latent: scheduler, next latents, mean, std, scale, prediction, velocity
        self.parts: list[tuple[StochasticScheduler, Tensor, Tensor, Tensor, StepScale, Tensor, Tensor]] = []
        self.scored: StepDistribution | None = None

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index, sample)
        if index < self.index:
            return sample if index < self.index - 1 else self.hand_over(sample)
        mean, std = scheduler.distribution(prediction, timestep, sample, self.noise_level)
        next_latents, self.next_latents = split_off(self.next_latents, sample)
        next_latents = next_latents.to(device=mean.device, dtype=torch.float32)
        mean, std = map(self._spread, first_rows((mean, std), sample, self.count))
        scale = scheduler.scale(timestep, sample, self.noise_level, self.count)
        scale = StepScale(*map(self._spread, (scale.std, scale.jacobian, scale.moving)))
        with torch.no_grad():
            velocity = scheduler.denoise(prediction, timestep, sample).velocity()
        outputs = (self._spread(part[: self.count].detach()) for part in (prediction, velocity))
        self.parts.append((scheduler, next_latents, mean, std, scale, *outputs))
        if not self.next_latents.numel():
            self.scored = self._score()
            raise StepScored
        return sample  # another scheduler steps another latent

    def _spread(self, values: Tensor) -> Tensor:
        """Expand values with one row per call of the network to one row per sample."""
        is_spread = self.sources is not None and values.ndim > 0 and len(values) == self.count
        return values[self.sources.to(values.device)] if is_spread else values

    def _score(self) -> StepDistribution:
        """Build the distribution of the step, flattened if the step moves several latents."""
        schedulers, nexts, means, stds, scales, *outputs = zip(*self.parts, strict=True)
        mean, std = join_latents(means), stds[0]
        if len(means) > 1:
            std = join_latents([each.expand(part.shape) for each, part in zip(stds, means, strict=True)])
            shapes, rest, means = means, mean, []
            for part in shapes:  # cut out of the joined mean, so that gradients of log-probabilities reach it too
                part, rest = split_off(rest, part)
                means.append(part)
        parts = zip(schedulers, nexts, means, stds, strict=True)
        log_prob = average_scores([scheduler.log_prob(*values) for scheduler, *values in parts], means)
        if not (std > 0).all():  # elements held fixed, whose mean equals the reference mean
            std = torch.where(std > 0, std, 1.0)
        return StepDistribution(mean, std, log_prob, StepScale.join(scales), *map(join_latents, outputs))


class RenoiseDriver(Driver):
    """Drives a prediction on re-noised samples: gives one step the noised samples, and keeps the predictions."""

    def __init__(self, index: int, samples: CleanSamples, networks: Sequence[nn.Module]):
        super().__init__(samples.initial_seeds, samples.tokens)
        self.index, self.network_steps = index, range(index, index + 1)
        self.target = self.latents = samples.latents
        self.watch = InputWatch(networks)
        seeds = [sample_seed("renoise", int(seed), index) for seed in samples.seeds]
        self.generators = make_generators(torch.tensor(seeds))
        self.handed: list[Tensor] = []
        self.parts: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.denoised: Denoised | None = None

    def take_inputs(self, number: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return self.watch.take_inputs(args, kwargs) if self.needs_network else (args, kwargs)

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        copies = self.enter(scheduler, index, sample)
        if self.index >= scheduler.loop_length:
            raise UnsupportedPipeline(
                f"The pipeline takes {scheduler.loop_length} steps, so there is no step {self.index} to train at; it "
                "makes fewer steps than num_inference_steps says (strength below 1), so raise num_inference_steps or "
                "set trained_steps."
            )
        if index < self.index - 1:
            return sample
        if index < self.index:
            clean, self.latents = split_off(self.latents, sample)
            noise = torch.stack([torch.randn(sample.shape[1:], generator=generator) for generator in self.generators])
            clean, noise = (part.to(device=sample.device, dtype=torch.float32) for part in (clean, noise))
            handed = scheduler.renoise(clean, noise, sample[: self.count], self.index).to(sample.dtype)
            self.handed.append(handed)
            return torch.cat([self.watch.follow(handed)] * copies)
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
        if len(self.parts) == len(self.handed):
            self.denoised = self._collect(sigma)
            raise StepScored
        return sample  # another scheduler steps another latent

    def _collect(self, sigma: Tensor) -> Denoised:
        clean, sigmas, origin, moves, still = (join_latents(list(parts)) for parts in zip(*self.parts, strict=True))
        if not moves.flatten(1).any(1).all():
            raise UnsupportedPipeline(
                "The pipeline changes all its latents between two steps, so a re-noised sample would not reach any "
                "step unchanged; train it on recorded steps (loss_type=grpo)."
            )
        target = self.target.to(clean).reshape(clean.shape)
        sigma = sigmas if len(self.parts) > 1 else sigma
        return Denoised(clean, target, sigma, origin, None if moves.all() else moves, still)


class LastStepsDriver(Driver):
    """Drives the last steps of a loop with the network, from the latents that entered them in a rollout."""

    def __init__(self, samples: CleanSamples, is_one_step: bool = False):
        super().__init__(samples.initial_seeds, samples.tokens)
        self.index, self.latents = int(samples.steps[0, 0]), samples.entered
        self.network_steps = range(self.index, self.index + 1 if is_one_step else sys.maxsize)
        self.predictions: list[Tensor] = []

    def step(self, scheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index, sample)
        if index < self.index:
            return sample if index < self.index - 1 else self.hand_over(sample)
        if index >= self.network_steps.stop:
            raise StepScored
        self.predictions.append(prediction[: self.count].detach())
        latents = scheduler.deterministic(prediction, timestep, sample)
        self.left[id(scheduler)] = latents.clone()  # with gradient
        return latents


class InputWatch:
    """Finds which elements of a step's input latents reach the inputs of its networks: a pipeline holds others fixed.

    Some pipelines write a condition into their latents after each step (inpainting). Others write it only into the
    network's input, but step the whole latent (the first frame of Wan 2.2 TI2V, the frames that Cosmos continues).
    There the scheduler moves elements that have no meaning and are replaced before decoding.

    It uses autograd over the few operations between two steps. The networks get their inputs without this graph, and
    other modules that run in between (a ControlNet) build no graph.

    Attributes:
        seen: (batch, ...) bool tensors, one per latent; None for a latent that no input of a network depends on.
    """

    def __init__(self, networks: Sequence[nn.Module]):
        self._networks = {id(network) for network in networks}
        self._leaves: list[Tensor] = []
        self._hooks: list[Any] = []
        self._mode, self._depth = True, 0
        self.seen: list[Tensor | None] = []

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Remove the hooks and restore the grad mode on leaving, also after an error."""
        mode = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._stop()
            torch.set_grad_enabled(mode)

    def follow(self, latents: Tensor) -> Tensor:
        """Return the same latents for the pipeline, and follow their use from now on."""
        if not self._hooks:
            self._mode = torch.is_grad_enabled()
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
        torch.set_grad_enabled(True)
        leaf = latents.detach().requires_grad_()
        self._leaves.append(leaf)
        self.seen.append(None)
        return leaf * 1  # pipelines may write to latents in place, which is not possible for a leaf

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note which elements of the latents a network's arguments depend on; return the arguments without a graph."""
        self._stop()
        followed = [self._note(leaf) for leaf in pytree.tree_leaves((args, kwargs))] if self._leaves else []
        cut = {id(tensor): tensor.detach() for tensor in followed if tensor is not None}
        return pytree.tree_map(lambda leaf: cut.get(id(leaf), leaf), (args, kwargs))

    def _note(self, value: Any) -> Tensor | None:
        """Note which elements a value depends on; return the value if there are any, otherwise None."""
        if not torch.is_tensor(value) or not value.requires_grad:
            return None
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
        gradients = torch.autograd.grad(value, self._leaves, weights, retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                seen = self.seen[number]
                self.seen[number] = gradient != 0 if seen is None else seen | (gradient != 0)
        return value if any(gradient is not None for gradient in gradients) else None

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._networks:
            self._depth += 1
            torch.set_grad_enabled(False)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) not in self._networks:
            self._depth -= 1
            torch.set_grad_enabled(self._depth == 0)

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            torch.set_grad_enabled(self._mode)
        self._hooks = []
