"""Check names: of settings that a user mistyped, and of rewards and datasets, which go into file names and metrics."""

import difflib
from typing import Any

RENAMED = {"warmup_ratio": "write it as `warmup_steps`, below 1 a share of all updates"}
LONGEST = 150  # bytes; a file name has at most 255 and holds more than this name


def check_name(name: Any, what: str, remedy: str) -> None:
    """Refuse a name that cannot be part of a file name and of a metric.

    Args:
        name: the name.
        what: what has this name, for the message.
        remedy: what to change, for the message.

    Raises:
        ValueError: the name is empty or too long, or holds a path separator or characters that cannot be printed.
    """
    wrong = None
    if not isinstance(name, str):
        wrong = f"is of type {type(name).__name__}"
    elif not name.strip(". "):
        wrong = "consists only of dots and spaces" if name else "is empty"
    elif "/" in name or "\\" in name:
        wrong = f"must not contain {'/' if '/' in name else chr(92)!r}"
    elif not name.isprintable():
        wrong = "contains a line break or another unprintable character"
    elif len(name.encode()) > LONGEST:
        wrong = f"takes {len(name.encode())} bytes, more than {LONGEST}"
    if wrong is not None:
        shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:60]}..."
        raise ValueError(f"{what} {shown} {wrong}, but it is used in file names and metrics; {remedy}.")


def refuse_unknown(values: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for the first key that is not known, and name the nearest known one."""
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown setting `{key}`; {RENAMED.get(key, f'the nearest known one is `{nearest}`')}.")
