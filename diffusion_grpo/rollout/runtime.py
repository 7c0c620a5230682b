"""What the objects of a run share: its processes, what is measured until it is logged, and how far an update is."""

import contextlib
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..distributed.backend import DistributedBackend
from ..distributed.collectives import gather_means
from ..distributed.failure import ProcessGroupMonitor

logger = logging.getLogger(__name__)
NOTICE = 60.0  # seconds without output after which a long update gives notice of its progress
TOTALS = ("time/rollout", "time/reward", "time/update")  # seconds per update of the slowest process
# metrics that are logged as the largest or smallest value since the last log, instead of the mean
LARGEST = (
    "ratio/max_error",
    "prediction/max_error",
    "ratio/max",
    "sampling/sampling_logp_difference/max",
    "spread/reward_max",
    "spread/advantage_max",
    "memory/peak_gib",
    *TOTALS,
)
SMALLEST = ("ratio/min", "spread/reward_min", "spread/advantage_min", "samples_per_second")


class Metrics:
    """Collection of values by name, until they are logged."""

    def __init__(self):
        self.reset()

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one value, unless its weight is 0."""
        if weight:
            self.values[name].append(value)
            self.weights[name].append(weight)
            self._seconds += value if name in TOTALS else 0.0

    def add_all(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add(name, value)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds that are spent inside this context."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def start(self, step: int) -> None:
        """Start counting updates at `step`, unless counting has begun already."""
        if self._logged_step is None:
            self._logged_step = step

    def reset(self) -> None:
        """Forget everything, for a new run."""
        self.values: dict[str, list[float]] = defaultdict(list)
        self.weights: dict[str, list[float]] = defaultdict(list)
        self._logged_step: int | None = None
        self.samples, self._seconds = 0, 0.0  # of the rollout that is being trained on
        self._finished_samples, self._finished_seconds = 0, 0.0  # of rollouts used up since the last log

    def finish_rollout(self) -> None:
        """Count the finished rollout in `samples_per_second`: all its updates are done, so its total time is known."""
        if self.samples:  # 0 if it was made before the run was resumed
            self._finished_samples += self.samples
            self._finished_seconds += self._seconds
        self.samples, self._seconds = 0, 0.0

    def gather(self, backend: DistributedBackend, step: int) -> dict[str, float]:
        """Return the metrics since the last log, combined over all processes, and forget them; a collective."""
        updates = max(1, step - self._logged_step)
        totals = {name: [sum(self.values.pop(name, [])) / updates] for name in TOTALS}
        measured, weights = self.values | totals, {name: self.weights[name] for name in self.values}
        measured["memory/peak_gib"] = [measure_peak_memory(backend.accelerator.device)]
        if self._finished_samples:
            measured["samples_per_second"] = [self._finished_samples / self._finished_seconds]
        self._finished_samples, self._finished_seconds, self._logged_step = 0, 0.0, step
        self.values.clear()
        self.weights.clear()
        return gather_means(backend.accelerator, measured, LARGEST, SMALLEST, weights)


class UpdateProgress:
    """Progress of the current update: its stage and how much of it is done."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.stage: str | None = None
        self.done = self.total = 0
        self.copies, self.clock = 1, clock
        self.began = self.noticed = clock()  # when the stage began, and when anything was last shown of the run
        self.notice: Callable[[], None] = lambda: None

    def begin(self, stage: str | None, total: int = 0, copies: int = 1) -> None:
        """Enter a stage; None after the last one of an update."""
        if self.stage is not None and logger.isEnabledFor(logging.DEBUG):
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
            logger.debug("RL_METRIC: after %s: peak memory %.2f GiB", self.stage, measure_peak_memory(device))
        self.stage, self.done, self.total, self.copies = stage, 0, total * copies, copies
        self.began = self.clock()
        self._give_notice()

    def advance(self, count: int = 1) -> None:
        """Count units of the stage that this process has done."""
        self.done += count * self.copies
        self._give_notice()

    def _give_notice(self) -> None:
        """Have shown how far a stage is, once a minute."""
        if self.stage is not None and self.clock() - self.noticed >= NOTICE:
            self.notice()


@dataclass(frozen=True)
class Runtime:
    """Processes and measurements of a run."""

    backend: DistributedBackend
    monitor: ProcessGroupMonitor
    metrics: Metrics
    progress: UpdateProgress


def measure_peak_memory(device: torch.device | str) -> float:
    """Return the peak memory in GiB: of tensors on the GPU or, without a GPU, of the whole process in main memory."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "win32":
        import psutil  # a requirement of accelerate

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
