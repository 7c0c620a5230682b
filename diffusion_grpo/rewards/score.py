"""Calls reward functions and checks what they return.

In: pictures or videos with their prompts and dataset columns, and reward functions, sync or async. Out: a float32
tensor `(samples, functions)`, NaN where a function returned `None`. A module of its own because a user's reward is the
least tested code of a run: everything that can be wrong with its answer is found here, with the sample at hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import json
import math
import numbers
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .contract import Reward, is_marked
from .samples import as_pictures, as_tensor, frame_positions


class RewardError(RuntimeError):
    """A reward function failed or returned something that is no reward; the cause, if any, is chained."""


@torch.no_grad()
def score(
    reward_funcs: list[Callable | Reward],
    *,
    images: list | None = None,
    videos: list | None = None,
    prompts: list[str],
    columns: dict[str, list] | None = None,
    groups: list[int] | None = None,
    fps: float | None = None,
    sampling_rate: int | None = None,
    trainer_state: object | None = None,
    log_metric: Callable | None = None,
    log_extra: Callable | None = None,
    failure_dir: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> Tensor:
    """Score every sample by every function.

    A function is called with the keywords `prompts`, `completions` (the samples), `images` or `videos` (the samples
    again), `fps` (with videos), `sampling_rate` (with sound), `trainer_state`, `log_metric`, `log_extra` and every
    column, as far as it accepts them. Async functions run concurrently. A function that asks for `images` and gets
    videos is called with frames of them, and the mean over a video's frames is its value (`Reward.frames`). A function
    marked `groupwise` is called once a group, one marked `takes_tensors` gets a tensor.

    Args:
        reward_funcs: each returns one `float | None` a sample.
        images: PIL images, or `videos`: lists of frames; arrays are turned into PIL once. Exactly one of the two.
        prompts: one a sample.
        columns: further dataset columns, one value a sample each.
        groups: the group of each sample, for groupwise functions; by default samples of equal prompts are a group.
        fps: frames a second of the videos.
        sampling_rate: samples a second of the sounds.
        log_extra: called once for each name that functions log, with one value a sample (None where not logged).
        failure_dir: where the sample of a failed call is saved.
        announce: called with the name of each function before it, with several names before all async ones.

    Returns:
        `(samples, functions)` float32, NaN for `None`.

    Raises:
        RewardError: a function raised, returned the wrong number of values, NaN, infinity or something that is not a
            number, or asks for videos where there are images. The message names the function, the prompt and where
            the sample was saved.
        ValueError: both or neither of `images` and `videos` are given.
    """
    if (images is None) == (videos is None):
        raise ValueError("score needs exactly one of images and videos.")
    kind, samples = ("images", images) if videos is None else ("videos", videos)
    batch = _Batch(kind, as_pictures(samples), prompts, columns or {}, groups or _equal_prompts(prompts))
    shared = {"trainer_state": trainer_state, "log_metric": log_metric or _unlogged} | (
        {"fps": fps} if kind == "videos" else {}
    )
    shared |= {"sampling_rate": sampling_rate} if sampling_rate is not None else {}
    rewards = [func if isinstance(func, Reward) else _unnamed(func) for func in reward_funcs]
    extras: dict[str, list] = {}
    calls = [_calls(reward, batch) for reward in rewards]
    announce = announce or (lambda names: None)
    for call in itertools.chain(*calls):
        announce(call.reward.name)
        call.answer = _answer(call, batch, shared, extras if log_extra else None)
    _await_all(list(itertools.chain(*calls)), announce)
    values = torch.empty(len(samples), len(rewards), dtype=torch.float32)
    for position, own in enumerate(calls):
        values[:, position] = torch.tensor(_values(own, batch, failure_dir), dtype=torch.float32)
    for name, column in extras.items():
        log_extra(name, column)
    if rewards and values.isnan().all(dim=1).any():
        _warn_unscored()
    return values


@dataclasses.dataclass(frozen=True)
class _Batch:
    """All samples of one scoring, with one value a sample in `prompts`, `columns` and `groups`."""

    kind: str
    samples: list
    prompts: list[str]
    columns: dict[str, list]
    groups: list[int]

    @cached_property
    def tensor(self) -> Tensor:
        try:
            return as_tensor(self.samples)
        except ValueError as error:
            raise RewardError(str(error)) from error

    @property
    def blocks(self) -> list[list[int]]:
        """The samples of each group."""
        return [[row for row, own in enumerate(self.groups) if own == group] for group in dict.fromkeys(self.groups)]


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a function: the sample behind each item that it gets, and what it answered."""

    reward: Reward
    rows: list[int]
    items: Any
    kind: str
    answer: Any = None


def _unlogged(name: str, value: object) -> None:
    """Where nobody keeps a reward's metrics and columns."""


def _tensor_name(reward: Reward) -> str:
    """Pictures and videos are one form of tensor, so a function gets it under whichever of the names it has."""
    return "videos" if "videos" in reward.parameters else "images"


def _unnamed(func: Callable) -> Reward:
    """A `Reward` for each function, whatever the others are called."""
    from . import reward_name

    return Reward(func, reward_name(func))


def _equal_prompts(prompts: list[str]) -> list[int]:
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}
    return [first[prompt] for prompt in prompts]


