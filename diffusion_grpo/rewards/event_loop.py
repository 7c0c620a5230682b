"""One event loop for all async reward functions of a process.

Clients, locks and semaphores belong to the event loop in which they are first used. Reward functions often keep them
at module level, so all calls of the process are awaited in the same loop, which runs in its own thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import torch

_lock = threading.Lock()
_running: _LoopThread | None = None


class _LoopThread:
    """A thread that runs an event loop until the process ends."""

    def __init__(self):
        self.loop, self.process = asyncio.new_event_loop(), os.getpid()
        # each thread has its own current device, initially device 0
        self.device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        threading.Thread(target=self._run, name="async rewards", daemon=True).start()

    def _run(self) -> None:
        if self.device is not None:
            torch.accelerator.set_device_index(self.device)
        asyncio.set_event_loop(self.loop)
        torch.set_grad_enabled(False)
        self.loop.run_forever()


def run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Run a coroutine in the process's event loop; return a future of its result."""
    global _running
    with _lock:
        if _running is None or _running.process != os.getpid():  # threads do not survive a fork
            _running = _LoopThread()
    return asyncio.run_coroutine_threadsafe(coroutine, _running.loop)
