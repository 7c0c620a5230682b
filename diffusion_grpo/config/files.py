"""Paths and text files that users write."""

import os
from pathlib import Path
from typing import Any


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8, with or without a byte order mark."""
    content = Path(path).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: this is not UTF-8; save the file with the encoding UTF-8.") from None


def expand_home(value: Any) -> Any:
    """Return a setting, or those in lists and mappings, with `~` at the start of a path as the home folder."""
    if isinstance(value, dict):
        return {name: expand_home(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value
