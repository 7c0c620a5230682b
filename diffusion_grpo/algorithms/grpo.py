"""GRPO on recorded steps (https://huggingface.co/papers/2402.03300, for flows 2505.05470), with any step loss.

The run ends if ratios before the first update of a rollout are further from 1 than `max_ratio_error`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..policy.token_process import TokenDistribution
from ..policy.trajectory import StepDistribution
from .base import Algorithm, Anchor, DriftLimit, PassOutput, Recording, Reference, measure_gradient, summarise_samples
from .batch import MicroBatch, Part
from .losses import Loss, LossInputs, grpo, loss_per_reward, sum_loss

if TYPE_CHECKING:
    from ..policy.base import Policy


def record_for_loss(loss: Loss) -> Recording:
    """Return what the loss of a step needs recorded: means, if it is marked with `needs_old_mean`."""
    return Recording(old="mean" if getattr(loss, "needs_old_mean", False) else None)


class GRPO(Algorithm):
    """Replays each recorded step and compares its log-probability with the rollout's.

    Args:
        loss: loss of one step; see [`~diffusion_grpo.algorithms.losses`].
        epsilon: the ratio is clipped below 1 - epsilon.
        epsilon_high: the ratio is clipped above 1 + epsilon_high.
        beta: weight of the KL divergence to the reference; 0 needs no reference.
        anchor: where the ratio's denominator comes from: "own" for the replay of the update itself, the only one on
            its rollout; "replay" for one right after the rollout; "rollout" for the rollout.
        max_ratio_error: how far the ratio of a replay right after the rollout may be from 1; None never stops the run.
        is_half_precision: whether a network computes in bfloat16 or float16, where rounding moves ratios further.
        take_turns: whether several networks share the steps.
        warns: whether this process is the one that warns.
        reward_weights: weights of the rewards, for a clipped loss per reward (DanceGRPO); None for one advantage per
            sample.

    Examples:
        >>> GRPO(epsilon=1e-4, beta=0.01).epsilon_high
        0.0001
    """

    def __init__(
        self,
        loss: Loss = grpo,
        /,
        *,
        epsilon: float = 1e-4,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        anchor: Anchor = "rollout",
        max_ratio_error: float | None = 1e-4,
        is_half_precision: bool = False,
        take_turns: bool = False,
        warns: bool = True,
        reward_weights: Sequence[float] | None = None,
    ):
        self.step_loss = loss if reward_weights is None else loss_per_reward(loss, reward_weights)
        self.epsilon, self.epsilon_high, self.beta = epsilon, epsilon if epsilon_high is None else epsilon_high, beta
        self.is_half_precision, self.take_turns, self.anchor = is_half_precision, take_turns, anchor
        old = record_for_loss(getattr(loss, "func", loss)).old  # loss may be a partial
        self.recording = dataclasses.replace(self.recording, old=old)
        self._limit = DriftLimit(max_ratio_error, is_half_precision, warns)
        self._explained = 0.0  # largest drift since the last check, as a share of what half precision explains

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return every part at every step on which one of its samples trains."""
        return batch.part_passes(self.take_turns)

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Replay one step; `drift` is how far its ratio to the rollout is from 1."""
        arguments = part.replay_arguments(step)
        distant = reference.replay(**arguments) if self.beta > 0 else None
        now = policy.replay(**arguments)
        loss, metrics = self._score(part, step, now, distant)
        if isinstance(now, StepDistribution) and now.scale is not None:
            jacobian = now.scale.jacobian.view(-1, *[1] * (now.mean.ndim - 1))
            metrics |= measure_gradient(loss, now.mean, jacobian, step)
        metrics |= {} if distant is None else summarise_samples(now.compare(distant), part.weights)[0]
        return PassOutput(loss, metrics, self._measure_drift(part, step, now))

    def _score(
        self,
        part: Part,
        step: int,
        now: StepDistribution | TokenDistribution,
        distant: StepDistribution | TokenDistribution | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a replayed step, summed over samples, and metrics."""
        inputs = LossInputs(
            log_prob=now.log_prob,
            advantages=part.advantage(step).to(now.log_prob),
            **now.loss_inputs(distant),
            **self._anchor(part, step, now),
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
        )
        output = sum_loss(self.step_loss, inputs, part.weights)
        return output.loss, {name: float(value) for name, value in output.metrics.items()}

    def _measure_drift(self, part: Part, step: int, now: StepDistribution | TokenDistribution) -> float:
        """Return how far the largest ratio to the rollout is from 1."""
        recorded = part.recorded_log_prob(step).to(now.log_prob)
        drift = (now.log_prob.detach() - recorded).double().expm1().abs()
        if self.is_half_precision:
            self._explained = max(self._explained, float((drift / now.rounding()).max()))
        return float(drift.max())

    def _anchor(self, part: Part, step: int, now: StepDistribution | TokenDistribution) -> dict[str, Tensor]:
        """Return the inputs of the loss that come from the policy that made the rollout."""
        is_first = self.anchor == "own"
        old = now.log_prob.detach() if is_first else part.old_log_prob(step).to(now.log_prob)
        if part.log_ratio is not None:  # GSPO: the value of that ratio, with the gradient of this step
            old = now.log_prob.detach() - part.log_ratio.to(now.log_prob)
        if self.recording.old != "mean":
            return {"old_log_prob": old}
        mean = now.mean.detach() if is_first else part.old_mean(step).to(now.mean)
        return {"old_log_prob": old, "old_divergence": now.divergence(mean)}

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Refuse a replay right after the rollout whose ratio is further from 1 than `max_ratio_error`."""
        explained, self._explained = self._explained, 0.0
        if not batch.is_on_policy:
            return {}
        self._limit.check(
            drift,
            "The first ratio after a rollout is",
            "the replay does not see what the rollout saw",
            is_rounding=explained <= 1,
            remedy=" To make it exact, leave rollout_batch_size at per_device_train_batch_size; if a rollout serves "
            "several updates, set old_log_prob='replay'.",
        )
        return {"ratio/max_error": drift}
