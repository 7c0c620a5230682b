"""What algorithms on re-noised samples share: passes, reference, old policy, checks of passes.

A rollout keeps only the finished samples. Each pass adds noise to them again, to the level of one of the rollout's own
steps, predicts clean samples, and compares the predictions with the finished samples, weighted by their advantages.
The rollout needs no noise, so any solver can sample. To first order, all of these algorithms have the same gradient,
the advantage times the gradient of the denoising error, up to a weight that depends on time; they differ in how they
limit the update.
"""

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..policy.trajectory import ROUNDING_OF_TWO, Denoised
from .base import (
    Algorithm,
    Anchor,
    DriftLimit,
    PassOutput,
    Recording,
    Reference,
    check_number,
    measure_gradient,
    summarise_samples,
)
from .batch import MicroBatch, Part

if TYPE_CHECKING:
    from ..policy.base import Policy


@dataclasses.dataclass(kw_only=True, eq=False)
class Renoised(Algorithm):
    """An algorithm on re-noised samples; a subclass says what the loss of each sample is.

    Settings are the fields of a dataclass. A subclass with settings of its own must be a dataclass too.

    Args:
        beta: weight of the mean squared distance of the prediction to the reference's.
        anchor: "own" if each rollout is trained on only once, so that the policy of an update is the rollout's.
        max_ratio_error: how far the first predictions after a rollout may be from recorded ones, relative to the size
            of a sample's prediction; None never stops the run.
        is_half_precision: whether a network computes in bfloat16 or float16. A difference that rounding explains then
            only causes a warning.
        take_turns: whether several networks share the steps.
        warns: whether this process is the one that warns.

    Examples:
        >>> class Weighted(Renoised):
        ...     def sample_losses(self, now, old, distant, part, step):
        ...         error = now.error()
        ...         return part.advantage(step).to(error).clamp(min=0) * error, {}
        >>> Weighted(beta=0.1).recording.keeps
        'clean'
    """

    recording: ClassVar[Recording] = Recording(keeps="clean", old="error")

    beta: float = 0.0
    anchor: Anchor = "own"
    max_ratio_error: float | None = 1e-4
    is_half_precision: bool = False
    take_turns: bool = False
    warns: bool = True

    def __post_init__(self):
        self._limit = DriftLimit(self.max_ratio_error, self.is_half_precision, self.warns)

    @abstractmethod
    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the (batch,) losses of the samples, float64 with gradient, and the metrics to log.

        Metrics are (batch,) too and are averaged over the samples that count; if the name ends in `/min` or `/max`,
        the smallest or largest value is logged instead. NaN marks samples without a measurement. A single number is
        logged as it is. A metric whose name begins with `loss/` is a term of the losses, and is left out of
        `loss/policy`.

        Args:
            now: the clean samples that the policy predicts.
            old: (batch, ...) the clean samples that the old policy predicts; without one, those in `now` without
                gradient.
            distant: the clean samples that the reference predicts; None if the reference is not needed.
            part: the samples.
            step: index of the step in the pipeline's loop.
        """

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return every part at every step on which one of its samples trains."""
        return batch.part_passes(self.take_turns)

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Compute one pass; `drift` is how far it is from what was recorded right after the rollout."""
        inputs, samples = part.inputs, part.trajectory
        distant = reference.denoise(inputs, samples, step) if self.beta > 0 or self.recording.reference else None
        now = policy.denoise(inputs, samples, step)
        recorded = part.old_clean(step)
        old = now.clean.detach() if recorded is None else recorded.to(now.clean)
        losses, measured = self.sample_losses(now, old, distant, part, step)
        weights = torch.ones_like(losses) if part.weights is None else part.weights.to(losses)
        terms = {name: values for name, values in measured.items() if name.startswith("loss/")}
        terms["loss/policy"] = losses - sum(terms.values())
        measured |= {name: (weights * values).mean() for name, values in terms.items()}
        measured["denoising_error"] = now.error()
        if distant is not None:
            distance = now.error(distant.clean)
            measured |= {"loss/kl": self.beta * (weights * distance).mean(), "kl": distance, **now.compare(distant)}
            losses = losses + self.beta * distance
        metrics, counts = summarise_samples(measured, part.weights)
        total = (weights * losses).sum()
        metrics |= measure_gradient(total, now.clean, now.sigma, step)
        return PassOutput(total.to(now.clean.dtype), metrics, self._measure_drift(part, step, now), counts)

    def _measure_drift(self, part: Part, step: int, now: Denoised) -> float:
        """Return how far predictions are from recorded ones (or at least), relative to their size; 0 if unknown."""
        recorded = part.old_clean(step) if part.has_current_old else part.first_clean(step)
        if recorded is not None:
            return float(now.difference(recorded).max())
        if self.measures_errors:
            return float(now.least_difference(-part.old_log_prob(step)).max())
        return 0.0

    @property
    def measures_errors(self) -> bool:
        """Whether the errors of all samples are measured right after the rollout."""
        return self.recording.old == "error" and self.anchor != "own"

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Refuse a first prediction after a rollout that is further from the recorded one than `max_ratio_error`."""
        is_measured = batch.has_current_old or batch.recorded_clean or self.measures_errors
        if not batch.is_on_policy or not is_measured:
            return {}
        self._limit.check(
            drift,
            "Relative to their size, the first predictions after a rollout are",
            "the update does not see what was recorded",
            is_rounding=drift <= ROUNDING_OF_TWO,
        )
        return {"prediction/max_error": drift}


@dataclasses.dataclass(kw_only=True, eq=False)
class RenoisedWithOldPolicy(Renoised):
    """An algorithm on re-noised samples that compares the policy with an old policy, a moving copy of it.

    Args:
        decay_rate, decay_start, decay_max: after rollout n the old policy keeps
            `clamp(decay_rate * (n - decay_start), 0, decay_max)` of itself and takes the rest from the policy. If that
            is always 0, the old policy is the policy as it is when each rollout begins.

    Attributes:
        old_decay: the share that is kept, as a function of n; None if the old policy would always equal the policy.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> NFT(decay_rate=0.01, decay_max=0.5).old_decay(20)
        0.2
    """

    decay_rate: float = 0.001
    decay_start: float = 0
    decay_max: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        rate, start, most = self.decay_rate, self.decay_start, self.decay_max
        check_number("decay_max", most, lambda x: 0 <= x < 1, "in [0, 1)")
        check_number("decay_rate", rate, lambda x: x >= 0, "of at least 0")
        check_number("decay_start", start, lambda x: x >= 0, "of at least 0")
        if most * rate > 0 or self.anchor != "own":
            self.old_decay = lambda n: min(max(rate * (n - start), 0.0), most)
