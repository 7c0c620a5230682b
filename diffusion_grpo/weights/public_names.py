"""Names and settings for publication, without folders of this machine and without secrets."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

# names of secrets
SECRET = re.compile(r"(token|secret|password|authorization|(api|access|secret)[_-]?key|credentials?)$", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/\s]*@")  # a name or a password in a URL
URL = re.compile(r"://\S+")
QUERY_VALUE = re.compile(r"([?&;#][^=?&;#\s]+=)[^&;#\s]+")
# Characters forbidden in Windows file names tell a path from a regular expression such as `A:\s*(\d)`.
WINDOWS_PATH = re.compile(r"""([A-Za-z]:[\\/]|\\\\[\w.-]+\\[\w.$' -]+\\)[^<>:"|?*\n]+""")
HOMES = ("home", "Users")  # home folders, also on another machine


def public_model_name(model: str) -> str:
    """Return a model's name for publication: a Hub id as it is, or the last part of a local folder's path."""
    path = Path(model).expanduser()
    if not (path.is_absolute() or path.exists()):
        return strip_folders(model)  # a Hub id, or a path on another machine
    parts = path.resolve().parts
    cached = [part.removeprefix("models--") for part in parts if part.startswith("models--")]  # the Hub's cache
    return cached[-1].replace("--", "/", 1) if cached else parts[-1]


def public_source_name(source: str, model: str | None) -> str:
    """Return the public name of the model that a network was loaded from."""
    path = Path(source)
    is_local = path.is_absolute() or path.exists()
    if model and is_local and path.resolve().is_relative_to(Path(model).expanduser().resolve()):
        return public_model_name(model)
    return public_model_name(source)


def strip_folders(value: Any) -> Any:
    """Reduce absolute paths in settings, also in JSON, to their last part, for publication; other text stays."""
    if isinstance(value, dict):
        return {name: strip_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [strip_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    path = _find_path(value)
    return path.name if path is not None else _strip_json(value, strip_folders)


def _find_path(text: str) -> PurePath | None:
    """Return a text as a path if it is an absolute path within a folder; None for other text, such as a prompt."""
    if WINDOWS_PATH.fullmatch(text):
        return PureWindowsPath(text)
    path = PurePosixPath(text)
    if not path.is_absolute() or len(path.parts) < 3 or "\n" in text:
        return None
    # text with spaces may be prose, unless it starts with an existing folder
    first = path.parts[1]
    is_path = not re.search(r"\s", text) or first in HOMES or os.path.isdir(path.anchor + first)
    return path if is_path else None


def strip_secrets(value: Any) -> Any:
    """Remove secrets: entries of dictionaries, also in JSON, whose name says so, and the secret parts of URLs."""
    if isinstance(value, dict):
        return {name: strip_secrets(item) for name, item in value.items() if not SECRET.search(str(name))}
    if isinstance(value, list):
        return [strip_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    stripped = _strip_json(value, strip_secrets)
    if stripped != value:
        return stripped
    return URL.sub(lambda url: QUERY_VALUE.sub(r"\1...", url[0]), USER_INFO.sub("", value))


def _strip_json(text: str, strip: Callable[[Any], Any]) -> str:
    """Apply `strip` to a text that is a JSON object or list; return other text unchanged."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    stripped = strip(value)
    return text if stripped == value else json.dumps(stripped, ensure_ascii=False)
