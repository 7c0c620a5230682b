"""Show text that others chose (names, prompts, paths) literally and in one line of Markdown."""

import re

SPECIAL = re.compile(r"([\\`*\[\]<>|#~$&!])|(?<![A-Za-z0-9])(_)|(_)(?![A-Za-z0-9])")


def escape(text: str) -> str:
    """Write `text` so that it stands for itself in a line, a table cell or a heading of Markdown.

    Example:
        >>> escape("a|b <i>")
        'a\\\\|b \\\\<i\\\\>'
    """
    return SPECIAL.sub(r"\\\g<0>", _one_line(text))


def code(text: str) -> str:
    """Write `text` as a span of code, between more backquotes than it holds in a row."""
    text = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _one_line(text: str) -> str:
    """Replace line breaks and whatever else cannot be printed by a blank."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
