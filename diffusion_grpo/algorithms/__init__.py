"""Advantages, losses and the algorithms that use them: mathematics on tensors, without settings or processes.

To add an algorithm: a file here with a class as in [`base.Algorithm`], and a line in `ALGORITHMS`. One that differs
from GRPO in the loss of a step alone is a function in `losses.py`.
"""

from .awm import AWM
from .base import Algorithm
from .dgpo import DGPO, DPO
from .grpo import GRPO
from .losses import Loss, dppo, grpo_guard
from .nft import NFT

# by their value of the setting `loss_type`
ALGORITHMS: dict[str, type[Algorithm] | Loss] = {
    "grpo": GRPO,
    "grpo_guard": grpo_guard,
    "dppo": dppo,
    "nft": NFT,
    "awm": AWM,
    "dgpo": DGPO,
    "dpo": DPO,
}
