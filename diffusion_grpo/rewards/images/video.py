"""The rewards `flicker`, `smoothness` and `motion`: how the pixels of a video change over time.

A still video is perfectly steady and smooth, so combine the first two with a reward for motion.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

LONG_SIDE = 128  # pixels to which frames are reduced before the search for motion
BLOCK, REACH = 8, 8  # side of a block and largest displacement to try, in those pixels


def flicker(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return 1 - mean |x[t+1] - x[t]| / 255 over RGB per video: 1 if it is still, `None` for fewer than two frames.

    This is VBench's temporal flickering (https://huggingface.co/papers/2311.17982) in [0, 1]; high means steady.
    """
    return [None if len(video) < 2 else 1 - float(np.abs(np.diff(_rgb(video), axis=0)).mean()) for video in videos]


def smoothness(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return 1 - mean |x[t] - (x[t-1] + x[t+1]) / 2| / 255 over RGB per video: how well neighbours predict a frame.

    It is 1 for a video that is still or fades evenly, and `None` for fewer than three frames.
    """
    return [None if len(video) < 3 else 1 - _unevenness(_rgb(video)) for video in videos]


def motion(videos: list[list[Image.Image]], **columns) -> list[float | None]:
    """Return the mean displacement between frames per video, in percent of the longer side; `None` for one frame.

    It is 0 for a still video and at most 9. Displacements are found by exhaustive block matching (smallest absolute
    difference of luma, of equal ones the shortest displacement) on frames reduced to 128 pixels, with blocks of 8
    pixels and up to 8 pixels each way. Each frame's mean luma is subtracted, and a block counts as still unless
    another place fits better by 1/255. So changes of light and faint noise do not count as motion, but strong noise
    does.
    """
    return [None if len(video) < 2 else _motion(video) for video in videos]


def _rgb(video: list[Image.Image]) -> np.ndarray:
    """Convert a video to `(frames, height, width, 3)` float32 in [0, 1]."""
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
    """Return the length of each block's displacement from `before` to `after`, in pixels."""
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
