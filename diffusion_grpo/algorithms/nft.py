"""DiffusionNFT: reinforcement on the forward process (https://huggingface.co/papers/2509.16117)."""

from typing import ClassVar

from torch import Tensor

from ..policy.trajectory import Denoised
from .batch import Part
from .renoised import Renoised, check_number


class NFT(Renoised):
    """Moves the prediction towards samples that are better than their group, and away from those that are worse.

    With `r = clamp(A / (2 C) + 1/2, 0, 1)` and the two implicit policies `plus = b now + (1 - b) old` and
    `minus = (1 + b) old - b now`, the loss of a sample is
    `C (r |plus - x0|^2 / w_plus + (1 - r) |minus - x0|^2 / w_minus) / b`, each error divided by its own mean absolute
    value. Rollouts are made by the old policy, a moving copy. Not for step-distilled models.

    Args:
        strength: b, the paper's beta. The gain of the loss is `C / b`, so `beta` (the setting, the weight of the
            distance to the reference; 1e-4 in the paper's scripts) does not transfer between strengths.
        advantage_range: C.
        decay_rate, decay_start, decay_max: of the old policy. The scripts' type 1 is the default; their type 2 (OCR)
            is 0.0075, 75, 0.999.
        run: see [`~diffusion_grpo.algorithms.renoised.Renoised`].
    """

    rolls_out_old: ClassVar[bool] = True

    def __init__(
        self,
        *,
        strength: float = 1.0,
        advantage_range: float = 5.0,
        decay_rate: float = 0.001,
        decay_start: int = 0,
        decay_max: float = 0.5,
        beta: float = 0.0,
        is_first_replay: bool = True,
        max_ratio_error: float | None = 1e-4,
        is_half_precision: bool = False,
        take_turns: bool = False,
    ):
        super().__init__(
            beta=beta,
            is_first_replay=is_first_replay,
            max_ratio_error=max_ratio_error,
            is_half_precision=is_half_precision,
            take_turns=take_turns,
            decay_rate=decay_rate,
            decay_start=decay_start,
            decay_max=decay_max,
        )
        check_number("strength", strength, lambda x: x > 0, "above 0")
        check_number("advantage_range", advantage_range, lambda x: x > 0, "above 0")
        self.strength, self.advantage_range = strength, advantage_range

    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mix, most = self.strength, self.advantage_range
        better = (part.advantage(step).to(now.clean.device).double() / (2 * most) + 0.5).clamp(0, 1)
        plus, minus = mix * now.clean + (1 - mix) * old, (1 + mix) * old - mix * now.clean
        losses = most / mix * (better * _scaled_error(now, plus) + (1 - better) * _scaled_error(now, minus))
        return losses, {"old/distance": now.error(old).detach().mean()}


def _scaled_error(now: Denoised, clean: Tensor) -> Tensor:
    """Return the (batch,) mean squared error divided by the mean absolute one, which has no gradient."""
    error = clean - now.target
    return now.mean(error**2) / now.mean(error.detach().abs()).clamp(min=1e-5)
