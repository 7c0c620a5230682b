"""Contract of a reward in a run: a callable with its name, weight and options, its marks, and its requirements."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import types
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar

from torch import nn

from ..config.names import check_name

PROVIDED: tuple[str, ...] = ("prompts", "completions", "images", "videos", "latents", "fps", "sampling_rate")
PROVIDED += ("trainer_state", "log_metric", "log_extra")
# columns of the tables of samples, which a reward of that name would overwrite
TAKEN = ("prompt", "step", "seed", "reward", "advantage", "value", "kl", "image", "file", "dataset", "row", "input")
# metrics of a run (docs/metrics.md), which a reward's number logged under the same name would change or replace
METRICS: tuple[str, ...] = ("reward", "reward_std", "reward_std_error", "loss", "grad_norm", "learning_rate", "epoch")
METRICS += ("step", "kl", "diversity", "denoising_error", "samples_per_second", "runtime", "frac_reward_zero_std")
METRICS += ("frac_advantage_zero", "frac_advantage_clipped")
FAMILIES: tuple[str, ...] = ("rewards", "watch", "rollouts", "diversity", "spread", "time", "memory", "loss", "kl")
FAMILIES += ("ratio", "clip_ratio", "grad_size", "velocity", "ema", "old", "prediction", "dgpo", "dpo", "value")
FAMILIES += ("sampling", "completions", "fdfo")
Mark = Literal[
    "is_groupwise", "is_batchwise", "takes_tensors", "takes_latents", "takes_pixels", "has_gradient", "opens_images",
    "reads_text",
]  # fmt: skip
Function = TypeVar("Function", bound=Callable)
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def groupwise(function: Function) -> Function:
    """Mark a reward to be called once per prompt, with all its samples (e.g. a pairwise preference).

    Args:
        function: the reward, which is returned.

    Examples:
        >>> @groupwise
        ... def brightest(images, **columns):
        ...     means = [image.resize((1, 1)).convert("L").getpixel((0, 0)) for image in images]
        ...     return [float(mean == max(means)) for mean in means]
        >>> score([brightest], images=images, prompts=["a", "a"]).shape
        torch.Size([2, 1])
    """
    return _mark(function, "is_groupwise")


def takes_tensors(function: Function) -> Function:
    """Mark a reward to get the samples as one tensor, `(batch, frames, 3, height, width)` float32 in [0, 1].

    The tensor is on the CPU and takes the place of the PIL images, under the names `images`, `videos` and
    `completions`. An image is a video of one frame.

    Args:
        function: the reward, which is returned.

    Examples:
        >>> @takes_tensors
        ... def mean(images, **columns):
        ...     return images.mean(dim=(1, 2, 3, 4)).tolist()
        >>> score([mean], images=images, prompts=["a", "b"]).tolist()
        [[0.0], [1.0]]
    """
    return _mark(function, "takes_tensors")


def takes_latents(function: Function) -> Function:
    """Mark a reward to get `latents` (also as `completions`) in place of images: `(batch, ...)` float32.

    These are the latents after the last denoising step, as the pipeline returns them with `output_type="latent"`, on
    the device of the rollout. If no reward needs pixels, nothing is decoded.

    Args:
        function: the reward, which is returned.

    Examples:
        >>> @takes_latents
        ... def small(latents, **columns):
        ...     return (-latents.square().flatten(1).mean(1)).tolist()
        >>> score([small], latents=list(torch.ones(2, 4, 8, 8)), prompts=["a", "b"]).tolist()
        [[-1.0], [-1.0]]
    """
    return _mark(function, "takes_latents")


def differentiable(function: Function) -> Function:
    """Mark a reward that `loss_type: draft` can differentiate: it gets a tensor of images.

    The tensor, `images`, is `(batch, 3, height, width)` float32 in [0, 1], and the reward must return a tensor
    `(batch,)`. In updates, `images` is on the device of the run and has a gradient. For scores of rollouts and
    evaluations, it is on the CPU and has none. A video's frames are images, of which the value is the mean.

    Args:
        function: the reward, which is returned.

    Examples:
        >>> @differentiable
        ... def blue(images, **columns):
        ...     return images[:, 2].mean((1, 2)) - images.mean((1, 2, 3))
        >>> score([blue], images=images, prompts=["a", "b"]).tolist()
        [[0.0], [0.0]]
    """
    return _mark(_mark(function, "takes_pixels"), "has_gradient")


def has_gradient(function: Function) -> Function:
    """Mark a built-in reward that can be differentiated: it takes such a tensor in place of PIL images, too."""
    return _mark(function, "has_gradient")


def batchwise(function: Function) -> Function:
    """Mark a reward to be called once per rollout, after it, with all samples that this process scores.

    This is for rewards that compare prompts with each other. Other rewards may be called with groups as they finish.

    Args:
        function: the reward, which is returned.

    Examples:
        >>> @batchwise
        ... def rank(images, **columns):
        ...     means = [image.resize((1, 1)).convert("L").getpixel((0, 0)) for image in images]
        ...     return [sum(other < mean for other in means) / len(means) for mean in means]
        >>> score([rank], images=images, prompts=["a", "b"]).tolist()
        [[0.0], [0.5]]
    """
    return _mark(function, "is_batchwise")


def opens_images(function: Function) -> Function:
    """Mark a reward whose `..._column` arguments name columns of images, which it opens if they are paths."""
    # if it is served, `remote` sends the images and the server accepts no paths
    return _mark(function, "opens_images")


def reads_text(function: Function) -> Function:
    """Mark a reward whose `..._column` arguments name columns of text; a dataset with other values is refused."""
    # whole numbers are accepted, because each is written in one way only
    return _mark(function, "reads_text")


def _mark(function: Function, mark: Mark) -> Function:
    setattr(function, mark, True)
    return function


def is_marked(function: Callable, mark: Mark) -> bool:
    """Return whether a function, the function in a `partial`, or an object or its class carries the mark."""
    if isinstance(function, functools.partial):
        return is_marked(function.func, mark)
    return bool(getattr(function, mark, False) or getattr(_entry_point(function), mark, False))


def _entry_point(function: Callable) -> Callable:
    """Return what a call runs: a function itself, a network's `forward`, or an object's `__call__`."""
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    if isinstance(function, nn.Module) and type(function).__call__ is nn.Module.__call__:
        return function.forward
    return function.__call__  # type: ignore[operator]


def _read_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """Return the parameters that a call takes; those of a network are its `forward`'s."""
    if isinstance(function, functools.partial):
        function = functools.partial(_entry_point(function.func), *function.args, **function.keywords)
        return dict(inspect.signature(function).parameters)
    return dict(inspect.signature(_entry_point(function)).parameters)


