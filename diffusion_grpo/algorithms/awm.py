"""Advantage-weighted matching (https://huggingface.co/papers/2509.25050)."""

import dataclasses

import torch
from torch import Tensor

from ..policy.trajectory import Denoised
from .base import check_number
from .batch import Part
from .renoised import RenoisedWithOldPolicy

WEIGHTS = ("ghuber", "uniform", "t", "t2")


@dataclasses.dataclass(kw_only=True, eq=False)
class AWM(RenoisedWithOldPolicy):
    """A policy gradient whose log-probability is minus the weighted denoising error of the finished sample.

    `ratio = exp(log_prob - old_log_prob)` with `log_prob = -w(d, t)`, where d is the mean squared error of the
    prediction `v` and t the share of noise. The loss is PPO's clipped loss plus `ema_beta` times the squared distance
    to the prediction of a moving average. Never turn off both the clip and this term.

    Args:
        weight: w: "ghuber" for `t / p ((d + 1e-10)^p - 1e-10^p)`, "uniform" for d, "t" for `t d`, "t2" for `t^2 d`.
        power: p of ghuber.
        clip: the ratio is clipped to 1 +- this; 1 or more turns the clip off.
        ema_beta: weight of the distance to the prediction of the moving average.
        advantage_range: advantages are divided by this.
        decay_rate, decay_start, decay_max: decay of the moving average, as for the old policy of
            [`~diffusion_grpo.algorithms.renoised.RenoisedWithOldPolicy`].

    Raises:
        ValueError: a setting is out of range or has no effect, or neither the clip nor the moving average limits the
            update.

    Examples:
        >>> weighted = AWM(weight="uniform").weigh(torch.tensor([0.5]), torch.tensor([0.9]))
        >>> weighted.item()
        0.5
    """

    weight: str = "ghuber"
    power: float = 0.25
    clip: float = 1.0
    ema_beta: float = 1.0
    advantage_range: float = 5.0
    decay_max: float = 0.3

    def __post_init__(self):
        super().__post_init__()
        if self.weight not in WEIGHTS:
            raise ValueError(f"loss_kwargs: weight must be one of {', '.join(WEIGHTS)}, got {self.weight!r}.")
        for name in ("power", "clip", "advantage_range"):
            check_number(name, getattr(self, name), lambda x: x > 0, "above 0")
        check_number("ema_beta", self.ema_beta, lambda x: x >= 0, "of at least 0")
        if self.weight != "ghuber" and self.power != AWM.power:
            raise ValueError(
                f"loss_kwargs: power={self.power} has an effect only with weight='ghuber'; leave it out with "
                f"weight={self.weight!r}."
            )
        if self.ema_beta == 0:
            self._refuse_decay()
            self.old_decay = None  # nothing uses the average
        is_clipped = self.clip < 1 and self.anchor != "own"  # the ratio of the first replay is 1
        if not is_clipped and self.old_decay is None:
            kept = f"decay_max={self.decay_max} keeps the average equal to the policy"
            off = "is off" if self.clip >= 1 else "has no effect with one update per rollout"
            also = "" if self.anchor == "own" else "clip below 1, or "
            raise ValueError(
                f"loss_kwargs: clip={self.clip} {off}, and {kept if self.ema_beta else 'ema_beta=0'}, so nothing "
                f"limits how far an update moves the policy; set {also}ema_beta and decay_max above 0."
            )

    def _refuse_decay(self) -> None:
        for name in ("decay_rate", "decay_start", "decay_max"):
            if getattr(self, name) != getattr(AWM, name):
                raise ValueError(
                    f"loss_kwargs: {name} is a setting of the average, which ema_beta=0 does not use; leave it out."
                )

    def weigh(self, error: Tensor, time: Tensor) -> Tensor:
        """Return the (batch,) weighted error w(d, t).

        Args:
            error: (batch,) the error d.
            time: (batch,) the share of noise t.
        """
        if self.weight == "ghuber":
            return time / self.power * ((error + 1e-10) ** self.power - 1e-10**self.power)
        return error * {"uniform": torch.ones_like(time), "t": time, "t2": time**2}[self.weight]

    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        error, time = now.error(), now.mean(now.sigma.expand(now.clean.shape))
        before = error.detach() if self.anchor == "own" else -part.old_log_prob(step).to(error)
        ratio = torch.exp(self.weigh(before, time) - self.weigh(error, time))
        advantages = part.advantage(step).to(error) / self.advantage_range
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip) if self.clip < 1 else ratio
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        distance = now.error(old)
        metrics = {"ratio/mean": ratio, "ratio/min": ratio, "ratio/max": ratio, "old/distance": distance}
        if self.ema_beta == 0:
            return losses, metrics
        pull = self.ema_beta * distance
        return losses + pull, metrics | {"loss/ema": pull}
