"""Errors that end a command with one line: `Refusal` of what the user gave, and those that explain a failed run."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType


class Refusal(Exception):
    """Raised for input that cannot be used; the message says what to change."""


@contextlib.contextmanager
def refusing(kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)) -> Iterator[None]:
    """Turn errors inside the context, by default those of checking or loading user input, into a `Refusal`."""
    try:
        yield
    except kinds as error:
        raise Refusal(str(error)) from error


def is_explained(error: Exception) -> bool:
    """Return whether the message of an error explains it, so that the library's own traceback adds nothing."""
    from ..algorithms.base import RatioError
    from ..data.columns import RowError
    from ..distributed.failure import RankError
    from ..policy.drivers import UnsupportedPipeline
    from ..rewards.call import RewardError
    from ..training.out_of_memory import NotEnoughMemoryError
    from ..training.update import NonFiniteError

    kinds = (NonFiniteError, NotEnoughMemoryError, RankError, RatioError, RewardError, RowError, UnsupportedPipeline)
    return isinstance(error, kinds)


def print_failure(error: Exception) -> None:
    """Print an error of a run on stderr, after the traceback of a reward that raised it, for its author."""
    from ..rewards.call import RewardError

    if (cause := error.__cause__) is not None and isinstance(error, RewardError):
        traceback.print_exception(cause.with_traceback(skip_own_frames(cause)))
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)


def skip_own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the leading frames of this library."""
    package = __name__.partition(".")[0]
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frames = frames.tb_next
    return frames
