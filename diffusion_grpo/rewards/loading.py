"""Read `reward_funcs`, from YAML or Python, into `Reward`s; check what they need, and whether they have gradients.

To add a built-in reward, write its function or class and add an entry to `CATALOGUE`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from ..config.names import RENAMED_REWARDS, suggest
from . import pixels
from .contract import OPTIONS, TAKEN, Reward, is_marked, is_number, reward_name, settable_parameters
from .geneval import GenEval
from .models.aesthetic import Aesthetic, NsfwFilter
from .models.clip import ClipScore, ClipSimilarity, DinoSimilarity, PickScore
from .models.hpsv2 import HPSv2
from .models.hpsv3 import HPSv3
from .models.imagereward import ImageReward
from .models.videoalign import VideoAlign
from .ocr import INSTALL, ModelText, tesseract, text
from .server.remote import RemoteReward
from .server.vlm_judge import UnifiedReward, VlmJudge
from .similarity import LPIPS, psnr, ssim


class Entry(NamedTuple):
    """One built-in reward; `needs` leaves out the default model of its class."""

    reward: Callable
    measures: str
    values: str
    needs: str = ""


TARGET = "a column with images"

CATALOGUE: dict[str, Entry] = {
    "text": Entry(text, "the quoted text can be read in the image (rapidocr, PaddleOCR)", "0 to 1", INSTALL),
    "text_by_model": Entry(ModelText, "as text, read by a model of transformers", "0 to 1"),
    "color": Entry(pixels.color, "the writing has the colour that the prompt names", "0 to 1"),
    "tesseract": Entry(tesseract, "as text, read by Tesseract; meant for evaluation only", "0 to 1", INSTALL),
    "brightness": Entry(pixels.brightness, "mean luma", "0 to 1"),
    "jpeg_compressibility": Entry(pixels.jpeg_compressibility, "1 - bytes as a JPEG / bytes uncompressed", "0 to 1"),
    "jpeg_incompressibility": Entry(pixels.jpeg_incompressibility, "bytes as a JPEG / bytes uncompressed", "above 0"),
    "sharpness": Entry(pixels.sharpness, "variance of the Laplacian of the luma", "0 to 16"),
    "colorfulness": Entry(pixels.colorfulness, "Hasler and Suesstrunk's measure", "0 up"),
    "ssim": Entry(ssim, "structural similarity to another image", "-1 to 1", TARGET),
    "psnr": Entry(psnr, "peak signal-to-noise ratio to another image, in dB", "0 to 100", TARGET),
    "flicker": Entry(pixels.flicker, "videos: 1 - mean change from frame to frame", "0 to 1"),
    "smoothness": Entry(
        pixels.smoothness, "videos: 1 - mean distance of a frame to the mean of its neighbours", "0 to 1"
    ),
    "motion": Entry(pixels.motion, "videos: mean displacement of blocks, percent of the longer side", "0 to 9"),
    "clip_score": Entry(ClipScore, "100 max(cos, 0) of image and prompt by CLIP", "0 to 100"),
    "pickscore": Entry(PickScore, "preferred by users of Pick-a-Pic", "about 15 to 25"),
    "hpsv2": Entry(HPSv2, "preferred by people, Human Preference Score v2.1", "-1 to 1, about 0.2 to 0.35"),
    "imagereward": Entry(ImageReward, "preferred by people, mean 0, std 1", "about -2 to 2"),
    "aesthetic": Entry(Aesthetic, "LAION's aesthetic score", "about 1 to 10"),
    "lpips": Entry(LPIPS, "1 - LPIPS distance to another image", "up to 1", f"{TARGET}; AlexNet or VGG-16"),
    "dino_similarity": Entry(DinoSimilarity, "cosine to another image by DINO", "-1 to 1", TARGET),
    "clip_similarity": Entry(ClipSimilarity, "cosine to another image by CLIP", "-1 to 1", TARGET),
    "nsfw_filter": Entry(NsfwFilter, "1 - probability that it is not safe to show", "0 to 1"),
    "geneval": Entry(
        GenEval, "objects, counts, colours and positions are as asked", "0 to 1", "a detector, GenEval's columns"
    ),
    "hpsv3": Entry(HPSv3, "preferred by people, Human Preference Score v3", "about 0 to 15", "16 GB of memory"),
    "videoalign": Entry(VideoAlign, "videos: how well they look, move, fit the prompt, or all", "about -3 to 3"),
    "vlm_judge": Entry(
        VlmJudge, "what a vision-language model answers to a question", "as asked", "a server with such a model"
    ),
    "unified_reward": Entry(
        UnifiedReward, "UnifiedReward's score", "1 to 5, videos 1 to 10", "a server with its model"
    ),
    "remote": Entry(
        RemoteReward, "what a reward server answers", "as the reward there", "`diffusion-grpo rewards serve`"
    ),
}
REWARDS: dict[str, Callable] = {name: entry.reward for name, entry in CATALOGUE.items()}


def get_reward(reward: str | Callable) -> Callable:
    """Return the reward of a built-in name or a dotted path (`"my_package.rewards.sharpness"`), or a callable as it
    is.

    Args:
        reward: the name, path or callable.

    Raises:
        ValueError: the name is unknown (the message lists the known ones and suggests the nearest), or the path does
            not lead to a callable.

    Examples:
        >>> get_reward("brightness")(images).__class__.__name__
        'list'
    """
    if callable(reward):
        return reward
    if reward in REWARDS:
        return REWARDS[reward]
    known = ", ".join(REWARDS)
    module_name, _, attribute = str(reward).rpartition(".")
    if not module_name:
        raise ValueError(
            f"Unknown reward {reward!r}: use one of {known}, a dotted path to a function, or a callable."
            f"{suggest(RENAMED_REWARDS.get(str(reward), reward), REWARDS)}"
        )
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward {reward!r} was not found ({error}); name a function that Python can import, such as "
            "`my_rewards.score` of my_rewards.py in the working directory."
        ) from error
    if not callable(function):
        raise ValueError(f"The reward {reward!r} is a {type(function).__name__}, which cannot be called.")
    return function


def load_rewards(rewards: Any, setting: str = "reward_funcs") -> list[Reward]:
    """Read rewards in any form that a user may write.

    Args:
        rewards: a callable, a built-in name, a dotted path, or a `Reward`; a list of these; a mapping from these to a
            weight, or to a mapping of options and arguments; or a list with such mappings in it:
            `[{"text": {"weight": 0.6, "target_column": "word"}}, "color"]`. Options are those of `Reward`; arguments
            are the parameters with a default in the function's signature, or all in the constructor of a class.
        setting: name of the setting, for messages.

    Returns:
        One `Reward` each, in order.

    Raises:
        ValueError: an unknown name, option or argument, a value of the wrong type, two rewards with the same name, a
            name that cannot be used in file names, or one that is a column of the tables of samples.

    Examples:
        >>> [(reward.name, reward.weight) for reward in load_rewards({"text": 0.6, "color": 0.4})]
        [('text', 0.6), ('color', 0.4)]
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


