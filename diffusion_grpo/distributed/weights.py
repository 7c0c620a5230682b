"""Values of the trained parameters as a backend keeps them: whole here, sharded in other backends."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class TrainedWeights:
    """The trained parameters of a single process or of DDP, where every process has them whole."""

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
        """Whether a pass may leave some parameters without a gradient that other processes would wait for."""
        return self.take_turns and torch.distributed.is_initialized()

    def exact(self) -> list[Tensor]:
        """Return the values that the optimizer updates, one tensor per parameter; they must not be written to."""
        return [parameter.detach() for parameter in self.parameters]

    def used(self) -> list[Tensor]:
        """Return the values that the network computes with; call `refresh` after writing to them."""
        return list(self.parameters)

    def refresh(self) -> None:
        """Update copies that are kept in addition to the values of `used`."""

    def zero(self) -> Tensor:
        """Return 0 with a gradient of 0 for every parameter."""
        return 0.0 * sum(parameter.sum() for parameter in self.parameters)

    def shard(self, values: list[Tensor]) -> list[Tensor]:
        """Return this process's shares of whole values, or the values themselves if nothing is sharded."""
        return values

    def join(self, shares: list[Tensor]) -> Iterator[Tensor]:
        """Yield whole values from the shares of all processes, one parameter at a time; a collective if sharded."""
        yield from shares

    @contextlib.contextmanager
    def show_whole(self, values: list[Tensor] | None = None, is_kept: bool = True) -> Iterator[None]:
        """Show the trained parameters whole and exact, as in a single process, to write them to files."""
        with contextlib.ExitStack() as stack:
            if values is not None and is_kept:
                for parameter, value in zip(self.parameters, values, strict=True):
                    stack.callback(setattr, parameter, "data", parameter.data)
                    # on another device or in another dtype, autograd would forget DDP's hooks, which sum gradients
                    parameter.data = value.detach().to(parameter)
            yield

    @contextlib.contextmanager
    def rewrite(self) -> Iterator[None]:
        """Show whole parameters on every process, to read a file into them; afterwards each process has its share.

        The optimizer's own values are set too, so that later checkpoints contain what was read.
        """
        yield
