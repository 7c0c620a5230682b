"""Reward hacking, seen early: what the samples of a group have in common, and what a log says of it.

In: samples and their groups; a log. Out: how different the samples of a prompt are, and a sentence where the reward
rises while they become the same. A module of its own because trainer, evaluation and report must agree on it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..media.samples import as_images, copy_value, frame_positions
from ..rewards import Reward, load_rewards

# rewards without weights that are measured in evaluations, where nobody trains on them
CHEAP = {"images": ["brightness", "sharpness", "colorfulness", "jpeg_compressibility"]}
CHEAP["videos"] = [*CHEAP["images"], "flicker", "motion"]
SIDE = 32  # pixels to which a picture is reduced before it is compared: composition and colour, not grain
FRAMES = 4  # of a video, evenly spaced
# of the training, which each evaluation shows too: those of itself need groups of several samples, or an update
ROLLOUTS = ("diversity", "frac_reward_zero_std", "clip_ratio/region_mean", "frac_advantage_clipped")
WINDOW = 5  # updates at the start and at the end that are compared
# of the diversity at the start; below it a group has collapsed. Trainings by `make demo` left 0.55, 0.70 and 0.73:
# samples that are all right are more alike than samples that are wrong in different ways
LEAST_SHARE = 0.4


def kind_of(samples: list[Any]) -> str | None:
    """ "images", "videos" or None for what is neither (sound, embeddings, latents)."""
    first = as_images(samples[:1])[0]
    frames = first if isinstance(first, list) else [first]
    if not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        return None
    return "videos" if isinstance(first, list) else "images"


def watched_rewards(names: list[str] | None, kind: str | None, others: list[Reward]) -> list[Reward]:
    """The rewards that are only looked at.

    Args:
        names: as in the setting `watch_rewards`; "auto" stands for `CHEAP`.
        kind: of the samples, see `kind_of`.
        others: trained rewards and judges, which are measured anyway.

    Raises:
        ValueError: an unknown name.
    """
    wanted = [own for name in names or [] for own in (CHEAP.get(kind, []) if name == "auto" else [name])]
    measured = {reward.name for reward in others}
    return [reward for reward in load_rewards(list(dict.fromkeys(wanted))) if reward.name not in measured]


def thumbnails(samples: list[Any]) -> Tensor | None:
    """Small copies of pictures or videos, `(samples, numbers)` uint8; None where the samples are neither."""
    if kind_of(samples) is None:
        return None
    videos = [sample if isinstance(sample, list) else [sample] for sample in as_images(samples)]
    return torch.from_numpy(np.stack([_thumbnail(video) for video in videos]))


def _thumbnail(video: list[Image.Image]) -> np.ndarray:
    """A picture has one frame, a video always `FRAMES`, so that all samples have as many numbers."""
    places = frame_positions(FRAMES, len(video)) if len(video) > 1 else [0]
    places += [places[-1]] * (FRAMES - len(places)) if len(video) > 1 else []
    size, box = (SIDE, SIDE), Image.Resampling.BOX
    return np.stack([np.asarray(video[place].convert("RGB").resize(size, box)) for place in places]).ravel()


def pixel_distance(points: Tensor) -> Tensor:
    """(n, n) root mean square difference of thumbnails, as a share of the range: 0 equal, 1 black and white."""
    points = points.double() / 255
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") / points.shape[1] ** 0.5


def cosine_distance(points: Tensor) -> Tensor:
    """(n, n) 1 - cosine similarity of embeddings: 0 the same direction, 1 at right angles."""
    points = torch.nn.functional.normalize(points.double(), dim=1)
    return (1 - points @ points.T).clamp(min=0)


def diversity(points: Tensor, groups: Tensor, distance: Callable[[Tensor], Tensor] = pixel_distance) -> float | None:
    """Mean distance of two samples of one group: over its pairs, then over the groups of at least two.

    Args:
        points: `(samples, numbers)`, what `distance` compares.
        groups: `(samples,)` int64.
        distance: `(n, numbers)` to `(n, n)`.

    Returns:
        None where no group has two samples.
    """
    means = []
    for group in groups.unique():
        own = distance(points[groups == group])
        if len(own) > 1:
            means.append(own.sum().item() / (len(own) * (len(own) - 1)))
    return sum(means) / len(means) if means else None


def embedders(rewards: list[Reward]) -> list[Reward]:
    """Rewards whose object has a method `embed`, from PIL pictures to `(pictures, numbers)`: those with CLIP."""
    return [reward for reward in rewards if callable(getattr(reward.function, "embed", None))]


def embeddings(reward: Reward, samples: list[Any]) -> Tensor:
    """`(samples, numbers)` float32 on the CPU; of a video the mean over some of its frames."""
    videos = [sample if isinstance(sample, list) else [sample] for sample in as_images(samples)]
    chosen = [[video[place] for place in frame_positions(FRAMES, len(video))] for video in videos]
    pictures = [copy_value(frame) for frames in chosen for frame in frames]
    found = torch.as_tensor(reward.function.embed(pictures)).float().cpu()
    return torch.stack([part.mean(0) for part in found.split([len(frames) for frames in chosen])])


def since_evaluation(log: list[dict[str, float]]) -> dict[str, float]:
    """What the training's rollouts and updates say of reward hacking, for an evaluation to stand beside its own.

    Args:
        log: entries in their order; those of evaluations have keys `eval_...`.

    Returns:
        `rollouts/{name}`: the mean of each of `ROLLOUTS` over the entries since the last evaluation.
    """
    last = max((place for place, entry in enumerate(log) if any(key.startswith("eval_") for key in entry)), default=-1)
    found = {key: [entry[key] for entry in log[last + 1 :] if key in entry] for key in ROLLOUTS}
    return {f"rollouts/{key}": sum(values) / len(values) for key, values in found.items() if values}


def collapse(log: list[dict[str, float]]) -> str | None:
    """A sentence where the reward rose and the samples of a group became alike; None where they did not.

    The means of the first and the last `WINDOW` updates are compared. The reward has risen where it did by more than
    twice the standard error of the difference. Diversity has collapsed where less than `LEAST_SHARE` of it is left.

    Args:
        log: entries of updates in their order; those without `reward` or `diversity` are passed over.
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
        'hacked: look at the samples, and see "Reward hacking" in docs/rewards.md.'
    )
