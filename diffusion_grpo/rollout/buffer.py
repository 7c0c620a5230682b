"""What a rollout leaves for the updates: shuffled, split into micro-batches, used `num_iterations` times.

In: dataset rows, their trajectories and advantages. Out: a `MicroBatch` for each slot. A module of its own because it
is the one state between rollout and update that a checkpoint has to keep.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..policy.rollout import Trajectory
from ..policy.token_process import TokenTrajectory
from .order import update_order
from .value_model import ValueTargets


class Recorded:
    """Trajectories of samples that may differ in shape. Where they do not, it is used as a `Trajectory` is.

    Args:
        samples: one trajectory a sample, each of a batch of 1; all with the same number of trained steps.
    """

    def __init__(self, samples: list[Trajectory] | list[TokenTrajectory]):
        self.samples = samples[0].aligned(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, rows: Any) -> "Recorded":
        """Those of some samples; `rows` indexes as it would a tensor."""
        rows = rows.cpu() if torch.is_tensor(rows) else rows
        return Recorded([self.samples[row] for row in torch.arange(len(self))[rows].tolist()])

    def joined(self) -> Trajectory | TokenTrajectory:
        """One trajectory of all samples, which must be of one shape."""
        return self.samples[0].cat(self.samples)

    def over_steps(self, values: Tensor) -> Tensor:
        """(batch, ...) each sample's mean over its steps or tokens, of values like `log_probs`."""
        return torch.cat([sample.over_steps(values[[place]]) for place, sample in enumerate(self.samples)])

    def metrics(self) -> dict[str, float]:
        """What there is to log about the rollout: of tokens."""
        return self.joined().metrics() if isinstance(self.samples[0], TokenTrajectory) else {}

    def _column(self, name: str) -> Tensor:
        return torch.cat([getattr(sample, name) for sample in self.samples])

    latents = property(lambda self: self._column("latents"))
    next_latents = property(lambda self: self._column("next_latents"))
    log_probs = property(lambda self: self._column("log_probs"))
    steps = property(lambda self: self._column("steps"))
    seeds = property(lambda self: self._column("seeds"))
    initial_seeds = property(lambda self: self._column("initial_seeds"))
    tokens = property(lambda self: None if self.samples[0].tokens is None else self._column("tokens"))
    num_inference_steps = property(lambda self: self.samples[0].num_inference_steps)
    noise_level = property(lambda self: self.samples[0].noise_level)


@dataclasses.dataclass
class MicroBatch:
    """Samples that are trained together; one forward and backward pass for each part that shares a pipeline call.

    Attributes:
        rows: one dataset row a sample.
        trajectory: of these samples; `Recorded` in the whole micro-batch, a `Trajectory` in a part of it.
        advantages: (batch,) float32; (batch, rewards) for a loss that is summed over rewards; (batch, steps) with a
            value model.
        old_log_probs: (batch, steps) float32, the ratio's denominator; of tokens (batch, 1, tokens).
        targets: of the value model, where there is one.
        weights: (batch,) float32, of each sample's loss; None where all are 1.
        log_ratio: (batch,) float32, mean log-ratio over a sample's trained steps, where the loss takes that one; of
            tokens (batch, 1).
    """

    rows: list[dict[str, Any]]
    trajectory: Trajectory | TokenTrajectory | Recorded
    advantages: Tensor
    old_log_probs: Tensor
    targets: ValueTargets | None = None
    log_ratio: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, places: list[int]) -> "MicroBatch":
        """The samples at some places, which are of one shape."""
        rows = [self.rows[place] for place in places]
        optional = (None if x is None else x[places] for x in (self.targets, self.log_ratio, self.weights))
        part = (self.trajectory[places].joined(), self.advantages[places], self.old_log_probs[places])
        return MicroBatch(rows, *part, *optional)

    def at_step(self, step: int) -> "MicroBatch":
        """The samples that train on `step`; all of them keep their order, and so the geometry of the rollout."""
        kept = (self.trajectory.steps == step).any(1)
        if kept.all():
            return self
        rows = [row for row, keep in zip(self.rows, kept.tolist(), strict=True) if keep]
        optional = (None if x is None else x[kept] for x in (self.targets, self.log_ratio, self.weights))
        part = (self.trajectory[kept], self.advantages[kept], self.old_log_probs[kept])
        return MicroBatch(rows, *part, *optional)

    def old_log_prob(self, step: int) -> Tensor:
        """(batch,) the denominator at one step, for samples that all train on it."""
        return self.old_log_probs[self.trajectory.steps == step]

    def advantage(self, step: int) -> Tensor:
        """(batch,) or (batch, rewards) advantages at one step, for samples that all train on it."""
        return self.advantages if self.targets is None else self.advantages[self.trajectory.steps == step]


