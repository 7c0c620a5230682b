"""An algorithm of your own: REINFORCE (Williams, 1992) on every recorded step, without a ratio.

own_algorithm.yaml trains the embedded model with it: `diffusion-grpo train examples/own_algorithm.yaml`.
docs/algorithms/own.md explains parts, steps and passes.
"""

from diffusion_grpo.algorithms.base import Algorithm, PassOutput, Reference
from diffusion_grpo.algorithms.batch import MicroBatch, Part
from diffusion_grpo.policy.base import Policy


class Reinforce(Algorithm):
    """Raises log-probabilities in proportion to the advantages.

    Args:
        beta: the run's setting, weight of the squared distance to the reference.
        temperature: its own setting, from `loss_kwargs`; advantages are divided by it.
    """

    def __init__(self, *, beta: float, temperature: float = 1.0):
        self.beta, self.temperature = beta, temperature

    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        """Train every sample on each of its recorded steps."""
        return batch.part_passes()

    def loss(self, policy: Policy, reference: Reference | None, part: Part, step: int) -> PassOutput:
        """Compute one pass; the drift is the difference from the log-probability that the rollout recorded."""
        now = policy.replay(**part.replay_arguments(step))
        loss = -(part.advantage(step).to(now.log_prob) / self.temperature * now.log_prob).sum()
        if self.beta > 0:
            other = reference.replay(**part.replay_arguments(step))
            loss = loss + self.beta * ((now.mean - other.mean) ** 2).sum()
        drift = (now.log_prob.detach() - part.recorded_log_prob(step).to(now.log_prob)).abs().max()
        return PassOutput(loss, {"reinforce/log_prob": now.log_prob.mean().item()}, float(drift))

    def check(self, batch: MicroBatch, drift: float) -> dict[str, float]:
        """Log the drift of the replays right after a rollout: exactly 0 in float32."""
        return {"reinforce/drift": drift} if batch.is_on_policy else {}
