"""What an algorithm trains on: micro-batches of a rollout's samples, in parts that share a pipeline call."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples, Trajectory, first_of_each

Rows = list[dict[str, Any]]
RecordedClean = dict[tuple[int, int], Tensor]


@dataclasses.dataclass(kw_only=True)
class _Samples:
    """What a part and a micro-batch hold alike, beside rows, advantages and log-probabilities; see [`Part`]."""

    advantages_by_step: bool = False
    log_ratio: Tensor | None = None
    weights: Tensor | None = None
    groups: Tensor | None = None
    group_size: int | None = None
    has_current_old: bool = False
    recorded_clean: RecordedClean = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def _select(self, indices: list[int]) -> dict[str, Any]:
        """Return the attributes that a part of some of the samples has, all but its trajectory."""
        names = ("advantages", "old_log_probs", "log_ratio", "weights", "groups")
        values = {name: value[indices] for name in names if (value := getattr(self, name)) is not None}
        names = ("make_inputs", "advantages_by_step", "group_size", "has_current_old", "recorded_clean")
        return values | {name: getattr(self, name) for name in names} | {"rows": [self.rows[i] for i in indices]}


@dataclasses.dataclass
class Part(_Samples):
    """Samples of one shape that share a pipeline call.

    Attributes:
        rows: one dataset row per sample.
        trajectory: what the rollout recorded of these samples.
        advantages: (batch,); (batch, rewards) for a loss that is summed over rewards; (batch, steps) with a value
            model.
        old_log_probs: (batch, steps) denominators of the ratio; (batch, 1, tokens) for tokens.
        make_inputs: turns rows into keyword arguments of the pipeline's call.
        advantages_by_step: whether advantages differ from step to step.
        log_ratio: (batch,) mean log-ratio over a sample's trained steps, for a loss that uses it; (batch, 1) for
            tokens.
        weights: (batch,) weights of the samples' losses; None if all are 1.
        groups: (batch,) int64, equal for samples of the same prompt.
        group_size: number of trained samples per prompt, including those in other parts.
        has_current_old: whether the old policy, whose predictions are in `trajectory`, is still equal to the policy.
        recorded_clean: predictions of clean samples that were recorded between the rollout and its first update, by
            initial seed and step. Some samples and steps may be missing.

    Examples:
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> part = Part([{}, {}], trajectory, torch.tensor([1.0, -1.0]), trajectory.log_probs, lambda rows: inputs)
        >>> now = replay(pipe, part.inputs, part.trajectory, 2)
        >>> (now.log_prob.detach() - part.old_log_prob(2)).tolist(), part.advantage(2).tolist()
        ([0.0, 0.0], [1.0, -1.0])
    """

    rows: Rows
    trajectory: Trajectory | TokenTrajectory | CleanSamples
    advantages: Tensor
    old_log_probs: Tensor
    make_inputs: Callable[[Rows], dict[str, Any]]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the pipeline's call for these samples."""
        return self.make_inputs(self.rows)

    def at_step(self, step: int) -> "Part":
        """Return the samples that train on `step`; if all do, the part itself, which has the shape of the rollout."""
        kept = (self.trajectory.steps == step).any(1)
        if kept.all():
            return self
        return Part(trajectory=self.trajectory[kept], **self._select(kept.nonzero().flatten().tolist()))

    def recorded_log_prob(self, step: int) -> Tensor:
        """Return the log-probability at one step as the rollout recorded it, for samples that all train on it."""
        return self.trajectory.log_probs[self.trajectory.steps == step]

    def replay_arguments(self, step: int) -> dict[str, Any]:
        """Return the arguments of `policy.replay` for samples that all train on a step.

        Samples that shared the network call of this step in the rollout share it again, in one forward and one
        backward pass.
        """
        rows, more = self.rows, {}
        if self.trajectory.shared_steps is not None:
            seeds, shared = self.trajectory.initial_seeds.tolist(), (self.trajectory.shared_steps == step).tolist()
            # strings for rows, so that none equals a seed
            callers = [seed if is_shared else f"row {row}" for row, (seed, is_shared) in enumerate(zip(seeds, shared))]
            numbers = {caller: number for number, caller in enumerate(dict.fromkeys(callers))}
            if len(numbers) < len(self):
                more["sources"] = torch.tensor([numbers[caller] for caller in callers])
                rows = [self.rows[row] for row in first_of_each(more["sources"]).tolist()]
        return {"inputs": self.make_inputs(rows), "trajectory": self.trajectory, "step": step, **more}

    def old_log_prob(self, step: int) -> Tensor:
        """Return the ratio's denominator at one step, (batch,), for samples that all train on it."""
        return self.old_log_probs[self.trajectory.steps == step]

    def old_clean(self, step: int) -> Tensor | None:
        """Return the clean samples that the old policy predicts at one step; None without an old policy."""
        clean = self.trajectory.old_clean
        return None if clean is None else clean[self.trajectory.steps == step]

    def first_clean(self, step: int) -> Tensor | None:
        """Return the clean samples that were predicted at one step before the first update; None if not recorded."""
        keys = [(seed, step) for seed in self.trajectory.initial_seeds.tolist()]
        if not all(key in self.recorded_clean for key in keys):
            return None
        return torch.stack([self.recorded_clean[key] for key in keys])

    def advantage(self, step: int) -> Tensor:
        """Return (batch,) or (batch, rewards) advantages at one step, for samples that all train on it.

        They are multiplied by the weight of the step where steps are weighted.
        """
        where = self.trajectory.steps == step
        advantages = self.advantages[where] if self.advantages_by_step else self.advantages
        if self.trajectory.step_weights is None:
            return advantages
        weights = self.trajectory.step_weights[where].to(advantages)
        return advantages * weights.view(-1, *[1] * (advantages.ndim - 1))

    def old_mean(self, step: int) -> Tensor:
        """Return the (batch, ...) mean of one step under the policy that rolled out.

        Raises:
            ValueError: the mean was not kept.
        """
        if self.trajectory.means is None:
            raise ValueError(
                "The loss needs the means of the policy that made this rollout, but the rollout was made with another "
                "loss_type and does not contain them; resume from a checkpoint between two rollouts."
            )
        return self.trajectory.means[self.trajectory.steps == step]