def _calls(reward: Reward, batch: _Batch) -> list[_Call]:
    """The calls that a reward needs for a batch: one, or one a group (and frame of videos)."""
    is_groupwise = is_marked(reward.function, "is_groupwise")
    calls = []
    for rows in batch.blocks if is_groupwise else [list(range(len(batch.samples)))]:
        is_whole = len(rows) == len(batch.samples)
        if is_marked(reward.function, "takes_tensors"):
            calls.append(_Call(reward, rows, batch.tensor if is_whole else batch.tensor[rows], _tensor_name(reward)))
        elif batch.kind == "videos" and reward.reads_frames:
            places = [(row, frame_positions(reward.frames, len(batch.samples[row]))) for row in rows]
            turns = range(min(len(own) for _, own in places)) if is_groupwise else [slice(None)]
            for turn in turns:
                chosen = [(row, place) for row, own in places for place in np.atleast_1d(own[turn])]
                items = [batch.samples[row][place] for row, place in chosen]
                calls.append(_Call(reward, [row for row, _ in chosen], items, "images"))
        else:
            items = batch.samples if is_whole else [batch.samples[row] for row in rows]
            calls.append(_Call(reward, rows, items, batch.kind))
    return calls


def _answer(call: _Call, batch: _Batch, shared: dict, extras: dict | None) -> object:
    """The function's answer, an awaitable, or the exception it raised."""
    parameters = call.reward.parameters
    if "videos" in parameters and "images" not in parameters and call.kind == "images":
        return RewardError("asks for videos, but the samples are pictures")

    def log_extra(name: str, values: list) -> None:
        if len(values) != len(call.rows):
            raise ValueError(f"log_extra({name!r}) got {len(values)} values for {len(call.rows)} samples.")
        column = extras.setdefault(name, [None] * len(batch.samples))
        for row, value in zip(call.rows, values):
            column[row] = value

    columns = {name: values for name, values in batch.columns.items() if name not in call.reward.arguments}
    keywords = {name: [values[row] for row in call.rows] for name, values in columns.items()}
    keywords |= {"prompts": [batch.prompts[row] for row in call.rows], "completions": call.items}
    keywords |= {call.kind: call.items, "log_extra": _unlogged if extras is None else log_extra, **shared}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        keywords = {name: value for name, value in keywords.items() if name in parameters}
    try:
        return call.reward(**keywords)
    except Exception as error:
        return error


def _await_all(calls: list[_Call], announce: Callable[[str], None]) -> None:
    """Replace the awaitables among the answers by their results, awaited together.

    In a thread with a loop of its own, so that it also works where a loop runs already (a notebook).
    """
    waiting = [call for call in calls if inspect.isawaitable(call.answer)]
    if not waiting:
        return
    announce(", ".join(dict.fromkeys(call.reward.name for call in waiting)))

    async def gather() -> list:
        with torch.no_grad():  # which is a thread's own
            return await asyncio.gather(*(_awaited(call.answer) for call in waiting))

    with ThreadPoolExecutor(max_workers=1) as pool:
        for call, result in zip(waiting, pool.submit(asyncio.run, gather()).result(), strict=True):
            call.answer = result


async def _awaited(answer: Awaitable) -> object:
    try:
        return await answer
    except Exception as error:
        return error


def _values(calls: list[_Call], batch: _Batch, folder: Path | None) -> list[float]:
    """One number a sample from all calls of a reward: the mean over its frames, NaN where none has a value."""
    found: list[list[float]] = [[] for _ in batch.samples]
    for call in calls:
        for row, value in zip(call.rows, _checked(call, _Failure(call, batch, folder)), strict=True):
            if not math.isnan(value):
                found[row].append(value)
    return [calls[0].reward.value(sum(values) / len(values)) if values else math.nan for values in found]


class _Failure:
    """Builds the error for one call: saves the sample, names function and prompt."""

    def __init__(self, call: _Call, batch: _Batch, folder: Path | None):
        self.name, self.call, self.batch, self.folder = call.reward.name, call, batch, folder

    def error(self, what: str, item: int = 0) -> RewardError:
        index = self.call.rows[item]
        saved = "" if self.folder is None else f" The sample is saved as {self._save(what, index)}."
        return RewardError(f"The reward {self.name!r} {what} (prompt {self.batch.prompts[index]!r}).{saved}")

    def _save(self, what: str, index: int) -> Path:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        sample, stem = self.batch.samples[index], f"{self.name}-{index}"
        path = folder / f"{stem}.png"
        if isinstance(sample, Image.Image):
            sample.save(path)
        else:
            path = folder / f"{stem}.npy"
            np.save(path, np.stack([np.asarray(frame) for frame in sample]))
        record = {"reward": self.name, "index": index, "prompt": self.batch.prompts[index], "error": what}
        (folder / f"{stem}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
        return path


def _checked(call: _Call, failure: _Failure) -> list[float]:
    """The answer as floats, NaN for `None`; raises `RewardError` for everything that is no list of rewards."""
    answer, count = call.answer, len(call.rows)
    if isinstance(answer, RewardError):
        raise failure.error(str(answer)) from answer
    if isinstance(answer, Exception):
        raise failure.error(f"raised {type(answer).__name__}: {answer}") from answer
    if isinstance(answer, (Tensor, np.ndarray)):
        answer = answer.tolist()
    if not isinstance(answer, (list, tuple)):
        raise failure.error(f"returned a {type(answer).__name__}, expected a list of {count} numbers")
    if len(answer) != count:
        raise failure.error(f"returned {len(answer)} values, expected {count}, one a sample")
    return [math.nan if value is None else _number(value, index, failure) for index, value in enumerate(answer)]


def _number(value: object, index: int, failure: _Failure) -> float:
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise failure.error(f"returned {value!r}, expected a number or None", index)
    if not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        raise failure.error(f"returned {value}, expected a finite float32 number or None", index)
    return float(value)


@cache
def _warn_unscored() -> None:
    """Once a process."""
    warnings.warn("Some samples got None from every reward function; they do not contribute.", stacklevel=3)
