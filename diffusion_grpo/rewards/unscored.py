"""Rollouts without a single reward: from which number of them in a row on a run is stopped.

One may be bad luck (prompts that no reward is for), many are a mistake: a column that is empty, a server that answers
`null`, a reward that only knows other prompts. Nothing is learned from them, and time goes by.
"""

import logging

from torch import Tensor

from .answers import RewardError

MOST_IN_A_ROW = 10
logger = logging.getLogger(__name__)


class UnscoredRollouts:
    """Count rollouts in a row in which every reward was `None`; warn at the first of a run, and then stop.

    Args:
        names: of the rewards, for the messages.
        most: how many in a row are too many.
        is_warning: whether this process warns, as one of several does.
    """

    def __init__(self, names: list[str], most: int = MOST_IN_A_ROW, is_warning: bool = True):
        self.names, self.most, self.in_a_row, self.is_warning = ", ".join(names), most, 0, is_warning

    def add(self, rewards: Tensor) -> None:
        """Look at a rollout's rewards, `(samples, functions)` with NaN for `None`, of all processes.

        Raises:
            RewardError: too many in a row had none.
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
