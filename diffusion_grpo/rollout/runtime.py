"""What the objects of a run share: its processes, and what is measured and shown."""

from dataclasses import dataclass
from typing import Any

from ..distributed.backend import DistributedBackend
from ..distributed.failure import ProcessGroupMonitor


@dataclass(frozen=True)
class Runtime:
    """Processes and measurements of a run."""

    backend: DistributedBackend
    monitor: ProcessGroupMonitor
    metrics: Any
    progress: Any
