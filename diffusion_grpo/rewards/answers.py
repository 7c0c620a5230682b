"""One call of a reward: its samples, the check of what it returned, and the saved sample if it failed.

A user's reward is the least tested code of a run, so everything that can be wrong with its answer is checked here,
while the sample is still available.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from torch import Tensor

from ..media.files import write_sample
from ..media.samples import as_images, as_tensor
from .contract import TAKEN, Reward, is_run_metric

FPS = 8.0  # of a saved video, where the frames per second are unknown
LESS_MEMORY = (
    "its network shares the memory with the policy and the samples being made: set overlap_rewards: false, or the "
    "reward's offload: true or a smaller batch_size, or move it to a reward server"
)


class RewardError(RuntimeError):
    """A reward function failed, or returned something that is not a reward; the cause, if any, is chained.

    Examples:
        >>> def broken(images, **columns):
        ...     return [1.0]
        >>> score(load_rewards([broken]), images=images, prompts=["a cat", "a dog"])
        Traceback (most recent call last):
        RewardError: ...
    """


@dataclasses.dataclass(kw_only=True)
class Batch:
    """The samples of one scoring, with their prompts and columns; each list has one value per sample."""

    images: dataclasses.InitVar[list | None] = None
    videos: dataclasses.InitVar[list | None] = None
    latents: list[Tensor] | None = None
    prompts: list[str] | None
    columns: dict[str, list] | None = None
    groups: list[int] | None = None
    indices: list[int] | None = None
    fps: float | None = None
    sampling_rate: int | None = None
    trainer_state: object | None = None
    kind: str = dataclasses.field(init=False)
    samples: list = dataclasses.field(init=False)

    def __post_init__(self, images: list | None, videos: list | None):
        if images is not None and videos is not None:
            raise ValueError("score needs exactly one of images and videos, not both.")
        kind, samples = ("images", images) if videos is None else ("videos", videos)
        self.kind, self.samples = ("latents", self.latents) if samples is None else (kind, as_images(samples))
        if self.samples is None:
            raise ValueError("score needs exactly one of images and videos, or latents.")
        self.columns = self.columns or {}
        self.indices = list(range(len(self.samples))) if self.indices is None else self.indices
        self.groups = self.groups or (self.indices if self.prompts is None else _group_by_prompt(self.prompts))

    @property
    def shared(self) -> dict[str, Any]:
        """Keyword arguments that are the same for every sample."""
        found = {"trainer_state": self.trainer_state} | ({"fps": self.fps} if self.kind == "videos" else {})
        return found if self.sampling_rate is None else found | {"sampling_rate": self.sampling_rate}

    def prompt(self, row: int) -> str | None:
        """Return the prompt of a sample, for messages."""
        return None if self.prompts is None else self.prompts[row]

    @cached_property
    def tensor(self) -> Tensor:
        try:
            return as_tensor(self.samples)
        except ValueError as error:
            raise RewardError(str(error)) from error

    @cached_property
    def stacked_latents(self) -> Tensor:
        if self.latents is None:
            raise RewardError("A reward asks for latents, which only a training run has; name one that takes images.")
        shapes = {tuple(latent.shape) for latent in self.latents}
        if len(shapes) != 1:
            raise RewardError(
                f"A reward asks for one tensor of all latents, but these have several shapes: "
                f"{', '.join(map(str, sorted(shapes)))}; give height and width, or use a reward that takes images."
            )
        return torch.stack(self.latents)

    def drop_tensors(self) -> None:
        """Free the tensors that were made for rewards; they are made again on request."""
        for name in ("tensor", "stacked_latents"):
            self.__dict__.pop(name, None)

    @property
    def blocks(self) -> list[list[int]]:
        """The indices of the samples in each group."""
        return [[row for row, own in enumerate(self.groups) if own == group] for group in dict.fromkeys(self.groups)]


def _group_by_prompt(prompts: list[str]) -> list[int]:
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}
    return [first[prompt] for prompt in prompts]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a function: the row of the sample behind each item, the answer, and logged values.

    `items` are kept until the call is made; `taken` are names that logged columns may not have.
    """

    reward: Reward
    rows: list[int]
    items: Any
    kind: str
    answer: Any = None
    metrics: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    extras: dict[str, list] = dataclasses.field(default_factory=dict)
    taken: frozenset[str] = frozenset(TAKEN)

    def log_metric(self, name: str, value: float) -> None:
        """Record a number that the function logs."""
        if is_run_metric(name):
            raise ValueError(f"log_metric({name!r}) has the name of a metric of the run; change it.")
        self.metrics.append((name, float(value)))

    def log_extra(self, name: str, values: list) -> None:
        """Record a column that the function logs, one value per item."""
        if name in self.taken or name.startswith("advantage/"):
            raise ValueError(f"log_extra({name!r}) has the name of another column of the table of samples; change it.")
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({name!r}) got {len(values)} values for {len(self.rows)} samples.")
        plain = values.tolist() if hasattr(values, "tolist") else list(values)
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in plain]  # tensors or numpy numbers
        try:
            pyarrow.array(plain)
        except pyarrow.ArrowException as error:
            raise ValueError(f"log_extra({name!r}) got values that a table cannot hold: {error}") from error
        self.extras[name] = plain