def _entries(rewards: Any, setting: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each reward with its options."""
    if rewards is None:
        return
    if isinstance(rewards, dict):
        for reward, options in rewards.items():
            if is_number(options):
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
    if isinstance(reward, Reward):
        return dataclasses.replace(reward, **options) if options else reward
    function = get_reward(reward)
    name = reward_name(function)
    if isinstance(reward, str):
        name = reward.rpartition(".")[2]
    arguments = {key: value for key, value in options.items() if key not in OPTIONS}
    known = settable_parameters(function)
    for key, value in arguments.items():
        if key not in known:
            raise ValueError(
                f"The reward {name!r} has no argument {key!r}; it has {', '.join([*known, *OPTIONS])}."
                f"{suggest(key, [*known, *OPTIONS])}"
            )
        _check_type(name, function, key, value)
    kept = {"name": name, **{key: value for key, value in options.items() if key in OPTIONS}}
    if isinstance(function, type):
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"The reward {name!r} is {error}.") from error
        made = Reward(function(**arguments), made_with=arguments, **kept)
    else:
        made = Reward(function, arguments=arguments, **kept)
    if "frames" in kept and not made.reads_frames:
        raise ValueError(f"The reward {name!r} has frames={made.frames!r}, but gets whole videos; leave frames out.")
    return made


def _check_type(name: str, function: Callable, key: str, value: Any) -> None:
    """Refuse a value that the parameter's annotation excludes; an annotation that cannot be read excludes nothing."""
    try:
        hint = typing.get_type_hints(function.__init__ if isinstance(function, type) else function).get(key, Any)  # type: ignore[misc]
    except (NameError, TypeError):
        return
    if not _fits(value, hint):
        expected = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ValueError(f"The reward {name!r} has {key}={value!r}; expected {expected}.")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (list, dict, tuple):
        return isinstance(value, (list, tuple) if origin in (list, tuple) else dict)
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, types.NoneType) else True


def check_needs(rewards: Iterable[Reward]) -> None:
    """Refuse rewards that will not be able to score: a package, a file or a server is missing.

    If a reward's function or object has an attribute `check_needs`, it is called with the reward's arguments and
    raises OSError, ImportError or ValueError.

    Args:
        rewards: from [`~diffusion_grpo.rewards.loading.load_rewards`].

    Raises:
        ValueError: something is missing that a reward needs; the message names the first such reward.

    Examples:
        >>> check_needs(load_rewards(["brightness", "color"]))  # these need nothing
    """
    for reward in rewards:
        function, arguments = reward.function, reward.arguments
        while isinstance(function, functools.partial):
            arguments, function = {**function.keywords, **arguments}, function.func
        try:
            getattr(function, "check_needs", dict)(**arguments)
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(f"The reward {reward.name!r} cannot score: {error}") from error


def check_gradients(rewards: list[Reward], weights: list[float]) -> None:
    """Refuse rewards that cannot be differentiated, unless they have no weight."""
    for reward, weight in zip(rewards, weights, strict=True):
        if weight and (not is_marked(reward.function, "has_gradient") or reward.threshold is not None):
            built_in = ", ".join(name for name, function in REWARDS.items() if is_marked(function, "has_gradient"))
            raise ValueError(
                f"loss_type='draft' follows the gradient of rewards, and {reward.name!r} has none; use {built_in} or "
                "a function marked @differentiable, all without a threshold, or use loss_type='grpo'."
            )
