"""Check and load user input, and refuse it with a message of one sentence before a model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


class Refusal(Exception):
    """Raised for input that cannot be used. The message is one line that says what to change."""


def call_or_refuse(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function that checks or loads user input, and turn its errors into a `Refusal`.

    Raises:
        Refusal: the function raised `ValueError`, `OSError` or `ImportError`.
    """
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def load_checked(source: str, split: str, name: str) -> "Dataset":
    """Load and check the prompts of a file, a folder, a Hub id or `tiny`.

    Raises:
        ValueError: the prompts cannot be used; the message names the setting `name`.
    """
    from ..data.prompts import check_dataset, load_prompts

    dataset = load_prompts(source, split=split)
    check_dataset(dataset, name=name)
    return dataset


def check_model_name(model: str) -> None:
    """Check that `model`, if it is a local folder, holds a pipeline.

    Raises:
        ValueError: `model` is a folder that does not exist, a file, or a folder without a pipeline.
    """
    folder = Path(model).expanduser()
    if model == "tiny":
        return
    if folder.is_file():
        raise ValueError(f"model: {model} is a file; give the folder of a diffusers pipeline, a Hub id, or `tiny`.")
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(
            f"model: {model} contains no model_index.json, so it is not the folder of a diffusers pipeline; give such "
            "a folder, a Hub id, or `tiny`."
        )
    if not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ValueError(
            f"model: there is no folder {model}, and a Hub id has the form `owner/name`; give an existing folder or a "
            "Hub id."
        )


def hide_loading_bars(model: str) -> None:
    """Hide the loading bars for the embedded model, which loads at once."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
