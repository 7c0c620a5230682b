"""Check and load user input, and refuse it with a message of one sentence before a model is loaded."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


class Refusal(Exception):
    """Raised for input that cannot be used. The message is one line that says what to change."""


def call_or_refuse(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function that checks or loads user input, and turn its errors into a `Refusal`."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def load_checked(source: str | list[str], split: str, name: str, prompt_column: str | None = None) -> "Dataset":
    """Load and check the prompts of a file, a folder, a Hub id or `tiny`, or make a dataset of given texts."""
    from datasets import Dataset

    from ..data.prompts import check_dataset, load_prompts

    texts = isinstance(source, list)
    dataset = Dataset.from_dict({"prompt": source}) if texts else load_prompts(source, split, prompt_column)
    check_dataset(dataset, name=name)
    return dataset


def hide_loading_bars(model: str) -> None:
    """Hide the loading bars for the embedded model, which loads at once."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