@dataclasses.dataclass
class MicroBatch(_Samples):
    """Samples that are trained together, with one forward and backward pass per part and trained step.

    Attributes:
        rows: one dataset row per sample.
        samples: one trajectory per sample, each of a batch of one; they may differ in shape.
        calls: indices of the samples that share a pipeline call, as in the rollout.
        advantages, old_log_probs, make_inputs, advantages_by_step, log_ratio, weights: as in [`Part`].
        is_on_policy: whether the policy is still the one that rolled the samples out.
        groups, group_size, has_current_old, recorded_clean: as in [`Part`].

    Examples:
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> samples = [trajectory[torch.tensor([True, False])], trajectory[torch.tensor([False, True])]]
        >>> batch = MicroBatch(
        ...     rows=[{}, {}], samples=samples, calls=[[0, 1]], advantages=torch.tensor([1.0, -1.0]),
        ...     old_log_probs=trajectory.log_probs, make_inputs=lambda rows: inputs,
        ... )
        >>> [(len(part), step) for part, step in batch.part_passes()[0]]
        [(2, 0), (2, 1), (2, 2)]
    """

    rows: Rows
    samples: list[Trajectory] | list[TokenTrajectory] | list[CleanSamples]
    calls: list[list[int]]
    advantages: Tensor
    old_log_probs: Tensor
    make_inputs: Callable[[Rows], dict[str, Any]]
    is_on_policy: bool = True

    @property
    def num_trained_steps(self) -> int:
        """Trained steps of all samples together, by which the sum of their losses is divided."""
        return sum(sample.steps.numel() for sample in self.samples)

    @property
    def parts(self) -> list[Part]:
        """The samples of each pipeline call."""
        return [self.part(indices) for indices in self.calls]

    def part(self, indices: list[int]) -> Part:
        """Return some samples of one shape as a part."""
        samples = [self.samples[index] for index in indices]
        return Part(trajectory=type(samples[0]).cat(samples), **self._select(indices))

    def part_passes(self, take_turns: bool = False) -> list[list[tuple[Part, int]]]:
        """Return every part at every step on which one of its samples trains, in lists like those of `passes`."""
        parts = self.parts
        return [[(parts[number].at_step(step), step) for number, step in turn] for turn in self.passes(take_turns)]

    def passes(self, take_turns: bool = False) -> list[list[tuple[int, int]]]:
        """Return the call index and the step of each pass, in lists within which processes stay in step."""
        every = [
            (number, step)
            for number, indices in enumerate(self.calls)
            for step in torch.cat([self.samples[index].steps for index in indices]).unique().tolist()
        ]
        if not take_turns:
            return [every]
        return [[one for one in every if one[1] == step] for step in sorted({step for _, step in every})]

    def mean_over_steps(self, values: Tensor) -> Tensor:
        """Return each sample's mean over its steps or tokens, of values like `old_log_probs`."""
        return torch.cat([sample.over_steps(values[[index]]) for index, sample in enumerate(self.samples)])