class RolloutBuffer:
    """All samples of one rollout that this process trains on.

    Args:
        rows: one dataset row a sample.
        trajectory: of the samples; their number is `micro_batch_size` times a whole number.
        advantages: (samples, ...) float32, as in `MicroBatch`.
        micro_batch_size: consecutive samples that are trained together, as they were rolled out.
        seed: of the order of the updates, which is another one in each iteration after the first.
        targets: of the value model, where there is one.
        positions: (samples,) int64, where the samples are in the generation of all processes.
        updates: that one iteration makes, each of as many micro-batches.
        weights: (samples,) float32, of each sample's loss; None where all are 1.
    """

    def __init__(
        self,
        rows: list[dict[str, Any]],
        trajectory: Recorded,
        advantages: Tensor,
        micro_batch_size: int,
        seed: int,
        targets: ValueTargets | None = None,
        positions: Tensor | None = None,
        updates: int = 1,
        weights: Tensor | None = None,
    ):
        self.rows, self.trajectory, self.advantages, self.targets = rows, trajectory, advantages, targets
        self.weights = weights
        self.old_log_probs = trajectory.log_probs
        self.micro_batch_size, self.seed, self.updates = micro_batch_size, seed, updates
        self.positions = torch.arange(len(rows)) if positions is None else positions

    @property
    def micro_batches(self) -> int:
        """How many there are in one iteration."""
        return len(self.rows) // self.micro_batch_size

    def range_of(self, slot: int) -> slice:
        """The samples of a slot. Slots count on through the iterations, each of which makes the same updates."""
        iteration, place = divmod(slot, self.micro_batches)
        update, micro_batch = divmod(place, self.micro_batches // self.updates)
        update = int(update_order(self.seed, iteration, self.updates)[update])
        start = (update * (self.micro_batches // self.updates) + micro_batch) * self.micro_batch_size
        return slice(start, start + self.micro_batch_size)

    def micro_batch(self, slot: int) -> MicroBatch:
        """The micro-batch of a slot."""
        return self.part(self.range_of(slot))

    def part(self, rows: slice) -> MicroBatch:
        """Some samples that follow each other."""
        targets, weights = (None if x is None else x[rows] for x in (self.targets, self.weights))
        part = (self.trajectory[rows], self.advantages[rows], self.old_log_probs[rows])
        return MicroBatch(self.rows[rows], *part, targets, weights=weights)

    def save(self, path: Path, processes: int = 1) -> None:
        """Writes all but the rows, which the dataset gives again; of `processes` each writes a file of its own."""
        samples = enumerate(self.trajectory.samples)
        tensors = {f"{name}.{i}": x.contiguous() for i, sample in samples for name, x in sample.tensors().items()}
        tensors |= {"advantages": self.advantages, "old_log_probs": self.old_log_probs.clone()}
        tensors["positions"] = self.positions
        if self.weights is not None:
            tensors["weights"] = self.weights
        if self.targets is not None:
            tensors |= {f"targets.{name}": getattr(self.targets, name).contiguous() for name in ValueTargets.TENSORS}
        first = self.trajectory.samples[0]
        kind = {"kind": type(first).__name__, "settings": json.dumps(first.settings())}
        save_file(tensors, path, metadata=kind | {"processes": str(processes), "updates": str(self.updates)})