def needs(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Mark a reward function with the check that `check_needs` is to call for it.

    Args:
        check: takes the reward's arguments by keyword; raises OSError, ImportError or ValueError if something is
            missing.

    Returns:
        The decorator.

    Examples:
        >>> from pathlib import Path
        >>> def weights_are_there(weights="scorer.pt", **others):
        ...     if not Path(weights).is_file():
        ...         raise FileNotFoundError(f"there is no {weights}; set weights to the scorer's file.")
        >>> @needs(weights_are_there)
        ... def scorer(images, weights="scorer.pt", **columns): ...
        >>> check_needs(load_rewards([scorer]))
        Traceback (most recent call last):
        ValueError: ...
    """

    def mark(function: Callable) -> Callable:
        setattr(function, "check_needs", check)  # noqa: B010 (a plain callable has no such attribute)
        return function

    return mark


def check_package(package: str, command: str) -> None:
    """Raise ImportError, with the command that installs it, if a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"the package {package} is not installed; install it with `{command}`.")


def is_run_metric(name: str) -> bool:
    """Return whether a metric is one that a run logs itself, or is named like one."""
    family, slash, _ = name.partition("/")
    return name in METRICS or name.startswith("eval_") or bool(slash) and family in FAMILIES


@dataclasses.dataclass(frozen=True)
class Reward:
    """One reward as a run uses it. The value r that it returns for a sample becomes (r - mean) / std, is then clipped,
    and then compared with the threshold; the result is used and logged.

    Attributes:
        function: the callable that computes the reward.
        name: the reward's name in metrics and files.
        arguments: keyword arguments of every call, in addition to the samples and the dataset's columns.
        weight: its weight in the sum over rewards; None if it was not given.
        mean, std: fixed numbers for normalisation, such as those published with a scorer's weights; std is above 0.
        clip: range [low, high] to which the value is clipped.
        threshold: a pass mark: the value becomes 1 if it is at least this, else 0.
        frames: number of frames of a video that a function asking for `images` gets, evenly spaced and including the
            first and the last (1 is the first), or "all". The value is the mean over the frames.
        made_with: the arguments with which `function` was made, if a class was named.

    Raises:
        ValueError: an option is out of range, or the name cannot be used in file names and metrics.

    Examples:
        >>> half = Reward(lambda images, **columns: [3.0, 9.0], "half", std=2.0, clip=[0, 4])
        >>> score([half], images=images, prompts=["a", "b"]).tolist()
        [[1.5], [4.0]]
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
            if value is not None and not (is_number(value) and math.isfinite(value)):
                self._refuse(option, "give a finite number")
        if self.std <= 0:
            self._refuse("std", "the score is divided by it, so it must be above 0")
        numbers = [*map(is_number, self.clip)] if isinstance(self.clip, (list, tuple)) else []
        if self.clip is not None and not (numbers == [True, True] and self.clip[0] < self.clip[1]):
            self._refuse("clip", "write two numbers, [low, high]")
        is_count = isinstance(self.frames, int) and not isinstance(self.frames, bool) and self.frames >= 1
        if not is_count and self.frames != "all":
            self._refuse("frames", "give 1 or more, or 'all'")

    def _refuse(self, option: str, advice: str) -> NoReturn:
        raise ValueError(f"The reward {self.name!r} has {option}={getattr(self, option)!r}; {advice}.")

    def __call__(self, /, **keywords: Any) -> Any:
        """Call the function with its arguments and return its answer, without applying the options."""
        return self.function(**self.arguments, **keywords)

    def offload(self) -> None:
        """Keep the function's network in CPU memory between calls, if it has a setting `offload` for that."""
        if isinstance(getattr(self.function, "offload", None), bool):
            setattr(self.function, "offload", True)  # noqa: B010 (a function has no such attribute)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters in the function's signature."""
        return _read_parameters(self.function)

    @property
    def fixed(self) -> set[str]:
        """Names of parameters that only the settings determine: a dataset column of that name is not passed."""
        fixed, function = set(self.arguments), self.function
        while isinstance(function, functools.partial):
            fixed, function = fixed | set(function.keywords), function.func
        # such as `scene` of `text`; a default in a user's function stands for a column that may be missing
        if str(getattr(_entry_point(function), "__module__", "")).startswith(f"{__package__}."):
            fixed |= {name for name, parameter in self.parameters.items() if parameter.default is not parameter.empty}
        return fixed

    @property
    def reads_frames(self) -> bool:
        """Whether the function asks for images, and so gets single frames of a video."""
        marks: tuple[Mark, ...] = ("takes_tensors", "takes_latents")
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
        """Return arguments and changed options, without tokens, as recorded in `run.json`."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in OPTIONS[2:] and getattr(self, field.name) != field.default
        }
        arguments = {**self.arguments, **self.made_with}
        plain = (str, int, float, bool, list, dict, types.NoneType)
        arguments = {key: value if isinstance(value, plain) else repr(value) for key, value in arguments.items()}
        return {key: value for key, value in arguments.items() if key != "token"} | changed


OPTIONS = ("name", "weight", "mean", "std", "clip", "threshold", "frames")


def takes_only_latents(reward: Reward) -> bool:
    """Return whether a reward takes only latents and needs no pixels."""
    return is_marked(reward.function, "takes_latents")


def reward_name(reward: Callable) -> str:
    """Return a reward's name in metrics and files: a function's `__name__`, or the name of an object's class."""
    if isinstance(reward, Reward):
        return reward.name
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    return getattr(reward, "__name__", type(reward).__name__)


