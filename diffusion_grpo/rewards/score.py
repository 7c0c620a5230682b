"""Calls reward functions and checks what they return.

In: pictures or videos with their prompts and dataset columns, and reward functions, sync or async. Out: a float32
tensor `(samples, functions)`, NaN where a function returned `None`. A module of its own because a user's reward is the
least tested code of a run: everything that can be wrong with its answer is found here, with the sample at hand.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class RewardError(RuntimeError):
    """A reward function failed or returned something that is no reward; the cause, if any, is chained."""


def score(
    reward_funcs: list[Callable],
    *,
    images: list | None = None,
    videos: list | None = None,
    prompts: list[str],
    columns: dict[str, list] | None = None,
    trainer_state: object | None = None,
    log_metric: Callable | None = None,
    log_extra: Callable | None = None,
    failure_dir: Path | None = None,
) -> Tensor:
    """Score every sample by every function.

    A function is called with the keywords `prompts`, `completions` (the samples), `images` or `videos` (the samples
    again), `trainer_state`, `log_metric`, `log_extra` and every column, as far as it accepts them. Async functions run
    concurrently.

    Args:
        reward_funcs: each returns one `float | None` a sample.
        images: PIL images, or `videos`: lists of frames or arrays; exactly one of the two.
        prompts: one a sample.
        columns: further dataset columns, one value a sample each.
        failure_dir: where the sample of a failed call is saved.

    Returns:
        `(samples, functions)` float32, NaN for `None`.

    Raises:
        RewardError: a function raised, returned the wrong number of values, NaN, infinity or something that is not a
            number. The message names the function, the prompt and where the sample was saved.
        ValueError: both or neither of `images` and `videos` are given.
    """
    if (images is None) == (videos is None):
        raise ValueError("score needs exactly one of images and videos.")
    kind, samples = ("images", images) if videos is None else ("videos", videos)
    keywords = {
        "prompts": prompts,
        "completions": samples,
        kind: samples,
        "trainer_state": trainer_state,
        "log_metric": log_metric or _unlogged,
        "log_extra": log_extra or _unlogged,
        **(columns or {}),
    }
    answers = [_call(function, keywords) for function in reward_funcs]
    _await_all(answers)
    rewards = torch.empty(len(samples), len(reward_funcs), dtype=torch.float32)
    for position, (function, answer) in enumerate(zip(reward_funcs, answers, strict=True)):
        failure = _Failure(function, samples, prompts, failure_dir)
        rewards[:, position] = torch.tensor(_checked(answer, failure, len(samples)), dtype=torch.float32)
    if reward_funcs and rewards.isnan().all(dim=1).any():
        _warn_unscored()
    return rewards


def _unlogged(name: str, value: object) -> None:
    """Where nobody keeps a reward's metrics and columns."""


def _call(function: Callable, keywords: dict) -> object:
    """The function's answer, an awaitable, or the exception it raised."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted = {parameter.name for parameter in parameters}
        keywords = {name: value for name, value in keywords.items() if name in accepted}
    try:
        return function(**keywords)
    except Exception as error:
        return error


def _await_all(answers: list) -> None:
    """Replace the awaitables among the answers by their results, awaited together.

    In a thread with a loop of its own, so that it also works where a loop runs already (a notebook).
    """
    waiting = [position for position, answer in enumerate(answers) if inspect.isawaitable(answer)]
    if not waiting:
        return

    async def gather() -> list:
        return await asyncio.gather(*(_awaited(answers[position]) for position in waiting))

    with ThreadPoolExecutor(max_workers=1) as pool:
        for position, result in zip(waiting, pool.submit(asyncio.run, gather()).result(), strict=True):
            answers[position] = result


async def _awaited(answer: Awaitable) -> object:
    try:
        return await answer
    except Exception as error:
        return error


class _Failure:
    """Builds the error for one function: saves the sample, names function and prompt."""

    def __init__(self, function: Callable, samples: list, prompts: list[str], folder: Path | None):
        from . import reward_name

        self.name = reward_name(function)
        self.samples, self.prompts, self.folder = samples, prompts, folder

    def error(self, what: str, index: int = 0) -> RewardError:
        saved = "" if self.folder is None else f" The sample is saved as {self._save(what, index)}."
        return RewardError(f"The reward {self.name!r} {what} (prompt {self.prompts[index]!r}).{saved}")

    def _save(self, what: str, index: int) -> Path:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        sample, stem = self.samples[index], f"{self.name}-{index}"
        path = folder / f"{stem}.png"
        if isinstance(sample, Image.Image):
            sample.save(path)
        else:
            path = folder / f"{stem}.npy"
            np.save(path, np.stack([np.asarray(frame) for frame in sample]))
        record = {"reward": self.name, "index": index, "prompt": self.prompts[index], "error": what}
        (folder / f"{stem}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False), encoding="utf-8")
        return path


def _checked(answer: object, failure: _Failure, count: int) -> list[float]:
    """The answer as floats, NaN for `None`; raises `RewardError` for everything that is no list of rewards."""
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
