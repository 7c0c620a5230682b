"""Cheap rewards that are only watched in evaluations: if one falls, a trained reward may be being hacked."""

from ..rewards import Reward, load_rewards

CHEAP = {"images": ["brightness", "sharpness", "colorfulness", "jpeg_compressibility"]}
CHEAP["videos"] = [*CHEAP["images"], "flicker", "motion"]


def load_watched_rewards(names: list[str] | None, kind: str | None, others: list[Reward]) -> list[Reward]:
    """Load the rewards to watch, except those that are measured anyway.

    Args:
        names: as in the setting `watch_rewards`; "auto" stands for `CHEAP`.
        kind: kind of the samples; see [`~diffusion_grpo.rollout.diversity.kind_of`].
        others: trained and evaluation-only rewards, which are measured anyway.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = [own for name in names or [] for own in (CHEAP.get(kind, []) if name == "auto" else [name])]
    measured = {reward.name for reward in others}
    return [reward for reward in load_rewards(list(dict.fromkeys(wanted))) if reward.name not in measured]
