"""Count the bytes of live tensors while code runs, and their peak."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Watches every operation inside its context and counts the storages of the results.

    It works on tensors without values (torch's `FakeTensorMode`) as on real ones. Memory that a kernel allocates and
    frees before it returns is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = (), phase: str = ""):
        super().__init__()
        self.now, self.made, self.phase = 0, 0, phase
        self.peaks: Counter[str] = Counter()
        known = [tensor.untyped_storage() for tensor in known]
        self._known = {storage._cdata: storage for storage in known}  # kept alive, so that their keys are not reused
        self._alive: dict[int, tuple[int, int, int]] = {}  # time of creation, bytes, and how often they count

    @property
    def peak(self) -> int:
        """Peak of live bytes over all phases."""
        return max(self.peaks.values(), default=0)

    def begin(self, phase: str) -> None:
        """Begin another phase."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if torch.is_tensor(tensor):
                self._add(tensor.untyped_storage())
        return output

    def count(self, start: int, stop: int) -> int:
        """Return the live bytes of storages that were made between two moments, given as values of `made`."""
        return sum(size * times for when, size, times in self._alive.values() if start <= when < stop)

    def multiply(self, start: int, stop: int, times: int) -> None:
        """From now on, count live storages that were made between two moments this many times."""
        chosen = {key: found for key, found in self._alive.items() if start <= found[0] < stop}
        for key, (when, size, before) in chosen.items():
            self._alive[key] = when, size, times
            self.now += size * (times - before)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._known:
            return
        self._alive[key] = self.made, size, 1
        self.made += 1
        self.now += size
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        _, size, times = self._alive.pop(key)
        self.now -= size * times
