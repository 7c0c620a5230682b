"""Call reward functions; decide what a user's code gets, what it may not change, and when it is called."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import warnings
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..media.samples import copy_value, frame_positions
from .answers import Batch, Call, Failure, RewardError, check_answer
from .contract import TAKEN, Reward, is_marked, reward_name
from .event_loop import run_in_loop


def read_matmul_precision() -> str | None:
    """Return torch's precision of float32 products; None if it was set by its newer names, as `tf32: true` does."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to mix its two interfaces
        return None


SETTINGS = (  # functions that read and write each process-wide setting of torch
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (read_matmul_precision, torch.set_float32_matmul_precision),
)


def score(
    reward_funcs: list[Callable | Reward],
    *,
    images: list | None = None,
    videos: list | None = None,
    latents: list[Tensor] | None = None,
    prompts: list[str] | None,
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
    """Score every sample with every function.

    A function is called with the keywords `prompts`, `completions` (the samples), `images` or `videos` (the samples
    again), `fps` (with videos), `sampling_rate` (with sound), `trainer_state`, `log_metric`, `log_extra` and every
    column, as far as it accepts them. Async functions run concurrently. A function that asks for `images` and gets
    videos is called with frames of them, and its value is the mean over a video's frames (`Reward.frames`). A function
    marked `groupwise` is called once per group, one marked `takes_tensors` gets a tensor, one marked `takes_latents`
    the latents under that name. Each function gets its own copies of samples and columns, so that writing to them
    affects neither another function nor the caller. Functions run without gradients, and torch's settings are restored
    after each call.

    Args:
        reward_funcs: functions that return one `float | None` per sample.
        images: PIL images, or `videos`: lists of frames; arrays are converted to PIL once. At most one of the two;
            neither if all functions take latents.
        latents: the latents of each sample after the last denoising step.
        prompts: one prompt per sample; None if the samples come from embeddings, in which case functions get no
            prompts.
        columns: further dataset columns, each with one value per sample.
        groups: the group of each sample, for groupwise functions; by default, samples of equal prompts are a group.
        fps: frames per second of the videos.
        sampling_rate: sampling rate of the sounds, in hertz.
        log_metric: called with each name and number that functions log, in the order of the functions.
        log_extra: called once for each name that functions log, with one value per sample (None if not logged).
        failure_dir: folder in which the sample of a failed call is saved.
        announce: called with the name of each function before the function is called, and with the names of all async
            functions before they are awaited.

    Returns:
        `(samples, functions)` float32, NaN for `None`.

    Raises:
        RewardError: a function raised; returned the wrong number of values, NaN, infinity or something that is not a
            number; or asks for videos when the samples are images. The message names the function, the prompt and
            the file in which the sample was saved.
        ValueError: both `images` and `videos` are given, or no samples at all.

    Examples:
        >>> from diffusion_grpo.rewards import brightness
        >>> score([brightness], images=images, prompts=["a", "b"]).tolist()  # one black, one white
        [[0.0], [1.0]]
    """
    batch = Batch(
        images=images,
        videos=videos,
        latents=latents,
        prompts=prompts,
        columns=columns,
        groups=groups,
        fps=fps,
        sampling_rate=sampling_rate,
        trainer_state=trainer_state,
    )
    scoring = Scoring(reward_funcs, batch)
    scoring.taken |= {reward.name for reward in scoring.rewards}
    score_here([scoring], announce)
    values = scoring.values(failure_dir, log_metric, log_extra)
    warn_of_unscored(values)
    return values


class Scoring:
    """The calls that score some samples: `answer` makes them, `wait` awaits them, `values` checks and reads them.

    There are three steps because the first two may happen in other threads, at the same time as those of other
    samples. What functions log is kept until `values`, and is then reported in the order of the functions.
    """

    def __init__(self, reward_funcs: list[Callable | Reward], batch: Batch):
        self.batch = batch
        self.rewards = [func if isinstance(func, Reward) else Reward(func, reward_name(func)) for func in reward_funcs]
        self.calls: list[list[Call]] = []
        self.taken = frozenset(TAKEN)
        self.doing = ", ".join(reward.name for reward in self.rewards)

    def answer(self, announce: Callable[[str], None] | None = None) -> None:
        """Call all functions, one after the other; what they raise is kept for `values`."""
        with torch.no_grad():
            self.calls = [_make_calls(reward, self.batch) for reward in self.rewards]
            for call in itertools.chain(*self.calls):
                self.doing, call.taken = call.reward.name, self.taken
                if announce is not None:
                    announce(self.doing)
                call.answer = _answer(call, self.batch)
                call.items = None  # otherwise its tensors would be kept until the rollout ends
        self.batch.drop_tensors()

    @property
    def is_waiting(self) -> bool:
        """Whether a function was async."""
        return bool(self.awaited)

    @property
    def awaited(self) -> list[str]:
        """Names of the async functions."""
        return [call.reward.name for call in itertools.chain(*self.calls) if inspect.isawaitable(call.answer)]

    async def wait(self) -> None:
        """Await all awaitables among the answers together, and replace them by their results.

        Several scorings wait in one thread, in which gradients are turned off already.
        """
        waiting = [call for call in itertools.chain(*self.calls) if inspect.isawaitable(call.answer)]
        self.doing = ", ".join(dict.fromkeys(self.awaited))
        results = await asyncio.gather(*(_await_answer(call.answer) for call in waiting))
        for call, result in zip(waiting, results, strict=True):
            call.answer = result

    def values(
        self, failure_dir: Path | None = None, log_metric: Callable | None = None, log_extra: Callable | None = None
    ) -> Tensor:
        """Return the rewards, `(samples, functions)` float32; see `score`."""
        values = torch.empty(len(self.batch.samples), len(self.rewards), dtype=torch.float32)
        for position, own in enumerate(self.calls):
            values[:, position] = torch.tensor(_read_values(own, self.batch, failure_dir), dtype=torch.float32)
        extras: dict[str, list] = {}
        for call in itertools.chain(*self.calls):
            for name, value in call.metrics if log_metric else ():
                log_metric(name, value)
            for name, column in call.extras.items():
                whole = extras.setdefault(name, [None] * len(self.batch.samples))
                for row, value in zip(call.rows, column):
                    whole[row] = value
        for name, column in extras.items() if log_extra else ():
            log_extra(name, column)
        return values


def score_here(scorings: list[Scoring], announce: Callable[[str], None] | None = None) -> None:
    """Make the calls in this thread, then await all async ones together.

    They are awaited in the event loop of another thread, because this one may already run a loop (in a notebook).
    """
    for scoring in scorings:
        scoring.answer(announce)
    waiting = [scoring for scoring in scorings if scoring.is_waiting]
    if not waiting:
        return
    if announce is not None:
        announce(", ".join(dict.fromkeys(name for scoring in waiting for name in scoring.awaited)))

    async def gather() -> None:
        with torch.no_grad(), preserve_settings():
            await asyncio.gather(*(scoring.wait() for scoring in waiting))

    done = run_in_loop(gather())
    try:
        done.result()
    finally:
        done.cancel()  # in case it was interrupted


def _tensor_name(reward: Reward) -> str:
    """Return the keyword for the tensor: images and videos have the same form, so the function's signature decides."""
    return "videos" if "videos" in reward.parameters else "images"


def _make_calls(reward: Reward, batch: Batch) -> list[Call]:
    """Return the calls that a reward needs for a batch: one, or one per group (and per frame of videos)."""
    is_groupwise = is_marked(reward.function, "is_groupwise")
    calls = []
    for rows in batch.blocks if is_groupwise else [list(range(len(batch.samples)))]:
        is_whole = len(rows) == len(batch.samples)
        if is_marked(reward.function, "takes_latents"):
            latents = batch.stacked_latents
            calls.append(Call(reward, rows, latents if is_whole else latents[rows], "latents"))
        elif is_marked(reward.function, "takes_tensors"):
            calls.append(Call(reward, rows, batch.tensor if is_whole else batch.tensor[rows], _tensor_name(reward)))
        elif batch.kind == "videos" and reward.reads_frames:
            places = [(row, frame_positions(reward.frames, len(batch.samples[row]))) for row in rows]
            turns = range(min(len(own) for _, own in places)) if is_groupwise else [slice(None)]
            for turn in turns:
                chosen = [(row, place) for row, own in places for place in np.atleast_1d(own[turn])]
                items = [batch.samples[row][place] for row, place in chosen]
                calls.append(Call(reward, [row for row, _ in chosen], items, "images"))
        else:
            items = batch.samples if is_whole else [batch.samples[row] for row in rows]
            calls.append(Call(reward, rows, items, batch.kind))
    return calls


def _answer(call: Call, batch: Batch) -> object:
    """Call the function; return its answer, an awaitable, or the exception it raised."""
    parameters = call.reward.parameters
    if "videos" in parameters and "images" not in parameters and call.kind == "images":
        return RewardError("asks for videos, but the samples are images")
    try:
        with torch.no_grad(), preserve_settings():
            return call.reward(**_keywords(call, batch))
    except Exception as error:
        return error


def _keywords(call: Call, batch: Batch) -> dict[str, Any]:
    """Return the call's keyword arguments, with copies of the samples and of the columns that the function takes."""
    reward, parameters = call.reward, call.reward.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    fixed = reward.fixed
    columns = [name for name in batch.columns if name not in fixed and (takes_all or name in parameters)]
    items = copy_value(call.items)
    keywords = {name: [copy_value(batch.columns[name][row]) for row in call.rows] for name in columns}
    keywords |= {} if batch.prompts is None else {"prompts": [batch.prompts[row] for row in call.rows]}
    keywords |= {"completions": items, call.kind: items}
    keywords |= {"log_extra": call.log_extra, "log_metric": call.log_metric, **batch.shared}
    return keywords if takes_all else {name: value for name, value in keywords.items() if name in parameters}


@contextlib.contextmanager
def preserve_settings() -> Iterator[None]:
    """Restore torch's process-wide settings after the context, whatever a reward has changed."""
    before = [read() for read, _ in SETTINGS]
    try:
        yield
    finally:
        restore_settings(before)


def restore_settings(settings: list[Any]) -> None:
    """Write back those of torch's settings that have changed and could be read."""
    for value, (read, write) in zip(settings, SETTINGS, strict=True):
        if value is not None and read() != value:
            write(value)


async def _await_answer(answer: Awaitable) -> object:
    """Return the answer, or the exception: raised in the event loop, it could end the loop itself."""
    try:
        return await answer
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error


def _read_values(calls: list[Call], batch: Batch, folder: Path | None) -> list[float]:
    """Return one number per sample from all calls of a reward: the mean over its frames, NaN if none has a value."""
    found: list[list[float]] = [[] for _ in batch.samples]
    for call in calls:
        for row, value in zip(call.rows, check_answer(call, Failure(call, batch, folder)), strict=True):
            if not math.isnan(value):
                found[row].append(value)
    return [calls[0].reward.value(sum(values) / len(values)) if values else math.nan for values in found]


def warn_of_unscored(values: Tensor) -> None:
    """Warn, once per process, if `(samples, functions)` rewards have a sample that no function scored."""
    if values.shape[1] and values.isnan().all(dim=1).any():
        _warn_unscored()


@cache
def _warn_unscored() -> None:
    warnings.warn("Some samples got None from every reward function; they do not contribute.", stacklevel=4)
