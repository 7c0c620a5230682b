"""GRPO on recorded steps (https://huggingface.co/papers/2402.03300, for flows 2505.05470), with any step loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from .base import Algorithm, PassOutput, RatioError, Reference
from .batch import MicroBatch, Part
from .losses import Loss, LossInputs, grpo, loss_per_reward
from .zero_advantages import sum_loss

if TYPE_CHECKING:
    from ..policy.base import Policy


class GRPO(Algorithm):
    """Replays each recorded step and compares its log-probability with the rollout's.

    Args:
        loss: of one step; see [`~diffusion_grpo.algorithms.losses`].
        epsilon: the ratio is clipped below 1 - epsilon.
        epsilon_high: the ratio is clipped above 1 + epsilon_high.
        beta: weight of the KL divergence to the reference; 0 asks for no reference.
        anchors_on_replay: whether the ratio's denominator comes from the first replay instead of the rollout.
        is_first_replay: whether each rollout is trained on once, so that the replay of an update is the first.
        max_ratio_error: how far the first ratio after a rollout may be from 1; None never stops.
        take_turns: whether several networks share the steps.
        reward_weights: for a clipped loss per reward (DanceGRPO), one per reward; None for one advantage per sample.
    """

    needs: ClassVar[Literal["trajectory"]] = "trajectory"

    def __init__(
        self,
        loss: Loss = grpo,
        /,
        *,
        epsilon: float = 1e-4,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        anchors_on_replay: bool = False,
        is_first_replay: bool = True,
        max_ratio_error: float | None = 1e-4,
        take_turns: bool = False,
        reward_weights: Sequence[float] | None = None,
    ):
        self.step_loss = loss if reward_weights is None else loss_per_reward(loss, reward_weights)
        self.epsilon, self.epsilon_high, self.beta = epsilon, epsilon if epsilon_high is None else epsilon_high, beta
        self.anchors_on_replay, self.is_first_replay = anchors_on_replay, is_first_replay
        self.max_ratio_error, self.take_turns = max_ratio_error, take_turns

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Return every part at every step on which one of its samples trains."""
        return batch.part_passes(self.take_turns)

    def loss(self, policy: "Policy", reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Replay one step; `drift` is how far its ratio to the rollout is from 1."""
        inputs = part.inputs
        distant = reference.replay(inputs, part.trajectory, step) if self.beta > 0 else None
        now = policy.replay(inputs, part.trajectory, step)
        recorded = part.recorded_log_prob(step).to(now.log_prob)
        old = part.old_log_prob(step).to(now.log_prob)
        if self.anchors_on_replay and self.is_first_replay:
            old = now.log_prob.detach()
        if part.log_ratio is not None:  # GSPO: that value, with the gradient of this step
            old = now.log_prob.detach() - part.log_ratio.to(now.log_prob)
        output = sum_loss(
            self.step_loss,
            LossInputs(
                log_prob=now.log_prob,
                old_log_prob=old,
                advantages=part.advantage(step).to(now.log_prob),
                **now.loss_inputs(distant),
                epsilon=self.epsilon,
                epsilon_high=self.epsilon_high,
                beta=self.beta,
            ),
            part.weights,
        )
        drift = float((now.log_prob.detach() - recorded).double().expm1().abs().max())
        metrics = {name: value.item() for name, value in output.metrics.items()}
        return PassOutput(output.loss, metrics, drift)

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Refuse a first ratio after a rollout that is further from 1 than `max_ratio_error`.

        Raises:
            RatioError: such a ratio.
        """
        if not batch.is_on_policy:
            return {}
        limit = self.max_ratio_error
        if limit is not None and not self.anchors_on_replay and drift > limit:
            raise RatioError(
                f"The first ratio after a rollout is off by {drift:.1e}, more than max_ratio_error={limit:.0e}: the "
                "replay does not see what the rollout saw. Look for dropout or randomness in the pipeline, for "
                "rollout_batch_size other than per_device_train_batch_size in half precision, or set "
                'old_log_prob="replay".'
            )
        return {"ratio/max_error": drift}
