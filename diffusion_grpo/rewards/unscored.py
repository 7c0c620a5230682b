"""Stop a run after several rollouts in a row without a single reward.

One such rollout may be bad luck (prompts that no reward is made for). Many in a row point to a mistake: an empty
column, a server that answers `null`, a reward made for other prompts. The run would learn nothing from them.
"""

import logging

from torch import Tensor

from .answers import RewardError

MOST_IN_A_ROW = 10
logger = logging.getLogger(__name__)


class UnscoredRollouts:
    """Counter of consecutive rollouts in which every reward was `None`: warns at the first, stops the run at `most`.

    Args:
        names: names of the rewards, for the messages.
        most: number of such rollouts in a row that stops the run.
        is_warning: whether this process is the one that warns.
    """

    def __init__(self, names: list[str], most: int = MOST_IN_A_ROW, is_warning: bool = True):
        self.names, self.most, self.in_a_row, self.is_warning = ", ".join(names), most, 0, is_warning

    def add(self, rewards: Tensor) -> None:
        """Check a rollout's rewards from all processes, `(samples, functions)` with NaN for `None`, and update the
        count.

        Raises:
            RewardError: too many rollouts in a row had no reward.
        """
        if not rewards.isnan().all():
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            raise RewardError(
                f"All rewards ({self.names}) of the last {self.in_a_row} rollouts were None, so nothing is learned; "
                "check that the prompts and columns hold what these rewards look for."
            )
        if self.is_warning:
            self.is_warning = False
            logger.warning(
                "All rewards (%s) of this rollout were None; after %d such rollouts in a row the run stops.",
                self.names,
                self.most,
            )
