"""Cheap rewards that are only watched in evaluations: if one falls, a trained reward may be being hacked."""

from ..rewards import Reward, load_rewards

CHEAP = {"images": ["brightness", "sharpness", "colorfulness", "jpeg_compressibility"]}
CHEAP["videos"] = [*CHEAP["images"], "flicker", "motion"]


def load_watched_rewards(names: list[str] | None, kind: str | None, others: list[Reward]) -> list[Reward]:
    """Load the rewards to watch, except those that are measured anyway."""
    wanted = [own for name in names or [] for own in (CHEAP.get(kind, []) if name == "auto" else [name])]
    measured = {reward.name for reward in others}
    return [reward for reward in load_rewards(list(dict.fromkeys(wanted))) if reward.name not in measured]
