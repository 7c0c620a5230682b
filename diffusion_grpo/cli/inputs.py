"""What a user typed goes in; a dataset, a checked name or a `Refusal` leaves.

A module of its own because every command refuses input in the same way: one sentence, before a model is loaded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


class Refusal(Exception):
    """Input that cannot be used; the message is one sentence that says what to change."""


def refusing(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls what checks or loads a user's input, and turns its errors into a Refusal."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def load_checked(source: str, split: str, name: str) -> "Dataset":
    """Prompts of a file, folder, Hub id or `tiny`; ValueError that names the setting where they cannot be used."""
    from ..data.prompts import check_dataset, load_prompts

    dataset = load_prompts(source, split=split)
    check_dataset(dataset, name=name)
    return dataset


def check_model_name(model: str) -> None:
    """Raises ValueError where `model` is meant as a local folder but is none of a pipeline."""
    folder = Path(model).expanduser()
    if model == "tiny":
        return
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(f"model: {model} holds no model_index.json, so it is not a folder of a diffusers pipeline.")
    if not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ValueError(f"model: there is no folder {model}, and a Hub id has the form `owner/name`.")


def hide_loading_bars(model: str) -> None:
    """The embedded model loads at once; bars for that would bury what matters."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
