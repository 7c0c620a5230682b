"""Finite-difference flow optimisation on recorded steps (https://huggingface.co/papers/2603.12893)."""

import torch

from ..policy.trajectory import StepDistribution
from .base import Recording, refuse_torn_groups, summarise_samples
from .batch import Part
from .grpo import GRPO


class FDFO(GRPO):
    """Moves a recorded step along the finished samples: a direction in place of a log-probability.

    The samples of an initial latent differ because of the noise that was drawn in the trained step. With x as their
    finished latents, `d = (x - mean(x)) / rms(x - mean(x))` over the samples of a latent, the loss of a sample is
    `-A * mean(d * mean_step) / |J|`, where `mean_step` is the mean of the step and J its derivative with respect to
    the prediction. So the prediction moves along the covariance of advantages and finished latents. Noise that the
    later steps remove has no part in it, as it has in the gradient of a log-probability. There is no ratio to clip.

    Args:
        beta, anchor, max_ratio_error, is_half_precision, take_turns, warns: as in
            [`~diffusion_grpo.algorithms.grpo.GRPO`].
        loss, epsilon, epsilon_high, reward_weights: have no effect.

    Examples:
        >>> FDFO().recording.finished
        True
    """

    recording = Recording(finished=True, whole_groups=True)

    def _score(
        self, part: Part, step: int, now: StepDistribution, distant: StepDistribution | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        refuse_torn_groups(part, "fdfo")
        moved = now.mean.flatten(1).double() / now.scale.jacobian.double()[:, None]
        direction, spread = (each.to(moved) for each in find_directions(part))
        losses = -part.advantage(step).to(moved) * (direction * moved).mean(1)
        weights = torch.ones_like(losses) if part.weights is None else part.weights.to(losses)
        measured = {"loss/policy": (weights * losses).mean(), "fdfo/spread": spread}
        if distant is not None:
            divergence = now.divergence(distant.mean).double()
            losses = losses + self.beta * divergence
            measured |= {"loss/kl": self.beta * (weights * divergence).mean(), "kl": divergence}
        return (weights * losses).sum().to(now.mean), summarise_samples(measured, part.weights)[0]


def find_directions(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (batch, elements) direction of each finished sample from the mean of its latent's, float64, and the
    (batch,) root mean square of the differences, by which it is divided."""
    latents, finished = part.trajectory.initial_seeds, part.trajectory.finished.flatten(1).double()
    is_same = (latents[:, None] == latents).to(finished)
    share = is_same / is_same.sum(1, keepdim=True)
    apart = finished - share @ finished
    spread = (share @ apart.square().mean(1)).sqrt()
    return apart / spread.clamp(min=1e-12)[:, None], spread
