"""Values of the trained parameters, however a backend keeps them: whole here, sharded in the other backends."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class TrainedWeights:
    """The trained parameters of one process, or of DDP, where every process has them whole.

    Args:
        parameters: the trained ones, in a fixed order.
        take_turns: whether they belong to several networks that take turns over the steps.
    """

    def __init__(self, parameters: list[nn.Parameter], take_turns: bool = False):
        self._parameters, self.take_turns = parameters, take_turns

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in a fixed order."""
        return self._parameters

    @property
    def is_sharded(self) -> bool:
        """Whether a process has only its share of each parameter."""
        return False

    @property
    def leave_some_without_gradient(self) -> bool:
        """Whether a pass leaves whole parameters without gradient, for which other processes would wait."""
        return self.take_turns and torch.distributed.is_initialized()

    def exact(self) -> list[Tensor]:
        """Return what the optimizer moves, one tensor per parameter, not to be written to."""
        return [parameter.detach() for parameter in self.parameters]

    def used(self) -> list[Tensor]:
        """Return what the network computes with; call `refresh` after writing to it."""
        return list(self.parameters)

    def refresh(self) -> None:
        """Renew copies that are kept beside the values of `used`."""

    def zero(self) -> Tensor:
        """Return 0 with a gradient of 0 for every parameter."""
        return 0.0 * sum(parameter.sum() for parameter in self.parameters)

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        """Return this process's shares of whole values; the values themselves where it has all."""
        return values

    def join(self, shares: list[Tensor]) -> Iterator[Tensor]:
        """Yield whole values from the shares of all processes, one parameter at a time; a collective if sharded."""
        yield from shares

    @contextlib.contextmanager
    def show_whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        """Show the trained parameters whole and exact, as one process has them, to be written to files.

        Args:
            values: shares to show in place of the weights, such as an average's.
            is_kept: False on processes that only help to join.
        """
        if values is None:
            yield
            return
        with self._show(values, is_kept):
            yield

    @contextlib.contextmanager
    def _show(self, values: list[Tensor], is_kept: bool) -> Iterator[None]:
        kept = []
        try:
            for parameter, value in zip(self.parameters, self.join(values), strict=True):
                if is_kept:
                    kept.append((parameter, parameter.data))
                    parameter.data = value.detach().to("cpu", torch.float32, copy=True)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data

    @contextlib.contextmanager
    def rewrite(self) -> Iterator[None]:
        """Show whole parameters for a file to be read into, on every process; afterwards each has its share of it.

        The optimizer's own values are set too: what is saved later is what was read.
        """
        yield
