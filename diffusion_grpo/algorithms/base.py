"""The interface of algorithms: which data each one needs, which passes it makes, and what one pass computes.

The reference's interface, shared metrics, and the checks that a first pass reproduces its rollout, that groups are
whole and that settings are within limits are here too.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ..policy.token_process import TokenDistribution, TokenTrajectory
from ..policy.trajectory import CleanSamples, Denoised, Finished, StepDistribution, Trajectory
from .batch import MicroBatch, Part

if TYPE_CHECKING:
    from ..policy.base import Policy  # imports diffusers, which is not needed to check settings

logger = logging.getLogger(__name__)
# Where the values of the policy that made a rollout come from: the update's own pass, which is the first and only one
# on the rollout; a replay right after the rollout; or the rollout itself.
Anchor = Literal["own", "replay", "rollout"]


class RatioError(RuntimeError):
    """The replay does not reproduce the rollout, so the ratio is not 1 where it must be.

    Examples:
        >>> DriftLimit(1e-5).check(0.1, "The first ratio after a rollout is", "a hook may have changed the network")
        Traceback (most recent call last):
        RatioError: The first ratio after a rollout is off by 1.0e-01, more than max_ratio_error=1e-05. ...
    """


class Reference(Protocol):
    """The frozen policy that an algorithm compares with.

    Examples:
        Any object with these methods is a reference. Here it is the embedded model before training, for recorded
        steps:

        >>> class Untrained:
        ...     def replay(self, inputs, trajectory, step, sources=None):
        ...         with torch.no_grad():
        ...             return replay(pipe, inputs, trajectory, step)
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4, steps=[[1], [1]])
        >>> Untrained().replay(inputs, trajectory, 1).log_prob.shape
        torch.Size([2])
    """

    def replay(
        self,
        inputs: dict[str, Any],
        trajectory: Trajectory | TokenTrajectory,
        step: int,
        sources: Tensor | None = None,
    ) -> StepDistribution | TokenDistribution:
        """Score one recorded step under the reference, without gradient."""

    def denoise(self, inputs: dict[str, Any], samples: CleanSamples, step: int) -> Denoised:
        """Return the clean samples that the reference predicts from re-noised ones, without gradient."""

    def finish(self, inputs: dict[str, Any], samples: CleanSamples) -> Finished:
        """Return what the reference's last steps make of the latents that entered them, without gradient."""


class DriftLimit:
    """Stops a run whose first pass after a rollout does not reproduce it."""

    def __init__(self, limit: float | None, is_half_precision: bool = False, warns: bool = True):
        self._limit, self._is_half_precision, self._has_warned = limit, is_half_precision, not warns

    def check(self, drift: float, what: str, problem: str, is_rounding: bool = False, remedy: str = "") -> None:
        """Refuse a drift above the limit; only warn about it, once, if it is the rounding of half precision."""
        if self._limit is None or drift <= self._limit:
            return
        deviation = f"{what} off by {drift:.1e}, more than max_ratio_error={self._limit:.0e}"
        if not (self._is_half_precision and is_rounding and math.isfinite(drift)):
            beyond = "this is more than half precision explains, and " if self._is_half_precision else ""
            way_out = ", or set max_ratio_error to null" if self._is_half_precision else ""
            raise RatioError(
                f"{deviation}: {beyond}{problem}. Look for dropout or randomness in the pipeline, or for inputs that "
                f"differ between the two{way_out}."
            )
        if not self._has_warned:
            logger.warning("%s; rounding in half precision explains it.%s", deviation, remedy)
        self._has_warned = True


def measure_gradient(loss: Tensor, output: Tensor, factor: Tensor, step: int) -> dict[str, float]:
    """Return the size of the gradient that a step's loss passes to the network, as `grad_size/step_{index}`.

    It is the norm of d loss / d prediction of each sample's own loss, averaged over samples. It takes no backward pass
    through a network, because `output` is linear in the prediction, with the factor `factor`.
    """
    if not output.requires_grad:
        return {}
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
    if gradient is None:
        return {}
    return {f"grad_size/step_{step:02d}": (gradient * factor).flatten(1).norm(dim=1).mean().item()}


def summarise_samples(
    measured: Mapping[str, Tensor], weights: Tensor | None
) -> tuple[dict[str, float], dict[str, int]]:
    """Reduce measurements of each sample to one number per metric, over the samples of weight above 0.

    `measured` holds (batch,) values, NaN for samples without a measurement, or single numbers, which stay as they are.
    """
    metrics, counts = {}, {}
    for name, values in measured.items():
        if not values.ndim:
            metrics[name] = values.item()
            continue
        kept = values.detach() if weights is None else values.detach()[(weights > 0).to(values.device)]
        known = kept[~kept.isnan()].double()
        if len(known) < len(kept):
            counts[name] = len(known)
        if len(known):
            end = name.rpartition("/")[2]
            metrics[name] = {"min": known.min, "max": known.max}.get(end, known.mean)().item()
    return metrics, counts