class Failure:
    """Error report of one call: builds an error that names function and prompt, and saves the sample."""

    def __init__(self, call: Call, batch: Batch, folder: Path | None):
        self.name, self.call, self.batch, self.folder = call.reward.name, call, batch, folder

    def error(self, what: str, item: int = 0) -> RewardError:
        index = self.call.rows[item]
        saved = "" if self.folder is None else f" The sample is saved as {self._save(what, index)}."
        return RewardError(f"The reward {self.name!r} {what} (prompt {self.batch.prompt(index)!r}).{saved}")

    def _save(self, what: str, index: int) -> Path:
        stem = Path(self.folder) / f"{self.name}-{self.batch.indices[index]}"
        rate = self.batch.sampling_rate
        _, path = write_sample(self.batch.samples[index], stem, self.batch.fps or FPS, rate)
        number, prompt = self.batch.indices[index], self.batch.prompt(index)
        record = {"reward": self.name, "index": number, "prompt": prompt, "error": what}
        text = json.dumps(record, indent=2, ensure_ascii=False)
        stem.with_name(f"{stem.name}.json").write_text(text, encoding="utf-8")
        return path


def check_answer(call: Call, failure: Failure) -> list[float]:
    """Return the answer as floats, NaN for `None`."""
    answer, count = call.answer, len(call.rows)
    if isinstance(answer, RewardError):
        raise failure.error(str(answer)) from answer
    if isinstance(answer, torch.OutOfMemoryError):
        raise failure.error(f"ran out of memory ({answer}); {LESS_MEMORY}") from answer
    if isinstance(answer, Exception):
        raise failure.error(f"raised {type(answer).__name__}: {answer}") from answer
    if isinstance(answer, BaseException):  # SystemExit ends the run
        raise answer
    if isinstance(answer, (Tensor, np.ndarray)):
        answer = answer.tolist()
    if not isinstance(answer, (list, tuple)):
        raise failure.error(f"returned a {type(answer).__name__}, expected a list of {count} numbers")
    if len(answer) != count:
        raise failure.error(f"returned {len(answer)} values, expected {count}, one per sample")
    return [math.nan if value is None else _number(value, index, failure) for index, value in enumerate(answer)]


def _number(value: object, index: int, failure: Failure) -> float:
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()  # a plain number: numpy's bool is not a number, and float16 overflows in comparisons
    if not isinstance(value, numbers.Real):
        raise failure.error(f"returned {value!r}, expected a number or None", index)
    if abs(value) > torch.finfo(torch.float32).max or not math.isfinite(value):
        raise failure.error(f"returned {value}, expected a finite float32 number or None", index)
    return float(value)
