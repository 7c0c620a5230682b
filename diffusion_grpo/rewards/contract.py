"""Read `reward_funcs`, from YAML or Python, into `Reward`s: callables with their names, weights and options.

Mistakes (names, arguments, their types, columns that the dataset lacks) are refused here, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ..config.names import check_name

PROVIDED = ("prompts", "completions", "images", "videos", "latents", "fps", "sampling_rate", "trainer_state")
PROVIDED += ("log_metric", "log_extra")
# columns of the tables of samples, which a reward of that name would overwrite
TAKEN = ("prompt", "step", "seed", "reward", "advantage", "value", "kl", "image", "file")
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def groupwise(function: Callable) -> Callable:
    """Mark a reward to be called once per prompt, with all samples of it (e.g. a pairwise preference)."""
    function.is_groupwise = True
    return function


def takes_tensors(function: Callable) -> Callable:
    """Mark a reward to get the samples as one tensor, `(batch, frames, 3, height, width)` float32 in [0, 1].

    The tensor is on the CPU and takes the place of the PIL images, under the names `images`, `videos` and
    `completions`. An image is a video of one frame.
    """
    function.takes_tensors = True
    return function


def takes_latents(function: Callable) -> Callable:
    """Mark a reward to get `latents` (also as `completions`) in place of images: `(batch, ...)` float32.

    These are the latents after the last denoising step, as the pipeline returns them with `output_type="latent"`, on
    the device of the rollout. If no reward needs pixels, nothing is decoded.
    """
    function.takes_latents = True
    return function


def batchwise(function: Callable) -> Callable:
    """Mark a reward to be called once per rollout, after it, with all samples that this process scores.

    For rewards that compare prompts with each other. Other rewards may be called with whole groups as they finish.
    """
    function.is_batchwise = True
    return function


def is_marked(
    function: Callable, mark: Literal["is_groupwise", "is_batchwise", "takes_tensors", "takes_latents"]
) -> bool:
    """Return whether a function, the function in a `partial`, or an object or its class carries the mark."""
    if isinstance(function, functools.partial):
        return is_marked(function.func, mark)
    return bool(getattr(function, mark, False) or getattr(type(function).__call__, mark, False))


@dataclasses.dataclass(frozen=True)
class Reward:
    """One reward as a run uses it. The value r that it returns for a sample becomes (r - mean) / std, is then clipped,
    and then compared with the threshold; the result is what is used and logged.

    Attributes:
        function: what is called.
        name: the reward's name in metrics and files.
        arguments: keyword arguments of every call, besides the samples and the dataset's columns.
        weight: its weight in the sum over rewards; None if it was not given.
        mean, std: fixed numbers, such as those published with a scorer's weights; std above 0.
        clip: [low, high].
        threshold: a pass mark: the value becomes 1 if it is at least this, else 0.
        frames: how many frames of a video a function that asks for `images` gets: evenly spaced, including the first
            and the last (1 is the first), or "all". The value is the mean over the frames.
        made_with: the arguments with which `function` was made, if a class was named.

    Raises:
        ValueError: an option is out of range, or the name cannot be used in file names and metrics.
    """

    function: Callable
    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: float | None = None
    mean: float = 0.0
    std: float = 1.0
    clip: list[float] | None = None
    threshold: float | None = None
    frames: int | str = 8
    made_with: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_name(self.name, "The reward's name", "give the reward another `name`")
        for option in ("weight", "mean", "std", "threshold"):
            value = getattr(self, option)
            if value is not None and not (_is_number(value) and math.isfinite(value)):
                raise ValueError(f"The reward {self.name!r} has {option}={value!r}; give a finite number.")
        if self.std <= 0:
            raise ValueError(f"The reward {self.name!r} has std={self.std}; it divides, so it must be above 0.")
        if self.clip is not None and not (
            isinstance(self.clip, (list, tuple)) and [*map(_is_number, self.clip)] == [True, True]
        ):
            raise ValueError(f"The reward {self.name!r} has clip={self.clip!r}; write two numbers, [low, high].")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"The reward {self.name!r} has clip={self.clip!r}; low must be below high.")
        is_count = isinstance(self.frames, int) and not isinstance(self.frames, bool) and self.frames >= 1
        if not is_count and self.frames != "all":
            raise ValueError(f"The reward {self.name!r} has frames={self.frames!r}; give 1 or more, or 'all'.")

    def __call__(self, /, **keywords: Any) -> Any:
        """Call the function with its arguments and return its own answer, to which no option is applied."""
        return self.function(**self.arguments, **keywords)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters in the function's signature."""
        return dict(inspect.signature(self.function).parameters)

    @property
    def fixed(self) -> set[str]:
        """Names whose value comes from the settings alone, so that a dataset column of that name is not passed.

        These are set by `arguments` or a `functools.partial`, or are parameters with a default of a built-in reward,
        such as `scene` of `text`. A default in a user's function stands for a column that may be missing.
        """
        fixed, function = set(self.arguments), self.function
        while isinstance(function, functools.partial):
            fixed, function = fixed | set(function.keywords), function.func
        if _is_built_in(function):
            fixed |= {name for name, own in self.parameters.items() if own.default is not own.empty}
        return fixed

    @property
    def reads_frames(self) -> bool:
        """Whether the function asks for images, and so gets frames of a video."""
        marks = ("takes_tensors", "takes_latents")
        is_other = "videos" in self.parameters or any(is_marked(self.function, mark) for mark in marks)
        return "images" in self.parameters and not is_other

    def value(self, answer: float) -> float:
        """Apply the options to one number that the function returned; NaN stays NaN."""
        value = (answer - self.mean) / self.std
        if self.clip is not None and not math.isnan(value):
            value = min(max(value, self.clip[0]), self.clip[1])
        if self.threshold is not None and not math.isnan(value):
            value = float(value >= self.threshold)
        return value

    def options(self) -> dict[str, Any]:
        """Return arguments and changed options, as recorded in `run.json`: without tokens."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in OPTIONS[2:] and getattr(self, field.name) != field.default
        }
        arguments = {**self.arguments, **self.made_with}
        return {key: _written(value) for key, value in arguments.items() if key != "token"} | changed


OPTIONS = ("name", "weight", "mean", "std", "clip", "threshold", "frames")


def load_rewards(rewards: Any, setting: str = "reward_funcs") -> list[Reward]:
    """Read rewards in any form that a user may write.

    Args:
        rewards: a callable, a built-in name, a dotted path, or a `Reward`; a list of these; a mapping from these to a
            weight, or to a mapping of options and arguments; or a list with such mappings in it:
            `[{"text": {"weight": 0.6, "target_column": "word"}}, "color"]`. Options are those of `Reward`; arguments
            are the parameters with a default in the function's signature, or all in the constructor of a class.
        setting: name of the setting, for messages.

    Raises:
        ValueError: an unknown name, option or argument, a value of the wrong type, two rewards with the same name, a
            name that cannot be used in file names, or one that is a column of the tables of samples.
    """
    loaded = [_load(reward, options) for reward, options in _entries(rewards, setting)]
    names = [reward.name for reward in loaded]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{setting} has two rewards called {name!r}; give one of them another `name`.")
        if name in TAKEN:
            raise ValueError(
                f"{setting}: {name!r} is a column of every table of samples; give the reward another `name`."
            )
    return loaded


def reward_weights(rewards: list[Reward], setting: list[float] | None) -> list[float]:
    """Return one weight per reward: those written with the rewards, or the setting `reward_weights`, or 1 each.

    Raises:
        ValueError: there are no rewards, weights are given in both places, or their number differs from the rewards'.
    """
    if not rewards:
        raise ValueError("reward_funcs is empty; name at least one reward.")
    written = [reward.name for reward in rewards if reward.weight is not None]
    if setting is None:
        return [1.0 if reward.weight is None else float(reward.weight) for reward in rewards]
    if written:
        raise ValueError(f"reward_weights is set and {written[0]!r} has a weight of its own; use one of the two.")
    if len(setting) != len(rewards):
        raise ValueError(
            f"reward_weights has {len(setting)} entries for {len(rewards)} reward functions; give one each."
        )
    return [float(weight) for weight in setting]


def check_eval_rewards(rewards: list[Reward], eval_rewards: list[Reward]) -> None:
    """Refuse an evaluation-only reward with the name of a different reward, whose metrics it would overwrite.

    Raises:
        ValueError: there is such a reward.
    """
    for evaluated in eval_rewards:
        for reward in rewards:
            if evaluated.name == reward.name and evaluated != dataclasses.replace(reward, weight=evaluated.weight):
                raise ValueError(
                    f"eval_reward_funcs and reward_funcs have different rewards called {evaluated.name!r}; give one "
                    "of them another `name`."
                )


def check_columns(rewards: list[Reward], columns: list[str], dataset: str) -> None:
    """Refuse a dataset without the columns that the rewards need.

    A reward needs the parameters without a default in its signature, and the columns that its `..._column` arguments
    name.

    Raises:
        ValueError: a column is missing, or a `..._column` argument names one that cannot be passed. The message names
            the reward, the column and the dataset.
    """
    for reward in rewards:
        _check_column_names(reward)
        required = [
            name
            for name, parameter in reward.parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in VARIADIC and name not in reward.arguments
        ]
        required += _columns_in_arguments(reward)
        for name in required:
            if name == "prompts" and "prompt" not in columns:
                raise ValueError(
                    f"The reward {reward.name!r} needs prompts, and {dataset} has no column 'prompt'; add it."
                )
            if name not in PROVIDED and name not in columns:
                raise ValueError(
                    f"The reward {reward.name!r} needs the column {name!r}, which {dataset} lacks; it has "
                    f"{', '.join(columns)}."
                )


def list_columns(reward: Reward) -> set[str]:
    """Return the columns that a reward names, as parameters or in `..._column` arguments."""
    return {*reward.parameters} - reward.fixed | {*_columns_in_arguments(reward)}


def check_groups(rewards: list[Reward], samples: int, num_generations: int) -> None:
    """Refuse groupwise rewards if a prompt's samples are spread over processes.

    Args:
        rewards: those that are trained on.
        samples: consecutive samples that one process rolls out (`BatchSizes.consecutive_samples`).
        num_generations: samples per group.

    Raises:
        ValueError: `samples` is not a whole number of groups.
    """
    for reward in rewards:
        if is_marked(reward.function, "is_groupwise") and samples % num_generations:
            raise ValueError(
                f"The reward {reward.name!r} needs whole groups on each process, but each rolls out {samples} samples "
                f"side by side, not a multiple of num_generations={num_generations}; make per_device_train_batch_size "
                "x gradient_accumulation_steps one, or set reward_processes, which brings groups together."
            )


def _entries(rewards: Any, setting: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each reward with its options."""
    if rewards is None:
        return
    if isinstance(rewards, dict):
        for reward, options in rewards.items():
            if _is_number(options):
                options = {"weight": options}
            if not isinstance(options, (dict, types.NoneType)):
                raise ValueError(
                    f"{setting}: {reward!r} has {options!r}; give its weight as a number, or a mapping of options."
                )
            yield reward, options or {}
    elif isinstance(rewards, (list, tuple)):
        for entry in rewards:
            if isinstance(entry, (list, tuple)):
                raise ValueError(f"{setting} has the list {entry!r} in a list; write `- name: {{option: value}}`.")
            yield from _entries(entry, setting)
    else:
        yield rewards, {}