@dataclasses.dataclass(frozen=True)
class PassOutput:
    """What one pass computes.

    Attributes:
        loss: scalar with gradient, summed over the samples of the part.
        metrics: numbers to log, by name.
        drift: how far the pass is from what the rollout recorded, for `Algorithm.check`.
        counts: number of samples that a metric covers, where these are not all samples that count.

    Examples:
        >>> PassOutput(torch.zeros(()), {"loss/policy": 0.0}).drift
        0.0
    """

    loss: Tensor
    metrics: dict[str, float]
    drift: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recording:
    """What an algorithm needs recorded of a rollout; the objects that make rollouts ask it.

    Attributes:
        keeps: "steps" for recorded steps (GRPO and its relatives), "clean" for finished samples, which are noised
            again (DiffusionNFT and its relatives; [`~diffusion_grpo.algorithms.renoised.Renoised`] is a base for
            them, [`~diffusion_grpo.algorithms.renoised.RenoisedWithOldPolicy`] for those with an old policy),
            "entered" for what enters the last steps, taken again with gradient ([`~diffusion_grpo.algorithms.draft`]).
        old: what `loss` needs of the policy that made the rollout, once updates have moved it, in addition to
            log-probabilities: "mean" for the means of the steps, kept in `Trajectory.means`; "error" for denoising
            errors, which `Part.old_log_probs` then holds with a minus sign. With None, the predictions of a single
            pass on finished samples are recorded, for `check`.
        sampler: "policy" or "old": which of the two makes the rollouts, if there is an old policy (`old_decay`).
        reference: whether `loss` needs the reference even with `beta=0`.
        whole_groups: whether a part must hold all samples of each of its prompts.
        shares_noise: whether re-noised samples of a prompt share noise and times.
        ranks: whether samples are chosen by their advantages. These are then not clipped, and samples that no reward
            scored have weight 0, to tell them from samples whose advantage is 0.
        finished: whether `loss` needs the finished latents beside recorded steps, in `Trajectory.finished`.

    Examples:
        >>> NFT.recording.sampler
        'old'
    """

    keeps: Literal["steps", "clean", "entered"] = "steps"
    old: Literal["mean", "error"] | None = None
    sampler: Literal["policy", "old"] = "policy"
    reference: bool = False
    whole_groups: bool = False
    shares_noise: bool = False
    ranks: bool = False
    finished: bool = False


class Algorithm(Protocol):
    """An algorithm: which data it needs, which passes it makes, and what one of them computes.

    To use a class of your own, set `loss_type` to its dotted path. It must inherit from this class and define `passes`
    and `loss`. Its constructor gets `loss_kwargs`, and those keyword arguments of
    [`~diffusion_grpo.algorithms.grpo.GRPO`] (`beta`, `epsilon`, `take_turns`, ...) that it names.

    Attributes:
        recording: what it needs recorded of a rollout.
        old_decay: for an algorithm on finished samples: a function of n that returns the share of itself that the old
            policy keeps after rollout n; it takes the rest from the policy. Parts hold its predictions. None if there
            is no old policy.

    Examples:
        >>> class Reinforce(Algorithm):
        ...     def __init__(self, *, beta: float):
        ...         self.beta = beta
        ...     def passes(self, batch):
        ...         return batch.part_passes(take_turns=False)
        ...     def loss(self, policy, reference, part, step):
        ...         now = policy.replay(**part.replay_arguments(step))
        ...         return PassOutput(-(part.advantage(step).to(now.log_prob) * now.log_prob).sum(), {})
        >>> Reinforce(beta=0.0).recording.keeps
        'steps'
    """

    recording: Recording = Recording()
    old_decay: Callable[[int], float] | None = None

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return the parts and steps to train on, in order; processes stay in step within each inner list."""

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Compute one pass; every sample of `part` trains on `step`.

        Args:
            policy: replays the step with gradient.
            reference: replays the step without gradient; None in full training with `beta=0`.
            part: the samples.
            step: index of the step in the pipeline's loop.
        """

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Check the algorithm's invariant once the passes of a micro-batch are made, before the weights move.

        By default there is nothing to check.

        Args:
            batch: the micro-batch whose passes have been made.
            drift: the largest drift of these passes.

        Returns:
            metrics to log.

        Raises:
            RatioError: the invariant does not hold.
        """
        return {}


def check_number(name: str, value: Any, is_within: Callable[[float], bool], limits: str) -> None:
    """Refuse a setting in `loss_kwargs` that is out of range or not a number, like `1e-3` in YAML 1.1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_within(value):
        raise ValueError(f"loss_kwargs: {name} must be a number {limits}, got {value!r}.")


def refuse_torn_groups(part: Part, loss_type: str) -> None:
    """Refuse a part that holds only some samples of a group."""
    assert part.groups is not None  # as in every part of a rollout
    counts = part.groups.unique(return_counts=True)[1]
    if bool((counts != part.group_size).any()):
        raise ValueError(
            f"loss_type={loss_type!r} compares the {part.group_size} samples of a prompt within one pipeline call, "
            f"but a call holds {sorted(set(counts.tolist()))} of them: the pipeline takes fewer samples at a time, or "
            "their sizes differ; use loss_type='nft' or 'awm'."
        )
