"""Call reward functions: what a user's code gets and may not change, and what can be wrong with its answer.

A user's reward is the least tested code of a run, so its answer is checked here, while the sample can still be saved.
Gradients of rewards are here too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import json
import math
import numbers
import os
import threading
import warnings
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from torch import Tensor

from ..media.files import write_sample
from ..media.samples import as_images, as_tensor, copy_value, frame_positions
from .contract import TAKEN, Reward, is_marked, is_run_metric, reward_name

FPS = 8.0  # of a saved video, where the frames per second are unknown
LESS_MEMORY = (
    "its network shares the memory with the policy and the samples being made: set overlap_rewards: false, or the "
    "reward's offload: true or a smaller batch_size, or move it to a reward server"
)
_lock = threading.Lock()
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None  # with the process, because threads do not survive a fork


class RewardError(RuntimeError):
    """A reward function failed, or returned something that is not a reward; the cause, if any, is chained.

    Examples:
        >>> def broken(images, **columns):
        ...     return [1.0]
        >>> score(load_rewards([broken]), images=images, prompts=["a cat", "a dog"])
        Traceback (most recent call last):
        RewardError: ...
    """


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
) -> Tensor:
    """Score every sample with every function.

    A function is called with the keywords `prompts`, `completions` (the samples), `images` or `videos` (the samples
    again), `fps` (with videos), `sampling_rate` (with sound), `trainer_state`, `log_metric`, `log_extra` and every
    column, as far as it accepts them. Async functions run concurrently. A function that asks for `images` and gets
    videos is called with frames of them, and its value is the mean over a video's frames (`Reward.frames`). A function
    marked `groupwise` is called once per group, one marked `takes_tensors` gets a tensor, one marked `takes_latents`
    the latents under that name. Each function gets its own copies of samples and columns, so that writing to them
    affects neither another function nor the caller. Functions run without gradients.

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
    rewards = [func if isinstance(func, Reward) else Reward(func, reward_name(func)) for func in reward_funcs]
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
        taken=[reward.name for reward in rewards],
    )
    scoring = Scoring(rewards, batch)
    scoring.run()
    try:
        scoring.wait()
    finally:
        scoring.cancel()  # in case it was interrupted
    values, extras = collect_values([scoring], (len(batch.samples), len(rewards)), failure_dir, log_metric)
    for name, column in extras.items() if log_extra else ():
        log_extra(name, column)
    return values


