"""Check what a reward function returned, and save the sample on which it failed.

A user's reward is the least tested code of a run, so whatever can be wrong with its answer is found here, while the
sample is at hand.
"""

from __future__ import annotations

import json
import math
import numbers
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from .calls import _Batch, _Call


LESS_MEMORY = (
    "its network shares the memory with the policy and the samples being made: set overlap_rewards: false, or the "
    "reward's offload: true or a smaller batch_size, or reward_processes so that few processes hold it"
)


class RewardError(RuntimeError):
    """A reward function failed, or returned something that is not a reward; the cause, if any, is chained."""


class Failure:
    """Builds the error of one call, which names function and prompt, and saves the sample."""

    def __init__(self, call: _Call, batch: _Batch, folder: Path | None):
        self.name, self.call, self.batch, self.folder = call.reward.name, call, batch, folder

    def error(self, what: str, item: int = 0) -> RewardError:
        index = self.call.rows[item]
        saved = "" if self.folder is None else f" The sample is saved as {self._save(what, index)}."
        return RewardError(f"The reward {self.name!r} {what} (prompt {self.batch.prompt(index)!r}).{saved}")

    def _save(self, what: str, index: int) -> Path:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        sample, stem = self.batch.samples[index], f"{self.name}-{self.batch.places[index]}"
        path = folder / f"{stem}.png"
        if isinstance(sample, Image.Image):
            sample.save(path)
        else:
            path = folder / f"{stem}.npy"
            frames = sample.cpu() if torch.is_tensor(sample) else np.stack([np.asarray(frame) for frame in sample])
            np.save(path, np.asarray(frames))
        place, prompt = self.batch.places[index], self.batch.prompt(index)
        record = {"reward": self.name, "index": place, "prompt": prompt, "error": what}
        (folder / f"{stem}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
        return path


def check_answer(call: _Call, failure: Failure) -> list[float]:
    """Return the answer as floats, NaN for `None`.

    Raises:
        RewardError: the function failed, or its answer is not a list with one reward per sample.
    """
    answer, count = call.answer, len(call.rows)
    if isinstance(answer, RewardError):
        raise failure.error(str(answer)) from answer
    if isinstance(answer, torch.OutOfMemoryError):
        raise failure.error(f"ran out of memory ({answer}); {LESS_MEMORY}") from answer
    if isinstance(answer, Exception):
        raise failure.error(f"raised {type(answer).__name__}: {answer}") from answer
    if isinstance(answer, (Tensor, np.ndarray)):
        answer = answer.tolist()
    if not isinstance(answer, (list, tuple)):
        raise failure.error(f"returned a {type(answer).__name__}, expected a list of {count} numbers")
    if len(answer) != count:
        raise failure.error(f"returned {len(answer)} values, expected {count}, one per sample")
    return [math.nan if value is None else _number(value, index, failure) for index, value in enumerate(answer)]


def _number(value: object, index: int, failure: Failure) -> float:
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise failure.error(f"returned {value!r}, expected a number or None", index)
    if not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        raise failure.error(f"returned {value}, expected a finite float32 number or None", index)
    return float(value)
