"""Advantages, losses and the algorithms that use them: mathematics on tensors, without settings or processes.

To add an algorithm: a file here with a class as in [`base.Algorithm`], and a line in `ALGORITHMS`.
"""

from .base import Algorithm
from .grpo import GRPO

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO}  # by their value of the setting `loss_type`
