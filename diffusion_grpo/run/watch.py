"""Detect signs of reward hacking early, from the log; used in training, in evaluations and by the report."""

import numpy as np

# metrics of rollouts and updates that each evaluation repeats, as it has no groups and no updates itself
ROLLOUTS = ("diversity", "frac_reward_zero_std", "clip_ratio/region_mean", "frac_advantage_clipped")
WINDOW = 5  # number of updates at the start and at the end that are compared
# of the diversity at the start; below it a group has collapsed. Runs of `make demo` left 0.70, 0.73 and 0.64: samples
# that are all right are more alike than samples that are wrong in different ways
LEAST_SHARE = 0.4


def summarise_rollouts(log: list[dict[str, float]]) -> dict[str, float]:
    """Return metrics of the rollouts and updates since the last evaluation that may show reward hacking."""
    last = max((place for place, entry in enumerate(log) if any(key.startswith("eval_") for key in entry)), default=-1)
    found = {key: [entry[key] for entry in log[last + 1 :] if key in entry] for key in ROLLOUTS}
    return {f"rollouts/{key}": sum(values) / len(values) for key, values in found.items() if values}


def find_collapse(log: list[dict[str, float]]) -> str | None:
    """Return a warning if the reward rose while the samples of a group became alike; None otherwise.

    The means of the first and the last `WINDOW` updates are compared. The reward has risen if it grew by more than
    twice the standard error of the difference. Diversity has collapsed if less than `LEAST_SHARE` of it is left.
    """
    entries = [entry for entry in log if None not in (entry.get("reward"), entry.get("diversity"))]
    if len(entries) < 2 * WINDOW:
        return None
    parts = entries[:WINDOW], entries[-WINDOW:]
    (low, high), (wide, narrow) = (
        [np.array([entry[key] for entry in part], dtype=float) for part in parts] for key in ("reward", "diversity")
    )
    noise = 2 * np.sqrt((low.var(ddof=1) + high.var(ddof=1)) / WINDOW)
    if not (high.mean() > low.mean() + noise and narrow.mean() < LEAST_SHARE * wide.mean()):
        return None
    return (
        f"The trained reward rose from {low.mean():.3g} to {high.mean():.3g} while the samples of a prompt became "
        f"alike: their mean distance fell from {wide.mean():.3g} to {narrow.mean():.3g}. This is how a reward is "
        'hacked: look at the samples, and see "Reward hacking" in docs/rewards/hacking.md.'
    )
