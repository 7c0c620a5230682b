"""Score samples: call the rewards, measure how much samples differ, and warn if nothing can be learned from them.

Rollouts are scored while the next samples are made, evaluations a few prompts at a time. Rewards get the same keywords
in both.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import TrainerState

from ..algorithms.batch import Rows
from ..media.samples import as_images, copy_value, frame_positions, kind_of
from ..rewards import Reward, RewardError
from ..rewards.call import Batch
from ..rewards.executor import Executor, GroupScoring

MOST_IN_A_ROW = 10  # one rollout without a reward may be bad luck with its prompts; many in a row are a mistake
SIDE = 32  # side of a thumbnail in pixels: shows composition and colour, not grain
FRAMES = 4  # evenly spaced frames compared per video
logger = logging.getLogger(__name__)


class RewardScorer:
    """Caller of the rewards; `names` are those of all rewards of the run, which no logged column may have."""

    def __init__(
        self,
        rewards: list[Reward],
        names: list[str],
        *,
        executor: Executor,
        fps: float,
        sampling_rate: int | None,
        state: Callable[[], TrainerState],
        failures: Path,
    ):
        self.rewards, self._names, self._executor = rewards, names, executor
        self._fps, self._sampling_rate, self._state, self._failures = fps, sampling_rate, state, failures

    def open(self, rewards: list[Reward], rows: Rows, groups: list[int], first: int = 0) -> GroupScoring:
        """Return the object that takes the samples of `rows` as they are made; `first` others came before."""
        columns = [name for name in rows[0] if name != "prompt"]

        def make_batch(indices: list[int], samples: list[Any] | None, latents: list[Tensor] | None) -> Batch:
            chosen = [rows[index] for index in indices]
            kinds = {} if samples is None else {"videos" if isinstance(samples[0], list) else "images": samples}
            return Batch(
                **kinds,
                latents=latents,
                prompts=[row["prompt"] for row in chosen] if "prompt" in chosen[0] else None,
                columns={name: [row[name] for row in chosen] for name in columns},
                groups=[groups[index] for index in indices],
                indices=indices,
                first=first,
                fps=self._fps,
                sampling_rate=self._sampling_rate,
                trainer_state=self._state(),
                taken=self._names,
            )

        return GroupScoring(rewards, groups, make_batch, self._executor, self._failures)

    def score(
        self,
        rewards: list[Reward],
        samples: list,
        rows: Rows,
        groups: list[int],
        batch_size: int,
        log_metric: Callable[[str, float], None],
        latents: list[Tensor] | None = None,
        first: int = 0,
    ) -> tuple[Tensor, dict[str, list]]:
        """Score samples that are made; return the same as `GroupScoring.finish`."""
        with self.open(rewards, rows, groups, first) as scoring:
            for indices in batch_groups(groups, batch_size):
                chosen = None if latents is None else [latents[index] for index in indices]
                scoring.add(indices, [samples[index] for index in indices], chosen)
            return scoring.finish(log_metric)


def batch_groups(groups: list[int], batch_size: int) -> list[list[int]]:
    """Return batches of indices, each with whole groups: at most `batch_size` samples, or one group if it is larger.

    Examples:
        >>> batch_groups([0, 0, 1, 1, 2, 2], batch_size=5)
        [[0, 1, 2, 3], [4, 5]]
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    batches: list[list[int]] = []
    for indices in members.values():
        if batches and len(batches[-1]) + len(indices) <= batch_size:
            batches[-1] += indices
        else:
            batches.append(list(indices))
    return batches


# Diversity: how much the samples of a prompt differ, by thumbnails or by embeddings from a reward's network


def make_thumbnails(samples: list[Any]) -> Tensor | None:
    """Return thumbnails of images or videos, `(samples, numbers)` uint8; None for other samples.

    They hold an image, or always `FRAMES` frames of a video, so that all samples have equally many numbers.
    """
    if kind_of(samples) is None:
        return None
    thumbnails, size, box = [], (SIDE, SIDE), Image.Resampling.BOX
    for sample in as_images(samples):
        video = sample if isinstance(sample, list) else [sample]
        places = frame_positions(FRAMES, len(video)) if len(video) > 1 else [0]
        places += [places[-1]] * (FRAMES - len(places)) if len(video) > 1 else []
        frames = [np.asarray(video[place].convert("RGB").resize(size, box)) for place in places]
        thumbnails.append(np.stack(frames).ravel())
    return torch.from_numpy(np.stack(thumbnails))


