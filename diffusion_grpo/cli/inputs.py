"""Refuse user input that cannot be used, with a message of one sentence."""

import contextlib
from collections.abc import Iterator


class Refusal(Exception):
    """Raised for input of `train` that cannot be used. The message says what to change."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn errors of checking or loading user input inside the context into a `Refusal`."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def hide_loading_bars(model: str) -> None:
    """Hide the loading bars for the embedded model, which loads at once."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