def _load(reward: Any, options: dict[str, Any]) -> Reward:
    from . import get_reward, reward_name

    if isinstance(reward, Reward):
        return dataclasses.replace(reward, **options) if options else reward
    function = get_reward(reward)
    name = reward_name(function)
    if isinstance(reward, str):
        name = reward.rpartition(".")[2]
    arguments = {key: value for key, value in options.items() if key not in OPTIONS}
    known = _defaults(function)
    for key, value in arguments.items():
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *OPTIONS], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"The reward {name!r} has no argument {key!r}; it has {', '.join([*known, *OPTIONS])}.{hint}"
            )
        _check_type(name, function, key, value)
    kept = {"name": name, **{key: value for key, value in options.items() if key in OPTIONS}}
    if isinstance(function, type):
        _check_required(name, function, arguments)
        made = Reward(function(**arguments), made_with=arguments, **kept)
    else:
        made = Reward(function, arguments=arguments, **kept)
    if "frames" in kept and not made.reads_frames:
        raise ValueError(f"The reward {name!r} has frames={made.frames!r}, but gets whole videos; take it out.")
    return made


def _check_required(name: str, cls: type, arguments: dict[str, Any]) -> None:
    for key, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in VARIADIC and key not in arguments:
            raise ValueError(f"The reward {name!r} needs the argument {key!r}; write `{name}: {{{key}: ...}}`.")


