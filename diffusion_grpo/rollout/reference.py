"""Passes without a gradient: log-probabilities of what was rolled out, and the distance from a reference.

In: samples of a rollout. Out: numbers at each of their trained steps. A module of its own because generation, the loss
and evaluation all ask for them; it holds the frozen reference.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.losses import kl_divergence
from ..distributed import fsdp
from ..distributed.deepspeed import TrainedWeights, in_step, parted
from ..policy.rollout import StepDistribution, TokenPolicy, Trajectory, replay
from ..training.model import disabled_adapter
from .buffer import MicroBatch, Recorded, RolloutBuffer
from .scoring import ScoringTrainer


class ReplayingTrainer(ScoringTrainer):
    """The part of the trainer that replays without training.

    The trainer that inherits sets `policy`, `inputs`, `weights` and `ref_model`, and has `with_weights` and
    `passes_together`.
    """

    def _reference_copy(self) -> nn.Module:
        ref_model = copy.deepcopy(self.model).requires_grad_(False).eval()
        is_waiting = self.args.offload_ref_model or self.is_fsdp_enabled or self.weights.stage == 3
        return ref_model.to("cpu" if is_waiting else self.args.device)

    def _part_reference(self) -> None:
        """A reference copy is spread over the processes too; under ZeRO-3 unless it waits in CPU memory."""
        if self.ref_model is not None and self.is_fsdp_enabled and not self.ref_weights.is_parted:
            fsdp.shard_reference(self.ref_model, self.accelerator, self.args.offload_ref_model)
        if self.ref_model is None or self.weights.stage != 3 or self.args.offload_ref_model:
            return
        if self.accelerator.unwrap_model(self.ref_model) is self.ref_model:
            self.ref_model = parted(self.ref_model, self.accelerator)

    @property
    def ref_weights(self) -> TrainedWeights:
        """The reference's parameters that the policy trains."""
        if self.is_fsdp_enabled:
            return fsdp.ShardedWeights(self.ref_model, self.weights.names)
        pairs = zip(self.ref_model.parameters(), self.model.parameters(), strict=True)
        return TrainedWeights([ref for ref, parameter in pairs if parameter.requires_grad], self.weights.stage)

    @torch.no_grad()
    def _reference(self, inputs: dict[str, Any], trajectory: Trajectory, step: int) -> StepDistribution:
        if self.ref_model is None:
            with disabled_adapter(self.accelerator.unwrap_model(self.model)):
                return replay(self.policy, inputs, trajectory, step)
        is_moved = self.args.offload_ref_model and not self.is_fsdp_enabled  # which moves each share as it is needed
        if is_moved:
            self.ref_model.to(self.args.device)
        try:
            return replay(self.policy, inputs, trajectory, step, forward=self._reference_forwards())
        finally:
            if is_moved:
                self.ref_model.to("cpu")

    def _reference_forwards(self) -> list[Callable]:
        """One forward a network, with the hooks that gather its weights."""
        model = self.accelerator.unwrap_model(self.ref_model)
        return list(model.values()) if isinstance(model, nn.ModuleDict) else [model]

    @torch.no_grad()
    def _sequence_log_ratio(self, batch: MicroBatch) -> Tensor:
        """(batch,) mean over each sample's trained steps of log-probability now minus then."""
        now = self._log_probs_now(batch)
        return batch.trajectory.over_steps(now - batch.old_log_probs.to(now))

    def _log_probs_now(self, batch: MicroBatch) -> Tensor:
        """(batch, steps) log-probabilities of the recorded steps under the policy as it is."""
        return self._at_trained_steps(batch, lambda *replayed: replay(self.policy, *replayed).log_prob)

    @torch.no_grad()
    def _replayed_log_probs(self, buffer: RolloutBuffer) -> Tensor:
        """(samples, steps) log-probabilities from replays, before any update; in the batches that are trained."""
        log_probs = torch.empty_like(buffer.trajectory.log_probs)
        for chunk in _chunks(len(buffer.rows), buffer.micro_batch_size):
            log_probs[chunk] = self._log_probs_now(buffer.part(chunk))
        return log_probs

    def _divergences(self, rows: list[dict], trajectory: Recorded) -> Tensor:
        """(samples, steps) KL divergence of the policy as it is from the reference, in the rollout's batches."""
        recorded = RolloutBuffer(rows, trajectory, trajectory.log_probs, len(rows), seed=0)
        size = self.args.rollout_batch_size or self.args.per_device_train_batch_size
        parts = [self._at_trained_steps(recorded.part(chunk), self._divergence) for chunk in _chunks(len(rows), size)]
        return torch.cat(parts)

    def _divergence(self, *replayed: Any) -> Tensor:
        """(batch,) KL divergence of the policy as it is from the reference, given inputs, trajectory and step."""
        now = replay(self.policy, *replayed)
        return kl_divergence(now.mean, self._reference(*replayed).mean, now.std)

    def _distance_to_reference(self) -> dict[str, float]:
        """The KL divergence at the trained steps of one micro-batch of the last rollout, whatever beta is.

        Nothing before the first rollout, for tokens, and where no reference is kept: full training with beta=0 would
        need a second copy of the weights for it.
        """
        has_reference = self.ref_model is not None or self.run["trains_by"] != "full"
        if self.buffer is None or not has_reference or isinstance(self.policy, TokenPolicy):
            return {}
        local = self.with_weights(self._at_trained_steps, self.buffer.micro_batch(0), self._divergence).mean()
        return {"kl": self.accelerator.gather(local.to(self.args.device)).mean().item()}

    @torch.no_grad()
    def _at_trained_steps(self, batch: MicroBatch, measure: Callable) -> Tensor:
        """(batch, steps) of what `measure` says of each trained step, given inputs, trajectory and step."""
        values = torch.empty_like(batch.old_log_probs)
        places_of = self.inputs.parts(batch.rows)
        parts = [batch.part(places) for places in places_of]
        passes = [one for turn in self._turns(parts) for one in in_step(turn, self.accelerator, self.passes_together)]
        for (number, step), _ in passes:  # who repeats one finds the same
            places, whole = places_of[number], parts[number]
            part = whole.at_step(step)
            found = values[places]
            found[whole.trajectory.steps == step] = measure(self.inputs(part.rows), part.trajectory, step).to(found)
            values[places] = found
        return values

    def _turns(self, parts: list[MicroBatch]) -> list[list[tuple[int, int]]]:
        """Number of the part and step of each pass of a micro-batch, in lists within which processes keep in step.

        Two experts take turns by the step: each step is a list then, or one process would repeat a pass of one expert
        while another one passes the other.
        """
        every = [
            (number, step) for number, part in enumerate(parts) for step in part.trajectory.steps.unique().tolist()
        ]
        if ", " not in self.component:
            return [every]
        return [[one for one in every if one[1] == step] for step in sorted({step for _, step in every})]


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
