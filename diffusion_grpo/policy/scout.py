"""The driver of a call that finds out which steps of the loop call the trained networks."""

from typing import Any

from torch import Tensor

from .drivers import Driver, StepScored


class Scout(Driver):
    """Drives a call through its whole loop without a network, and leaves before anything is decoded.

    Args:
        initial_seeds: (batch,) int64 seeds of the initial latents.
    """

    needs_network = False

    def __init__(self, initial_seeds: Tensor):
        super().__init__(initial_seeds, len(initial_seeds), noise_level=0.0)
        self.passing: dict[int, set[int]] = {}

    def note_call(self, number: int) -> None:
        self.passing.setdefault(number, set()).add(self.current)

    def step(self, scheduler: Any, index: int, prediction: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.enter(scheduler, index)
        if index == scheduler.loop_length - 1:
            raise StepScored
        return sample
