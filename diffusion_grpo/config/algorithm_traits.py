"""What the settings must know of an algorithm before torch is loaded; the classes say the same of themselves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AlgorithmTraits:
    """What an algorithm asks of a run.

    Attributes:
        is_renoised: whether it trains on finished samples that are noised again, and not on recorded steps.
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
        loss_type: a name; one that is not in `TRAITS` works on recorded steps.
        found: what a dotted path leads to, if it was imported; a class says by its attributes what it asks for.
    """
    if loss_type in TRAITS or not isinstance(found, type):
        return TRAITS.get(loss_type, AlgorithmTraits())
    return AlgorithmTraits(found.needs == "clean", found.compares, found.whole_groups, found.shares_noise)