def reward_weights(rewards: list[Reward], setting: list[float] | None) -> list[float]:
    """Return one weight per reward: those written with the rewards, or the setting `reward_weights`, or 1 each."""
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
    """Refuse an evaluation-only reward with the name of a different reward, whose metrics it would overwrite."""
    for evaluated in eval_rewards:
        for reward in rewards:
            if evaluated.name == reward.name and evaluated != dataclasses.replace(reward, weight=evaluated.weight):
                raise ValueError(
                    f"eval_reward_funcs and reward_funcs have different rewards called {evaluated.name!r}; give one "
                    "of them another `name`."
                )


def check_columns(
    rewards: list[Reward], columns: list[str], dataset: str, types: dict[str, str] | None = None
) -> None:
    """Refuse a dataset without the columns that the rewards need, or with texts of another type."""
    for reward in rewards:
        named, fixed = _columns_in_arguments(reward), reward.fixed
        required = [
            name
            for name, parameter in reward.parameters.items()
            if (parameter.default is parameter.empty or name == "prompt")  # its default would always be used
            and parameter.kind not in VARIADIC
            and name not in fixed
        ]
        for name in [*required, *named, *sorted(getattr(reward.function, "needed_columns", ()))]:
            problem = None
            if name in named and (name in PROVIDED or name in fixed):
                problem = (
                    f"should read the column {name!r}, but its argument of that name means something else; rename it"
                )
            elif name == "prompts" and "prompt" not in columns:
                problem = f"needs prompts, and {dataset} has no column 'prompt'; add it"
            elif name == "prompt" or name not in columns and f"{name}s" in PROVIDED:
                problem = (
                    f"asks for {name!r}, but is called once for many samples; take a list, '{name}s', and return one"
                )
            elif name not in PROVIDED and name not in columns:
                problem = f"needs the column {name!r}, which {dataset} lacks; it has {', '.join(columns)}"
            elif name in named and is_marked(reward.function, "reads_text"):
                kind = (types or {}).get(name, "string")
                if not any(part in kind for part in ("string", "int", "null")):
                    problem = f"reads text in the column {name!r}, which holds {kind} in {dataset}; cast it to string"
            if problem is not None:
                raise ValueError(f"The reward {reward.name!r} {problem}.")


