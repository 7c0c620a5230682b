"""Advantages, losses and the algorithms that use them: mathematics on tensors, without settings or processes.

To add an algorithm: a file here with a class as in [`base.Algorithm`], and a line in `ALGORITHMS`.
"""

from .awm import AWM
from .base import Algorithm
from .dgpo import DGPO, DPO
from .grpo import GRPO
from .nft import NFT

# by their value of the setting `loss_type`
ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "nft": NFT, "awm": AWM, "dgpo": DGPO, "dpo": DPO}
