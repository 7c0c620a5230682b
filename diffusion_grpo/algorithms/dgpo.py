"""Preferences within a group: DGPO (https://huggingface.co/papers/2510.08425) and online Diffusion-DPO
(https://huggingface.co/papers/2311.12908)."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..policy.trajectory import Denoised
from .base import Recording, check_number, refuse_torn_groups
from .batch import Part
from .renoised import Renoised, RenoisedWithOldPolicy


@dataclasses.dataclass(kw_only=True, eq=False)
class DGPO(RenoisedWithOldPolicy):
    """Direct group preference optimisation: one comparison of a group's better samples with its worse ones.

    All samples of a group share noise and time. With d as the mean squared error of the prediction `v`,
    `S = preference_beta / G * sum(A (d - d_ref))` over the group and `gate = sigmoid(S)` without gradient, the loss of
    a sample is `gate * A * d`; d has no gradient where `exp(d_old - d)` has left `1 +- clip` in the direction of A.

    Args:
        preference_beta: sharpness of the comparison.
        clip: range of the ratio `exp(d_old - d)`; the authors' scripts use 1e-2, their default is 5e-2.
        decay_rate, decay_start, decay_max: decay of the old policy; see
            [`~diffusion_grpo.algorithms.renoised.RenoisedWithOldPolicy`].

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> DGPO(preference_beta=50.0).recording.whole_groups
        True
    """

    recording: ClassVar[Recording] = Recording(keeps="clean", reference=True, whole_groups=True, shares_noise=True)

    preference_beta: float = 100.0
    clip: float = 1e-2
    decay_max: float = 0.3

    def __post_init__(self):
        super().__post_init__()
        check_number("preference_beta", self.preference_beta, lambda x: x > 0, "above 0")
        check_number("clip", self.clip, lambda x: x > 0, "above 0")

    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        refuse_torn_groups(part, "dgpo")
        error, advantages = now.error(), part.advantage(step).to(now.clean.device).double()
        gain = advantages * (error - distant.error()).detach()
        gate = torch.sigmoid(self.preference_beta / part.group_size * sum_over_group(gain, part.groups))
        ratio = torch.exp(dataclasses.replace(now, clean=old).error() - error.detach())
        has_left = torch.where(advantages > 0, ratio > 1 + self.clip, ratio < 1 - self.clip) & (advantages != 0)
        losses = gate * advantages * torch.where(has_left, error.detach(), error)
        metrics = {"dgpo/gate": gate, "clip_ratio/region_mean": has_left.double(), "old/distance": now.error(old)}
        return losses, metrics | {"ratio/mean": ratio, "ratio/min": ratio, "ratio/max": ratio}


@dataclasses.dataclass(kw_only=True, eq=False)
class DPO(Renoised):
    """Online Diffusion-DPO: the best sample of each group against its worst.

    Both share noise and time. The loss of a pair is `-log sigmoid(-preference_beta / 2 (D_best - D_worst))` with
    `D = d - d_ref`; it counts once per group, whatever its size. A group with equal advantages adds nothing,
    and a sample that no reward scored is in no pair. With `best_of_n=2` only the best and the worst are trained on,
    which saves the passes of the others.

    Args:
        preference_beta: sharpness of the comparison.

    Raises:
        ValueError: a setting is out of range.

    Examples:
        >>> DPO(preference_beta=1000.0).old_decay is None  # no old policy
        True
    """

    recording: ClassVar[Recording] = dataclasses.replace(DGPO.recording, ranks=True)

    preference_beta: float = 2000.0

    def __post_init__(self):
        super().__post_init__()
        check_number("preference_beta", self.preference_beta, lambda x: x > 0, "above 0")

    def sample_losses(
        self, now: Denoised, old: Tensor, distant: Denoised | None, part: Part, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        refuse_torn_groups(part, "dpo")
        excess = now.error() - distant.error()
        advantages = part.advantage(step).to(excess)
        losses, accuracy = torch.zeros_like(excess), torch.full_like(excess, torch.nan)  # at the best of each pair
        for group in part.groups.unique().tolist():
            members = (part.groups == group).nonzero().flatten().tolist()
            size = len(members)
            members = [index for index in members if part.weights is None or part.weights[index] > 0]
            if len(members) < 2:
                continue
            best = max(members, key=lambda index: advantages[index].item())
            worst = min(members, key=lambda index: advantages[index].item())
            difference = excess[best] - excess[worst]
            if not advantages[best] > advantages[worst]:
                continue
            accuracy[best] = (1 - difference.detach().sign()) / 2  # 1/2 if both moved equally
            share = torch.zeros_like(excess)
            share[best] = size
            losses = losses + share * softplus(self.preference_beta / 2 * difference)
        losses = losses + 0.0 * excess  # for a gradient in any case
        return losses, {"dpo/accuracy": accuracy}


def sum_over_group(values: Tensor, groups: Tensor) -> Tensor:
    """Return the (batch,) sum over each sample's group."""
    index = groups.unique(return_inverse=True)[1].to(values.device)
    return values.new_zeros(int(index.max()) + 1).index_add(0, index, values)[index]
