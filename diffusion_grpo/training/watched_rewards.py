"""Cheap rewards that evaluations measure and nobody trains on: where they fall, a trained one may be hacked."""

from ..rewards import Reward, load_rewards

CHEAP = {"images": ["brightness", "sharpness", "colorfulness", "jpeg_compressibility"]}
CHEAP["videos"] = [*CHEAP["images"], "flicker", "motion"]


def load_watched_rewards(names: list[str] | None, kind: str | None, others: list[Reward]) -> list[Reward]:
    """Load the rewards that are measured without being trained on or asked for by name.

    Args:
        names: as in the setting `watch_rewards`; "auto" stands for `CHEAP`.
        kind: of the samples; see [`~diffusion_grpo.rollout.diversity.kind_of`].
        others: trained and evaluation-only rewards, which are measured anyway.

    Raises:
        ValueError: an unknown name.
    """
    wanted = [own for name in names or [] for own in (CHEAP.get(kind, []) if name == "auto" else [name])]
    measured = {reward.name for reward in others}
    return [reward for reward in load_rewards(list(dict.fromkeys(wanted))) if reward.name not in measured]
