"""Rewards for how a video changes over time, computed from pixels: flicker, smoothness and motion.

A still video is perfectly steady and smooth, so train on these together with a reward for motion.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

LONG_SIDE = 128  # pixels to which frames are reduced before motion is searched
BLOCK, REACH = 8, 8  # side of a block and farthest displacement that is searched, in those pixels


def flicker(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """1 - mean |x[t+1] - x[t]| / 255 over RGB: 1 for a still video. `None` for fewer than two frames.

    The temporal flickering of VBench (https://huggingface.co/papers/2311.17982), as a share of 1: high is steady.
    """
    return [None if len(video) < 2 else 1 - float(np.abs(np.diff(_rgb(video), axis=0)).mean()) for video in videos]


def smoothness(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """1 - mean |x[t] - (x[t-1] + x[t+1]) / 2| / 255 over RGB: how well each frame is what its neighbours imply.

    1 for a video that is still or fades evenly. `None` for fewer than three frames.
    """
    return [None if len(video) < 3 else 1 - _unevenness(_rgb(video)) for video in videos]


def motion(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Mean displacement from frame to frame, in percent of the longer side: 0 still, at most 9. `None` for one frame.

    Exhaustive block matching (least absolute difference of luma, the shortest displacement among equals) on frames
    reduced to 128 pixels, blocks of 8, up to 8 pixels each way. Each frame's mean luma is taken off, and a block
    is still unless another place fits better by 1/255: light and faint noise are no motion, strong noise is.
    """
    return [None if len(video) < 2 else _motion(video) for video in videos]


def _rgb(video: list[Image.Image]) -> np.ndarray:
    """`(frames, height, width, 3)` float32 in [0, 1]."""
    return np.stack([np.asarray(frame.convert("RGB"), dtype=np.float32) for frame in video]) / 255


def _unevenness(frames: np.ndarray) -> float:
    return float(np.abs(frames[1:-1] - (frames[:-2] + frames[2:]) / 2).mean())


def _motion(video: list[Image.Image]) -> float:
    scale = LONG_SIDE / max(video[0].size)
    size = [max(BLOCK, round(side * scale)) for side in video[0].size]
    frames = [np.asarray(frame.convert("L").resize(size, Image.Resampling.BOX), dtype=np.float32) for frame in video]
    frames = [frame - frame.mean() for frame in frames]
    lengths = [_displacements(before, after) for before, after in zip(frames[:-1], frames[1:])]
    return float(100 * np.mean(lengths) / LONG_SIDE)


def _displacements(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Length of each block's displacement from `before` to `after`, in pixels."""
    rows, cols = (side // BLOCK for side in after.shape)
    after = after[: rows * BLOCK, : cols * BLOCK]
    padded = np.pad(before, REACH, mode="edge")
    steps = sorted(np.ndindex(2 * REACH + 1, 2 * REACH + 1), key=lambda step: np.hypot(*(np.array(step) - REACH)))
    best, length = None, np.zeros((rows, cols))
    for down, right in steps:  # from no displacement outwards
        shifted = padded[down : down + after.shape[0], right : right + after.shape[1]]
        cost = np.abs(after - shifted).reshape(rows, BLOCK, cols, BLOCK).mean(axis=(1, 3))
        if best is None:
            best = cost - 1
            continue
        is_better = cost < best
        best = np.where(is_better, cost, best)
        length[is_better] = np.hypot(down - REACH, right - REACH)
    return length
