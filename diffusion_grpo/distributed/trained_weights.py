"""`TrainedWeights`: read and write the trained parameters, whole on each process here; ZeRO and FSDP2 override it.

It also moves a reference towards the policy. Functions for FSDP2's sharded models and tensors are here too.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


class TrainedWeights:
    """The trained parameters of a single process or of DDP, where every process has them whole."""

    def __init__(self, parameters: list[nn.Parameter], take_turns: bool = False):
        self._parameters, self.take_turns = parameters, take_turns
        # whether a pass may leave some parameters without a gradient that other processes would wait for
        self.leave_some_without_gradient = take_turns and torch.distributed.is_initialized()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in a fixed order."""
        return self._parameters

    @property
    def is_sharded(self) -> bool:
        """Whether a process has only its share of each parameter."""
        return False

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
        """Show whole parameters on every process, to read a file into them; then each process has its share."""
        if not self._has_other_values:
            yield
            return
        with self.show_whole():
            yield
            read = [parameter.detach() for parameter in self.parameters]
        with torch.no_grad():
            for value, share, used, parameter in zip(
                read, self.shard(read), self.used(), self.parameters, strict=True
            ):
                self._set_exact(parameter, value, share)  # so that later checkpoints contain what was read
                used.copy_(share)
        self.refresh()

    @torch.no_grad()
    def approach(self, others: "TrainedWeights", share: float) -> None:
        """Move towards the exact values of other weights by a share of the distance; 1 copies them."""
        values = others.exact()
        if not self.is_sharded:
            values = others.join(values)
        for own, value in zip(self.used(), values, strict=True):
            own.lerp_(value.to(own), share)
        self.refresh()

    @property
    def _has_other_values(self) -> bool:
        """Whether anything beside the parameters themselves holds their values."""
        return self.is_sharded

    def _set_exact(self, parameter: nn.Parameter, value: Tensor, share: Tensor) -> None:
        """Set the values that the optimizer keeps of a parameter in addition to those of `used`."""


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())  # called often: stops at the first one


def as_shard(whole: Tensor, like: DTensor) -> DTensor:
    """Return this process's share of a whole tensor, with the layout and device of `like`; without communication."""
    mesh = like.device_mesh
    share = distribute_tensor(whole.to(mesh.device_type), mesh, like.placements, src_data_rank=None).to_local()
    return as_dtensor(share.to(like.to_local().device), like)


def as_dtensor(share: Tensor, like: DTensor) -> DTensor:
    """Return a share as part of a tensor with the layout of `like`."""
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(share, like.device_mesh, like.placements, run_check=False, **layout)
