"""Lock an output folder, so that only one run at a time uses it.

The operating system releases the lock when the process ends, however it ends: files that a killed run leaves behind
never block another run.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .manifest import ResumeError

LOCK, HOLDER = "_lock", "_lock.json"  # Trainer pushes nothing whose name begins with "_"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` inside this context, against other processes and other trainers in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ResumeError(
            f"{folder} is being written by another run{_holder(folder)}; wait until it has ended or end it, or choose "
            "another output_dir."
        ) from None
    holder = folder / HOLDER
    try:
        holder.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    """Describe which process holds the folder, if that is known."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the other run may be writing it just now
        held = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f" (process {held['process']} on {held['host']})"
    return ""
