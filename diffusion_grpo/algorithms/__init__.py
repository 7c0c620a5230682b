"""Advantages, losses and the algorithms that use them: mathematics on tensors, without settings or processes.

To add an algorithm, write a class like [`base.Algorithm`] in a file here, and add a line to `ALGORITHMS`. An algorithm
that differs from GRPO only in the loss of a step is a function in `losses.py`.
"""

from .awm import AWM
from .base import Algorithm
from .dgpo import DGPO, DPO
from .draft import DRaFT
from .fdfo import FDFO
from .grpo import GRPO
from .losses import Loss, dppo, grpo_guard
from .nft import NFT

# by the value of the setting `loss_type`
ALGORITHMS: dict[str, type[Algorithm] | Loss] = {
    "grpo": GRPO,
    "grpo_guard": grpo_guard,
    "dppo": dppo,
    "fdfo": FDFO,
    "nft": NFT,
    "awm": AWM,
    "dgpo": DGPO,
    "dpo": DPO,
    "draft": DRaFT,
}