def pixel_distance(points: Tensor) -> Tensor:
    """Return (n, n) root mean square differences of thumbnails: 0 if equal, 1 between black and white."""
    points = points.double() / 255
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist") / points.shape[1] ** 0.5


def cosine_distance(points: Tensor) -> Tensor:
    """Return (n, n) cosine distances of embeddings: 0 for the same direction, 1 at right angles."""
    points = torch.nn.functional.normalize(points.double(), dim=1)
    return (1 - points @ points.T).clamp(min=0)


def measure_diversity(
    points: Tensor, groups: Tensor, distance: Callable[[Tensor], Tensor] = pixel_distance
) -> float | None:
    """Return the mean distance between samples of a group, averaged over its pairs and then over groups.

    `points` are (samples, numbers), `groups` (samples,); `distance` maps (n, numbers) to (n, n).
    """
    means = []
    for group in groups.unique():
        distances = distance(points[groups == group])
        if len(distances) > 1:
            means.append(distances.sum().item() / (len(distances) * (len(distances) - 1)))
    return sum(means) / len(means) if means else None


def find_embedders(rewards: list[Reward]) -> list[Reward]:
    """Return rewards with a method `embed` from PIL images to `(images, numbers)`, such as those with CLIP."""
    return [reward for reward in rewards if callable(getattr(reward.function, "embed", None))]


def embed_samples(reward: Reward, samples: list[Any]) -> Tensor:
    """Return `(samples, numbers)` float32 embeddings on the CPU; a video's is the mean over some of its frames."""
    videos = [sample if isinstance(sample, list) else [sample] for sample in as_images(samples)]
    chosen = [[video[place] for place in frame_positions(FRAMES, len(video))] for video in videos]
    images = [copy_value(frame) for frames in chosen for frame in frames]
    embeddings = torch.as_tensor(reward.function.embed(images)).float().cpu()
    return torch.stack([part.mean(0) for part in embeddings.split([len(frames) for frames in chosen])])


# What a rollout leaves to learn


class SignalCheck:
    """Check of each rollout, which warns once of each reason why it is useless."""

    def __init__(self, names: list[str], most: int = MOST_IN_A_ROW, warns: bool = True):
        self.names, self.most, self.in_a_row, self.warns = ", ".join(names), most, 0, warns
        self._warned: set[str] = set()

    def add(self, rewards: Tensor, metrics: dict[str, float]) -> None:
        """Check a rollout by its (samples, functions) rewards of all processes, with NaN for None."""
        is_unscored = bool(rewards.isnan().all())
        self.in_a_row = self.in_a_row + 1 if is_unscored else 0
        if self.in_a_row >= self.most:
            raise RewardError(
                f"All rewards ({self.names}) of the last {self.in_a_row} rollouts were None, so nothing is learned; "
                "check that the prompts and columns hold what these rewards look for."
            )
        if is_unscored:
            self._warn(
                "All rewards (%s) of this rollout were None; after %d such rollouts in a row the run stops.",
                self.names,
                self.most,
            )
        elif metrics.get("diversity") == 0:
            self._warn(
                "The samples of each prompt in this rollout look the same, so their rewards say nothing about what to "
                "change; raise noise_level, or add noise to earlier steps (trained_steps)."
            )
        elif metrics.get("frac_advantage_zero") == 1 and metrics["frac_reward_zero_std"] == 1:
            self._warn(
                "All samples of a prompt in this rollout got the same reward, so every gradient is 0 (%s: %s). If "
                "that is the best score, take harder prompts; otherwise use a reward that tells better samples from "
                "worse ones.",
                self.names,
                _describe_range(rewards),
            )
        elif metrics.get("frac_advantage_zero") == 1:
            self._warn("All advantages of this rollout are 0, so every gradient is; check reward_threshold.")
        elif metrics.get("frac_advantage_clipped") == 1:
            self._warn(
                "All advantages of this rollout are clipped to the same size, so the best sample counts no more than "
                "the second best; raise advantage_clip."
            )

    def _warn(self, message: str, *values: object) -> None:
        if self.warns and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)


def _describe_range(rewards: Tensor) -> str:
    known = rewards[~rewards.isnan()]
    low, high = known.min().item(), known.max().item()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
