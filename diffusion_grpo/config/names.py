"""Names that a user gives to rewards and datasets, and that become part of file names and metrics."""

from typing import Any

LONGEST = 150  # bytes; a file's name has 255, and more than this name goes into it


def check_name(name: Any, what: str, remedy: str) -> None:
    """Refuse a name that cannot be part of a file's name, of a metric's name and of one line.

    Args:
        what: whose name it is, for the message.
        remedy: what to change, for the message.

    Raises:
        ValueError: it is empty, holds separators of folders or what cannot be printed, or is too long.
    """
    wrong = None
    if not isinstance(name, str):
        wrong = f"is of type {type(name).__name__}"
    elif not name.strip(". "):
        wrong = "holds nothing but dots and blanks" if name else "is empty"
    elif "/" in name or "\\" in name:
        wrong = f"may not hold {'/' if '/' in name else chr(92)!r}"
    elif not name.isprintable():
        wrong = "holds a line break or another character that cannot be printed"
    elif len(name.encode()) > LONGEST:
        wrong = f"takes {len(name.encode())} bytes, more than {LONGEST}"
    if wrong is not None:
        shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:60]}..."
        raise ValueError(f"{what} {shown} {wrong}, but it goes into file names and metrics; {remedy}.")