def list_columns(reward: Reward) -> set[str]:
    """Return the columns that a reward names: as parameters, in `..._column` arguments or as `needed_columns`."""
    named = {*_columns_in_arguments(reward), *getattr(reward.function, "needed_columns", ())}
    return {*reward.parameters} - reward.fixed | named


def list_image_columns(reward: Reward) -> list[str]:
    """Return the columns in which a reward expects images, decoded or as paths; see `opens_images`."""
    return sorted({*_columns_in_arguments(reward)}) if is_marked(reward.function, "opens_images") else []


def check_groups(rewards: list[Reward], samples: int, num_generations: int) -> None:
    """Refuse groupwise rewards if a prompt's samples are spread over processes."""
    for reward in rewards:
        if is_marked(reward.function, "is_groupwise") and samples % num_generations:
            raise ValueError(
                f"The reward {reward.name!r} needs whole groups on each process, but each rolls out {samples} samples "
                f"side by side, not a multiple of num_generations={num_generations}; make per_device_train_batch_size "
                "x gradient_accumulation_steps one."
            )


def settable_parameters(function: Callable) -> dict[str, Any]:
    """Return the parameters that can be set: those with a default that do not come with samples, or all of a class."""
    return {
        name: parameter.default
        for name, parameter in _read_parameters(function).items()
        if parameter.kind not in VARIADIC
        and (isinstance(function, type) or (parameter.default is not parameter.empty and name not in PROVIDED))
    }


def _columns_in_arguments(reward: Reward) -> list[str]:
    """Return the columns that `..._column` arguments of a function or attributes of an object name."""
    attributes = getattr(reward.function, "__dict__", {})
    arguments = {**settable_parameters(reward.function), **reward.arguments, **attributes}
    return [value for name, value in arguments.items() if name.endswith("_column") and value is not None]


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float; a bool counts as neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
