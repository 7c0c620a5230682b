"""`Refusal`: an error in what the user gave, which a command prints as one line, without a traceback."""

import contextlib
from collections.abc import Iterator


class Refusal(Exception):
    """Raised for input that cannot be used; the message says what to change."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn errors of checking or loading user input inside the context into a `Refusal`."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error
