"""Read `reward_funcs`, from YAML or Python, into `Reward`s.

Mistakes (names, arguments and their types) are refused here, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

from ..config.names import suggest
from .builtin import get_reward
from .contract import OPTIONS, TAKEN, VARIADIC, Reward, is_number, reward_name, settable_parameters


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
        _check_required(name, function, arguments)
        made = Reward(function(**arguments), made_with=arguments, **kept)
    else:
        made = Reward(function, arguments=arguments, **kept)
    if "frames" in kept and not made.reads_frames:
        raise ValueError(f"The reward {name!r} has frames={made.frames!r}, but gets whole videos; leave frames out.")
    return made


def _check_required(name: str, cls: type, arguments: dict[str, Any]) -> None:
    for key, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in VARIADIC and key not in arguments:
            raise ValueError(f"The reward {name!r} needs the argument {key!r}; write `{name}: {{{key}: ...}}`.")


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
