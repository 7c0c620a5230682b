"""Calls of the network outside of updates: in rollouts, evaluations and measurements."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .backend import DistributedBackend
from .failure import ProcessGroupMonitor


class NetworkPasses:
    """Runs a method outside an update, gathering sharded weights first."""

    def __init__(
        self,
        backend: DistributedBackend,
        monitor: ProcessGroupMonitor,
        networks: list[nn.Module],
        reference: Callable[[], nn.Module | None],
    ):
        self._backend, self._monitor, self._networks, self._reference = backend, monitor, networks, reference

    def __call__(self, method: Callable, *args: Any) -> Any:
        """Run `method` and return its result."""
        meets = self._monitor.propagate_errors() if self._backend.meets_in_passes else contextlib.nullcontext()
        with meets, self._backend.gather_for_passes(self._networks, self._reference()) as run:
            return run(method, *args)
