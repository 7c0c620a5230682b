"""The seam behind which algorithms stand: what each needs, which passes it makes, and what one pass computes."""

import dataclasses
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from ..policy.base import Policy
from ..policy.token_process import TokenDistribution, TokenTrajectory
from ..policy.trajectory import StepDistribution, Trajectory
from .batch import MicroBatch, Part


class RatioError(RuntimeError):
    """The replay does not reproduce the rollout, so the ratio is not 1 where it must be."""


class Reference(Protocol):
    """The frozen policy that an algorithm compares with."""

    def replay(
        self, inputs: dict[str, Any], trajectory: Trajectory | TokenTrajectory, step: int
    ) -> StepDistribution | TokenDistribution:
        """Score one recorded step under the reference, without gradient."""


@dataclasses.dataclass(frozen=True)
class PassOutput:
    """What one pass computes.

    Attributes:
        loss: scalar with gradient, summed over the samples of the part.
        metrics: numbers by the key under which they are logged.
        drift: how far the pass is from what the rollout recorded, for `Algorithm.check`.
    """

    loss: Tensor
    metrics: dict[str, float]
    drift: float = 0.0


class Algorithm(Protocol):
    """An algorithm: which data it needs, which passes it makes, and what one of them computes.

    A class of your own comes in by dotted path as `loss_type`; its settings are given as `loss_kwargs`.

    Attributes:
        needs: "trajectory" for recorded steps (GRPO and its relatives).
    """

    needs: ClassVar[Literal["trajectory"]]

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return the parts and steps to train on, in order; processes keep step within each inner list."""

    def loss(self, policy: Policy, reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Compute one pass; every sample of `part` trains on `step`."""

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Check the algorithm's invariant on the first passes after a rollout, before the weights move.

        Args:
            batch: the micro-batch whose passes have been made.
            drift: the largest of its passes.

        Returns:
            metrics to log.

        Raises:
            RatioError: the invariant does not hold.
        """