@dataclasses.dataclass(kw_only=True)
class Batch:
    """The samples of one scoring, with their prompts and columns; each list has one value per sample."""

    images: dataclasses.InitVar[list | None] = None
    videos: dataclasses.InitVar[list | None] = None
    latents: list[Tensor] | None = None
    prompts: list[str] | None
    columns: dict[str, list] | None = None
    groups: list[int] | None = None
    indices: list[int] | None = None  # places among the samples that are scored together
    first: int = 0  # number of samples before these
    fps: float | None = None
    sampling_rate: int | None = None
    trainer_state: object | None = None
    taken: Collection[str] = ()  # names that logged columns may not have
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
        if not self.groups:
            self.groups = self.indices if self.prompts is None else [*map(self.prompts.index, self.prompts)]

    @cached_property
    def tensor(self) -> Tensor:
        return as_tensor(self.samples)

    @cached_property
    def stacked_latents(self) -> Tensor:
        if self.latents is None:
            raise RewardError("asks for latents, which only a training run has; name one that takes images")
        return torch.stack(self.latents)

    @property
    def blocks(self) -> list[list[int]]:
        """The rows of the samples in each group."""
        return [[row for row, each in enumerate(self.groups) if each == group] for group in dict.fromkeys(self.groups)]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a function: the row of the sample behind each item, the answer, and logged values."""

    reward: Reward
    batch: Batch
    rows: list[int]
    frames: list[int] | None = None  # places in their videos, of items that are single frames
    answer: Any = None
    metrics: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    extras: dict[str, list] = dataclasses.field(default_factory=dict)

    def make(self) -> None:
        """Call the function; the answer becomes what it returned, an awaitable, or the exception it raised."""
        dtype = torch.get_default_dtype()
        try:
            with torch.no_grad():
                self.answer = self.reward(**self._keywords(self.reward.parameters))
        except Exception as error:
            self.answer = error
        torch.set_default_dtype(dtype)  # some scorers set half precision, which would change the training

    def _keywords(self, parameters: dict[str, inspect.Parameter]) -> dict[str, Any]:
        """Return the keyword arguments, with copies of the samples and of the columns that the function takes."""
        batch, fixed = self.batch, self.reward.fixed
        kind, items = self._copy_items(parameters)
        if "videos" in parameters and "images" not in parameters and kind == "images":
            raise RewardError("asks for videos, but the samples are images")
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        names = [name for name in batch.columns if name not in fixed and (takes_all or name in parameters)]
        keywords = {name: [copy_value(batch.columns[name][row]) for row in self.rows] for name in names}
        keywords |= {"completions": items, kind: items, "trainer_state": batch.trainer_state}
        keywords |= {"log_extra": self.log_extra, "log_metric": self.log_metric}
        if batch.prompts is not None:
            keywords["prompts"] = [batch.prompts[row] for row in self.rows]
        if batch.kind == "videos":
            keywords["fps"] = batch.fps
        if batch.sampling_rate is not None:
            keywords["sampling_rate"] = batch.sampling_rate
        return keywords if takes_all else {name: value for name, value in keywords.items() if name in parameters}

    def _copy_items(self, parameters: dict[str, inspect.Parameter]) -> tuple[str, Any]:
        """Return the keyword for the samples, and copies of them in the form that the function takes."""
        batch, function = self.batch, self.reward.function
        if is_marked(function, "takes_latents"):
            return "latents", batch.stacked_latents[self.rows]
        if is_marked(function, "takes_tensors"):  # images and videos have the same form
            return "videos" if "videos" in parameters else "images", batch.tensor[self.rows]
        kind = batch.kind if self.frames is None else "images"
        places = itertools.repeat(None) if self.frames is None else self.frames
        chosen = [
            batch.samples[row] if place is None else batch.samples[row][place] for row, place in zip(self.rows, places)
        ]
        return kind, as_tensor(chosen)[:, 0] if is_marked(function, "takes_pixels") else copy_value(chosen)

    async def wait(self) -> None:
        """Replace an awaitable by its result, or by its exception, which could end the event loop itself."""
        try:
            self.answer = await self.answer
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.answer = error

    def log_metric(self, name: str, value: float) -> None:
        """Record a number that the function logs."""
        if is_run_metric(name):
            raise ValueError(f"log_metric({name!r}) has the name of a metric of the run; change it.")
        self.metrics.append((name, float(value)))

    def log_extra(self, name: str, values: list) -> None:
        """Record a column that the function logs, one value per item."""
        if name in TAKEN or name in self.batch.taken or name.startswith("advantage/"):
            raise ValueError(f"log_extra({name!r}) has the name of another column of the table of samples; change it.")
        if len(values) != len(self.rows):
            raise ValueError(f"log_extra({name!r}) got {len(values)} values for {len(self.rows)} samples.")
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # of tensors or numpy
        try:
            pyarrow.array(plain)
        except pyarrow.ArrowException as error:
            raise ValueError(f"log_extra({name!r}) got values that a table cannot hold: {error}") from error
        self.extras[name] = plain

    def read(self, folder: Path | None) -> list[float]:
        """Return the answer as floats, NaN for `None`; otherwise raise RewardError and save the sample in `folder`."""
        answer, count = self.answer, len(self.rows)
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer  # SystemExit ends the run
        if isinstance(answer, Exception):
            what = f"raised {type(answer).__name__}: {answer}"
            if isinstance(answer, torch.OutOfMemoryError):
                what = f"ran out of memory ({answer}); {LESS_MEMORY}"
            raise self._error(str(answer) if isinstance(answer, RewardError) else what, folder) from answer
        if isinstance(answer, (Tensor, np.ndarray)):
            answer = answer.tolist()
        if not isinstance(answer, (list, tuple)):
            raise self._error(f"returned a {type(answer).__name__}, expected a list of {count} numbers", folder)
        if len(answer) != count:
            raise self._error(f"returned {len(answer)} values, expected {count}, one per sample", folder)
        values = []
        for item, value in enumerate(answer):
            if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
                value = value.item()  # numpy's bool is not a number, and float16 overflows in comparisons
            if value is not None and not isinstance(value, numbers.Real):
                raise self._error(f"returned {value!r}, expected a number or None", folder, item)
            if value is not None and not abs(value) <= torch.finfo(torch.float32).max:  # NaN neither
                raise self._error(f"returned {value}, expected a finite float32 number or None", folder, item)
            values.append(math.nan if value is None else float(value))
        return values

    def _error(self, what: str, folder: Path | None, item: int = 0) -> RewardError:
        """Save the sample of an item, and return the error that names function, prompt and file."""
        batch, row = self.batch, self.rows[item]
        name, prompt = self.reward.name, batch.prompts and batch.prompts[row]
        number = batch.first + batch.indices[row]
        saved = ""
        if folder is not None:
            stem = Path(folder) / f"{name}-{number}"
            _, path = write_sample(batch.samples[row], stem, batch.fps or FPS, batch.sampling_rate)
            record = {"reward": name, "index": number, "prompt": prompt, "error": what}
            text = json.dumps(record, indent=2, ensure_ascii=False)
            stem.with_name(f"{stem.name}.json").write_text(text, encoding="utf-8")
            saved = f" The sample is saved as {path}."
        return RewardError(f"The reward {name!r} {what} (prompt {prompt!r}).{saved}")


class Scoring:
    """The calls by which rewards score a batch: `run` makes them, in any thread, and `wait` waits for the answers."""

    def __init__(self, rewards: list[Reward], batch: Batch, numbers: list[int] | None = None):
        self.rewards, self.batch = rewards, batch
        self.numbers = list(range(len(rewards))) if numbers is None else numbers  # columns in the table of values
        self.calls: list[list[Call]] = []
        self.called: Future = Future()  # done once all functions have been called; raises what ends the process
        self._awaited: Future | None = None
        # each thread has its own current device, initially device 0
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run(self) -> None:
        """Call all functions, one after the other, and let the event loop await the async ones."""
        if not self.called.set_running_or_notify_cancel():
            return
        try:
            self._use_device()
            self.calls = [_make_calls(reward, self.batch) for reward in self.rewards]
            for call in itertools.chain(*self.calls):
                call.make()
            for name in ("tensor", "stacked_latents"):  # which were made for rewards
                vars(self.batch).pop(name, None)
            if any(inspect.isawaitable(call.answer) for call in itertools.chain(*self.calls)):
                self._awaited = run_in_loop(self._await_answers())
            self.called.set_result(None)
        except BaseException as error:  # a reward that calls sys.exit must end the run, not just its thread
            self.called.set_exception(error)

    def wait(self) -> None:
        """Wait until all functions have answered, async ones too."""
        self.called.result()
        if self._awaited is not None:
            self._awaited.result()

    def cancel(self) -> None:
        """Drop the calls if they have not begun, or the wait for async functions."""
        if not self.called.cancel() and self._awaited is not None:
            self._awaited.cancel()

    async def _await_answers(self) -> None:
        self._use_device()
        torch.set_grad_enabled(False)  # in the event loop's thread; a context would be left in another order
        calls = [call for call in itertools.chain(*self.calls) if inspect.isawaitable(call.answer)]
        await asyncio.gather(*(call.wait() for call in calls))

    def _use_device(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)


def collect_values(
    scorings: list[Scoring], shape: tuple[int, int], failure_dir: Path | None, log_metric: Callable | None
) -> tuple[Tensor, dict[str, list]]:
    """Check all answers; return the rewards, `(samples, functions)` float32, and the columns that functions logged."""
    values, extras = torch.full(shape, math.nan, dtype=torch.float32), {}
    for scoring in scorings:
        indices = scoring.batch.indices
        for number, calls in zip(scoring.numbers, scoring.calls, strict=True):
            values[indices, number] = torch.tensor(_read_values(calls, len(indices), failure_dir), dtype=torch.float32)
        for call in itertools.chain(*scoring.calls):
            for name, value in call.metrics if log_metric else ():
                log_metric(name, value)
            for name, column in call.extras.items():
                whole = extras.setdefault(name, [None] * len(values))
                for row, value in zip(call.rows, column, strict=True):
                    whole[indices[row]] = value
    if values.shape[1] and values.isnan().all(dim=1).any():
        warn_unscored()
    return values, extras


@cache
def warn_unscored() -> None:
    warnings.warn("Some samples got None from every reward function; they do not contribute.", stacklevel=4)


def run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Run a coroutine in the process's one event loop, to which clients, locks and semaphores of rewards belong."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            _loop = os.getpid(), asyncio.new_event_loop()
            threading.Thread(target=_loop[1].run_forever, name="async rewards", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop[1])


def _make_calls(reward: Reward, batch: Batch) -> list[Call]:
    """Return the calls that a reward needs for a batch: one, or one per group, which compares frame with frame."""
    is_groupwise = is_marked(reward.function, "is_groupwise")
    blocks = batch.blocks if is_groupwise else [list(range(len(batch.samples)))]
    if batch.kind != "videos" or not reward.reads_frames:
        return [Call(reward, batch, rows) for rows in blocks]
    calls = []
    for rows in blocks:
        places = [frame_positions(reward.frames, len(batch.samples[row])) for row in rows]
        if is_groupwise:
            calls += [Call(reward, batch, rows, list(turn)) for turn in zip(*places)]
        else:
            repeated = [row for row, frames in zip(rows, places) for _ in frames]
            calls.append(Call(reward, batch, repeated, list(itertools.chain(*places))))
    return calls


def _read_values(calls: list[Call], count: int, folder: Path | None) -> list[float]:
    """Return one number per sample from all calls of a reward: the mean over its frames, NaN if none has a value."""
    values: list[list[float]] = [[] for _ in range(count)]
    for call in calls:
        for row, value in zip(call.rows, call.read(folder), strict=True):
            if not math.isnan(value):
                values[row].append(value)
    return [calls[0].reward.value(sum(each) / len(each)) if each else math.nan for each in values]


def differentiate(
    rewards: list[Reward], weights: list[float], pixels: Tensor, prompts: list[str] | None, columns: dict[str, list]
) -> Tensor:
    """Return the (batch,) weighted sum of rewards of images or videos, with gradient; one without a value counts 0."""
    videos = pixels if pixels.ndim == 5 else pixels[:, None]
    total = 0 * pixels.float().flatten(1).sum(1)  # so that there is a gradient, of 0, even without a value
    for reward, weight in zip(rewards, weights, strict=True):
        if not weight:
            continue
        frames = frame_positions(reward.frames, videos.shape[1])
        images = videos[:, frames].flatten(0, 1).float()
        lists = {"prompts": prompts} | {name: column for name, column in columns.items() if name not in reward.fixed}
        known = {name: [value for value in column or () for _ in frames] for name, column in lists.items()}
        known |= {"images": images, "completions": images}
        takes_all = any(each.kind is each.VAR_KEYWORD for each in reward.parameters.values())
        answer = reward(**{name: column for name, column in known.items() if takes_all or name in reward.parameters})
        if not isinstance(answer, Tensor) or len(answer) != len(images):
            raise RewardError(f"The reward {reward.name!r} must return a tensor with one number for each image.")
        values = (answer.to(total).view(len(pixels), -1).mean(1) - reward.mean) / reward.std
        total = total + weight * (values if reward.clip is None else values.clamp(*reward.clip)).nan_to_num(0.0)
    return total
