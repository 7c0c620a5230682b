"""Measure how much the samples of a prompt differ, by thumbnails or by embeddings from a reward's network."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..media.samples import as_images, copy_value, frame_positions
from ..rewards import Reward

SIDE = 32  # side of a thumbnail in pixels: shows composition and colour, not grain
FRAMES = 4  # evenly spaced frames compared per video


def kind_of(samples: list[Any]) -> str | None:
    """Return the kind of samples: "images", "videos", or None for others (sound, embeddings, latents)."""
    first = as_images(samples[:1])[0]
    frames = first if isinstance(first, list) else [first]
    if not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        return None
    return "videos" if isinstance(first, list) else "images"


def make_thumbnails(samples: list[Any]) -> Tensor | None:
    """Return thumbnails of images or videos, `(samples, numbers)` uint8; None for other samples."""
    if kind_of(samples) is None:
        return None
    videos = [sample if isinstance(sample, list) else [sample] for sample in as_images(samples)]
    return torch.from_numpy(np.stack([_thumbnail(video) for video in videos]))


def _thumbnail(video: list[Image.Image]) -> np.ndarray:
    """Shrink an image, or always `FRAMES` frames of a video, so that all samples have equally many numbers."""
    places = frame_positions(FRAMES, len(video)) if len(video) > 1 else [0]
    places += [places[-1]] * (FRAMES - len(places)) if len(video) > 1 else []
    size, box = (SIDE, SIDE), Image.Resampling.BOX
    return np.stack([np.asarray(video[place].convert("RGB").resize(size, box)) for place in places]).ravel()


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

    Args:
        points: `(samples, numbers)` values that `distance` compares.
        groups: `(samples,)` int64 group of each sample.
        distance: maps `(n, numbers)` points to `(n, n)` distances.
    """
    means = []
    for group in groups.unique():
        own = distance(points[groups == group])
        if len(own) > 1:
            means.append(own.sum().item() / (len(own) * (len(own) - 1)))
    return sum(means) / len(means) if means else None


def find_embedders(rewards: list[Reward]) -> list[Reward]:
    """Return rewards with a method `embed` from PIL images to `(images, numbers)`, such as those with CLIP."""
    return [reward for reward in rewards if callable(getattr(reward.function, "embed", None))]


def embed_samples(reward: Reward, samples: list[Any]) -> Tensor:
    """Return `(samples, numbers)` float32 embeddings on the CPU; a video's is the mean over some of its frames."""
    videos = [sample if isinstance(sample, list) else [sample] for sample in as_images(samples)]
    chosen = [[video[place] for place in frame_positions(FRAMES, len(video))] for video in videos]
    images = [copy_value(frame) for frames in chosen for frame in frames]
    found = torch.as_tensor(reward.function.embed(images)).float().cpu()
    return torch.stack([part.mean(0) for part in found.split([len(frames) for frames in chosen])])
