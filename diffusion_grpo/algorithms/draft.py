"""DRaFT: gradients of rewards, through the decoder and the last steps (https://huggingface.co/papers/2309.17400)."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..policy.trajectory import ROUNDING_OF_TWO
from .base import Algorithm, DriftLimit, PassOutput, Recording, Reference
from .batch import MicroBatch, Part, Rows

if TYPE_CHECKING:
    from ..policy.base import Policy


@dataclasses.dataclass(kw_only=True, eq=False)
class DRaFT(Algorithm):
    """Raises rewards along their own gradient, in place of advantages.

    An update takes the last steps of each sample again, decodes it, and computes the rewards of its pixels. The loss
    is minus their weighted sum, plus `beta` times the mean squared distance of the finished latents to those that the
    reference makes of the same latents. The gradient ends where the repeated steps begin.

    Args:
        score_pixels: returns the (batch,) weighted sum of rewards of (batch, 3, height, width) pixels and their rows.
        beta: weight of the distance to the reference.
        max_ratio_error: how far finished latents may be from the rollout's in its first update, relative to their
            size; None never stops the run.
        is_half_precision: whether a network computes in bfloat16 or float16, so that rounding explains a difference.
        warns: whether this process is the one that warns.

    Examples:
        >>> DRaFT(score_pixels=lambda pixels, rows: pixels.mean((1, 2, 3))).recording.keeps
        'entered'
    """

    recording: ClassVar[Recording] = Recording(keeps="entered")

    score_pixels: Callable[[Tensor, Rows], Tensor]
    beta: float = 0.0
    max_ratio_error: float | None = 1e-4
    is_half_precision: bool = False
    warns: bool = True

    def __post_init__(self):
        self._limit = DriftLimit(self.max_ratio_error, self.is_half_precision, self.warns)

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return every part at every step at which the gradient of one of its samples ends."""
        return batch.part_passes()  # networks take no turns: a pass may go through several

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Take the last steps again; `drift` is how far the finished latents are from the rollout's."""
        inputs, samples = part.inputs, part.trajectory
        distant = reference.finish(inputs, samples) if self.beta > 0 else None
        now = policy.finish(inputs, samples)
        losses = -self.score_pixels(now.pixels, part.rows)
        measured = {"loss/policy": losses.mean()}
        if distant is not None:
            distance = now.distance(distant)
            measured |= {"loss/kl": self.beta * distance.mean(), "kl": distance}
            losses = losses + self.beta * distance
        metrics = {name: value.detach().mean().item() for name, value in measured.items()}
        error, size = (x.detach().flatten(1).norm(dim=1) for x in (now.latents - samples.latents, samples.latents))
        return PassOutput(losses.sum(), metrics, float((error / size).max()))

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Refuse finished latents that are further from the rollout's than `max_ratio_error`."""
        if not batch.is_on_policy:
            return {}
        self._limit.check(
            drift,
            "Relative to their size, the finished latents of the first update after a rollout are",
            "the update does not see what the rollout saw",
            is_rounding=drift <= ROUNDING_OF_TWO,
        )
        return {"prediction/max_error": drift}
