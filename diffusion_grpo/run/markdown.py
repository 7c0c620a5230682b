"""Escape arbitrary text (names, prompts, paths) for display in one line of Markdown."""

import re

SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])")


def escape(text: str) -> str:
    """Escape `text` so that a line, table cell or heading of Markdown shows it literally.

    Example:
        >>> escape("a|b <i>")
        'a\\\\|b \\\\<i\\\\>'
    """
    return SPECIAL.sub(r"\\\g<0>", _one_line(text))


def code(text: str) -> str:
    """Format `text` as a code span, fenced by more backquotes than it contains in a row."""
    text = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _one_line(text: str) -> str:
    """Replace line breaks and other unprintable characters by a space."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
