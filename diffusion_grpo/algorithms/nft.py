"""DiffusionNFT: reinforcement on the forward process (https://huggingface.co/papers/2509.16117)."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from ..policy.trajectory import Denoised
from .base import Recording, check_number
from .batch import Part
from .renoised import RenoisedWithOldPolicy


@dataclasses.dataclass(kw_only=True, eq=False)
class NFT(RenoisedWithOldPolicy):
    """Moves the prediction towards samples that are better than their group, and away from those that are worse.

    With `r = clamp(A / (2 C) + 1/2, 0, 1)` and the two implicit policies `plus = b now + (1 - b) old` and
    `minus = (1 + b) old - b now`, the loss of a sample is
    `C (r |plus - x0|^2 / w_plus + (1 - r) |minus - x0|^2 / w_minus) / b`, each error divided by its own mean absolute
    value. Rollouts are made by the old policy, a moving copy. Not for step-distilled models.

    Args:
        strength: b, the paper's beta. The gain of the loss is `C / b`, so `beta` (the setting, the weight of the
            distance to the reference; 1e-4 in the paper's scripts) does not transfer between strengths.
        advantage_range: C; advantages are clipped to -C and C.
        decay_rate, decay_start, decay_max: decay of the old policy; see
            [`~diffusion_grpo.algorithms.renoised.RenoisedWithOldPolicy`]. The defaults are type 1 of the paper's
            scripts; type 2 (OCR) is 0.0075, 75, 0.999.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> NFT(strength=0.1, beta=1e-4).old_decay(100)
        0.1
    """

    recording: ClassVar[Recording] = Recording(keeps="clean", sampler="old")

    strength: float = 1.0
    advantage_range: float = 5.0
    decay_max: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        check_number("strength", self.strength, lambda x: x > 0, "above 0")
        check_number("advantage_range", self.advantage_range, lambda x: x > 0, "above 0")

    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mix, most = self.strength, self.advantage_range
        better = (part.advantage(step).to(now.clean.device).double() / (2 * most) + 0.5).clamp(0, 1)
        plus, minus = mix * now.clean + (1 - mix) * old, (1 + mix) * old - mix * now.clean
        losses = most / mix * (better * _scaled_error(now, plus) + (1 - better) * _scaled_error(now, minus))
        return losses, {"old/distance": now.error(old)}


def _scaled_error(now: Denoised, clean: Tensor) -> Tensor:
    """Return the (batch,) mean squared error divided by the mean absolute one, which has no gradient."""
    error = clean - now.target
    return now.mean(error**2) / now.mean(error.detach().abs()).clamp(min=1e-5)
