"""Warn when a rollout leaves nothing to learn, and stop a run after several without a single reward."""

import logging

from torch import Tensor

from ..rewards import RewardError

MOST_IN_A_ROW = 10  # one rollout without a reward may be bad luck with its prompts; many in a row are a mistake
logger = logging.getLogger(__name__)


class SignalCheck:
    """Check of each rollout, which warns once of each reason why it is useless."""

    def __init__(self, names: list[str], most: int = MOST_IN_A_ROW, warns: bool = True):
        self.names, self.most, self.in_a_row, self.warns = ", ".join(names), most, 0, warns
        self._warned: set[str] = set()

    def add(self, rewards: Tensor, metrics: dict[str, float]) -> None:
        """Check a rollout.

        Args:
            rewards: `(samples, functions)` rewards of all processes, with NaN for `None`.
        """
        is_unscored = bool(rewards.isnan().all())
        self.in_a_row = self.in_a_row + 1 if is_unscored else 0
        if self.in_a_row >= self.most:
            raise RewardError(
                f"All rewards ({self.names}) of the last {self.in_a_row} rollouts were None, so nothing is learned; "
                "check that the prompts and columns hold what these rewards look for."
            )
        if is_unscored:
            self._warn(
                "All rewards (%s) of this rollout were None; after %d such rollouts in a row the run stops.",
                self.names,
                self.most,
            )
        elif metrics.get("diversity") == 0:
            self._warn(
                "The samples of each prompt in this rollout look the same, so their rewards say nothing about what to "
                "change; raise noise_level, or add noise to earlier steps (trained_steps)."
            )
        elif metrics["frac_advantage_zero"] == 1 and metrics["frac_reward_zero_std"] == 1:
            self._warn(
                "All samples of a prompt in this rollout got the same reward, so every gradient is 0 (%s: %s). If "
                "that is the best score, take harder prompts; otherwise use a reward that tells better samples from "
                "worse ones.",
                self.names,
                _describe_range(rewards),
            )
        elif metrics["frac_advantage_zero"] == 1:
            self._warn("All advantages of this rollout are 0, so every gradient is; check reward_threshold.")
        elif metrics.get("frac_advantage_clipped") == 1:
            self._warn(
                "All advantages of this rollout are clipped to the same size, so the best sample counts no more than "
                "the second best; raise advantage_clip."
            )

    def _warn(self, message: str, *values: object) -> None:
        if self.warns and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)


def _describe_range(rewards: Tensor) -> str:
    known = rewards[~rewards.isnan()]
    low, high = known.min().item(), known.max().item()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
