"""The samples of one rollout, split into micro-batches that are used `num_iterations` times."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from ..algorithms.batch import MicroBatch, RecordedClean, Rows
from ..data.inputs import PipelineInputs
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples, Trajectory
from .estimator import SampleAdvantages
from .plan import RolloutOrder, update_order

Samples = list[Trajectory] | list[TokenTrajectory] | list[CleanSamples]


class RolloutBuffer:
    """All samples of one rollout that this process trains on.

    It is the only state between rollout and update that a checkpoint has to keep.

    Args:
        advantages: of these samples.
        positions: (samples,) int64 positions of the samples in the rollout of all processes.

    Attributes:
        old_log_probs: (samples, steps) float32, the denominator of the ratio; for re-noised samples, the negative
            denoising error under the policy that rolled out, float64, once it is measured.
    """

    def __init__(
        self,
        rows: Rows,
        samples: Samples,
        advantages: SampleAdvantages,
        inputs: PipelineInputs,
        order: RolloutOrder,
        positions: Tensor,
    ):
        self.rows, self.samples, self.inputs = rows, samples, inputs
        self.advantages, self.positions, self.order = advantages, positions, order
        self.old_log_probs = torch.cat([sample.log_probs for sample in samples])
        self.has_current_old = False
        self.recorded_clean: RecordedClean = {}
        self.micro_batch_size = order.sizes.micro_batch

    def range_of(self, slot: int) -> slice:
        """Return the indices of a slot's samples. Slots are numbered across iterations."""
        updates, size = self.order.updates, self.micro_batch_size
        iteration, rest = divmod(slot, len(self.rows) // size)
        update, micro_batch = divmod(rest, len(self.rows) // size // updates)
        if iteration:  # the first keeps the rollout's order
            update = int(update_order(self.order.seed, iteration, updates)[update])
        start = (update * (len(self.rows) // size // updates) + micro_batch) * size
        return slice(start, start + size)

    def micro_batch(self, slot: int) -> MicroBatch:
        """Return the micro-batch of a slot."""
        return self.part(self.range_of(slot), is_on_policy=slot < self.order.sizes.accumulation)

    def part(self, indices: slice, is_on_policy: bool = True) -> MicroBatch:
        """Return consecutive samples, by their indices, as a micro-batch."""
        rows, samples, advantages = self.rows[indices], self.samples[indices], self.advantages[indices]
        seeds = {int(sample.initial_seeds) for sample in samples} if self.recorded_clean else set()
        return MicroBatch(
            rows,
            samples,
            self.inputs.parts(rows),
            advantages.values,
            self.old_log_probs[indices],
            self.inputs,
            advantages_by_step=advantages.targets is not None,
            weights=advantages.weights,
            is_on_policy=is_on_policy,
            groups=self.positions[indices] // self.order.sizes.num_generations,
            group_size=self.order.sizes.trained_per_prompt,
            has_current_old=self.has_current_old,
            recorded_clean={key: clean for key, clean in self.recorded_clean.items() if key[0] in seeds},
        )

    def chunks(self) -> list[slice]:
        """Return the indices of the samples of each micro-batch."""
        size = self.micro_batch_size
        return [slice(start, start + size) for start in range(0, len(self.rows), size)]

    def add_to_samples(self, name: str, values: Iterable[Tensor]) -> None:
        """Set a field of each sample's record."""
        pairs = zip(self.samples, values, strict=True)
        self.samples = [dataclasses.replace(sample, **{name: value}) for sample, value in pairs]