def _is_built_in(function: Callable) -> bool:
    """Return whether a call runs code of this package, be it a function or a class's `__call__`."""
    code = function if inspect.isroutine(function) else type(function).__call__
    return str(getattr(code, "__module__", "")).startswith(f"{__package__}.")


def _defaults(function: Callable) -> dict[str, Any]:
    """Return what can be set: parameters with a default that do not come with the samples, or all of a class."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in VARIADIC
        and (isinstance(function, type) or (parameter.default is not parameter.empty and name not in PROVIDED))
    }


def _columns_in_arguments(reward: Reward) -> list[str]:
    given = {**_defaults(reward.function), **reward.arguments, **_attributes(reward.function)}
    return [value for name, value in given.items() if name.endswith("_column") and value is not None]


def _check_column_names(reward: Reward) -> None:
    for name in _columns_in_arguments(reward):
        if name in PROVIDED or name in reward.fixed:
            raise ValueError(
                f"The reward {reward.name!r} is to read the column {name!r}, but its keyword of that name has "
                "another meaning; rename the column."
            )


def _attributes(function: Callable) -> dict[str, Any]:
    """Return the `..._column` attributes of a reward that is an object."""
    return {key: value for key, value in getattr(function, "__dict__", {}).items() if key.endswith("_column")}


def _check_type(name: str, function: Callable, key: str, value: Any) -> None:
    """Refuse a value that the parameter's annotation excludes; an annotation that cannot be read excludes nothing."""
    try:
        hint = typing.get_type_hints(function.__init__ if isinstance(function, type) else function).get(key, Any)
    except (NameError, TypeError):
        return
    if not _fits(value, hint):
        expected = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ValueError(f"The reward {name!r} has {key}={value!r}; expected {expected}.")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (list, dict, tuple):
        return isinstance(value, (list, tuple) if origin in (list, tuple) else dict)
    if hint is float:
        return _is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, types.NoneType) else True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _written(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, dict, types.NoneType)) else repr(value)
