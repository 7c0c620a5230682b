"""What the settings must know about an algorithm before torch is loaded; the classes declare the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmTraits:
    """What an algorithm asks of a run.

    Attributes:
        is_renoised: whether it trains on finished samples that are noised again, instead of on recorded steps.
        compares: whether it needs the reference even with `beta=0`.
        whole_groups: whether all samples of a prompt must be in one micro-batch.
        shares_noise: whether the re-noised samples of a prompt share noise and times.
    """

    is_renoised: bool = False
    compares: bool = False
    whole_groups: bool = False
    shares_noise: bool = False


TRAITS = {
    "nft": AlgorithmTraits(is_renoised=True),
    "awm": AlgorithmTraits(is_renoised=True),
    "dgpo": AlgorithmTraits(is_renoised=True, compares=True, whole_groups=True, shares_noise=True),
    "dpo": AlgorithmTraits(is_renoised=True, compares=True, whole_groups=True, shares_noise=True),
}


def find_traits(loss_type: str, found: object = None) -> AlgorithmTraits:
    """Return the traits of an algorithm.

    Args:
        loss_type: name of the algorithm; names that are not in `TRAITS` work on recorded steps.
        found: what a dotted path leads to, if it was imported. The traits of a class are read from its attributes.
    """
    if loss_type in TRAITS or not isinstance(found, type):
        return TRAITS.get(loss_type, AlgorithmTraits())
    return AlgorithmTraits(found.needs == "clean", found.compares, found.whole_groups, found.shares_noise)
