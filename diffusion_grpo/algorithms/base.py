"""The seam behind which algorithms stand: what each needs, which passes it makes, and what one pass computes."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor

from ..policy.token_process import TokenDistribution, TokenTrajectory
from ..policy.trajectory import CleanSamples, Denoised, StepDistribution, Trajectory
from .batch import MicroBatch, Part

if TYPE_CHECKING:
    from ..policy.base import Policy  # and with it diffusers, which checking the settings does not need


class RatioError(RuntimeError):
    """The replay does not reproduce the rollout, so the ratio is not 1 where it must be."""


class Reference(Protocol):
    """The frozen policy that an algorithm compares with."""

    def replay(
        self, inputs: dict[str, Any], trajectory: Trajectory | TokenTrajectory, step: int
    ) -> StepDistribution | TokenDistribution:
        """Score one recorded step under the reference, without gradient."""

    def denoise(self, inputs: dict[str, Any], samples: CleanSamples, step: int) -> Denoised:
        """Return the clean samples that the reference predicts from re-noised ones, without gradient."""


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

    A class of your own comes in by dotted path as `loss_type`. Let it inherit from this one and define `passes` and
    `loss`. Its constructor gets `loss_kwargs`, and of the keyword arguments of
    [`~diffusion_grpo.algorithms.grpo.GRPO`] (`beta`, `epsilon`, `take_turns`, ...) those that it names.

    Attributes:
        needs: "trajectory" for recorded steps (GRPO and its relatives), "clean" for finished samples, which are
            noised again (DiffusionNFT and its relatives; [`~diffusion_grpo.algorithms.renoised.Renoised`] is a base
            for them).
        needs_old_mean: whether trajectories hold the means of the policy that rolled out, in `Trajectory.means`, where
            a rollout is trained on more than once.
        compares: whether `loss` needs the reference even with `beta=0`.
        whole_groups: whether a part must hold all samples of each of its prompts.
        shares_noise: whether re-noised samples of a prompt share noise and times.
        old_decay: how much of itself the old policy keeps after rollout n; it takes the rest from the policy. Its
            predictions are in the parts. None for no old policy.
        rolls_out_old: whether the old policy makes the rollouts.
    """

    needs: ClassVar[Literal["trajectory", "clean"]] = "trajectory"
    needs_old_mean: bool = False
    compares: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
    rolls_out_old: ClassVar[bool] = False
    old_decay: Callable[[int], float] | None = None

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return the parts and steps to train on, in order; processes keep step within each inner list."""

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Compute one pass; every sample of `part` trains on `step`.

        Args:
            policy: replays the step with gradient.
            reference: replays it without; None in full training with `beta=0`.
            part: the samples.
            step: index of the step in the pipeline's loop.
        """

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Check the algorithm's invariant once the passes of a micro-batch are made, before the weights move.

        By default there is none.

        Args:
            batch: the micro-batch whose passes have been made.
            drift: the largest of its passes.

        Returns:
            metrics to log.

        Raises:
            RatioError: the invariant does not hold.
        """
        return {}
