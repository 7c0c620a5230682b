"""Several processes on the stand-in device, whose collectives refuse what NCCL refuses: tensors of the CPU.

The collectives are gloo's, on copies in CPU memory. accelerate takes the device for a GPU.
"""

import os
from datetime import timedelta
from typing import Any

import stand_in_device
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch._C import _distributed_c10d as c10d

BACKEND = "standin_nccl"


class StandInGroup(dist.ProcessGroup):
    """A process group for tensors of the stand-in device alone."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(stand_in_device.NAME)]

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return BACKEND

    def barrier(self, *arguments: Any, **options: Any) -> Any:
        self._gloo.barrier().wait()
        return _finished(None)

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *_: Any) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _finished(outputs)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        for tensor in tensors:
            self.allreduce([tensor], *options)
        return _finished(tensors)

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, sizes: list[int], own_sizes: list[int], *options: Any
    ) -> Any:
        if len({*sizes}) > 1 or len({*own_sizes}) > 1:
            raise NotImplementedError("Parts of different sizes would need the sizes of flat tensors.")
        return self._run("alltoall_base", output, own, [], [], *options)

    def _run(self, name: str, *arguments: Any) -> Any:
        """Run a collective of gloo on copies, and copy the results back."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [copy(item) for item in value]
            if not torch.is_tensor(value):
                return value
            if value.device.type != stand_in_device.NAME:
                raise RuntimeError(f"{name}: no backend for tensors of the device {value.device.type}.")
            copies.append((value, value.detach().cpu().flatten().clone()))
            return copies[-1][1]

        getattr(self._gloo, name)(*map(copy, arguments)).wait()
        with torch.no_grad():
            for value, changed in copies:
                value.copy_(changed.view(value.shape))
        return _finished(arguments[0])


def _collective(name: str) -> Any:
    return lambda self, *arguments: self._run(name, *arguments)


# names of a group's collectives, and of gloo's
COLLECTIVES = {name: name for name in ("allreduce", "allgather", "broadcast", "gather", "scatter")}
COLLECTIVES |= {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
for _name, _of_gloo in COLLECTIVES.items():
    setattr(StandInGroup, _name, _collective(_of_gloo))


def _finished(result: Any) -> Any:
    future = torch.futures.Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


def register(processes: int) -> None:
    """Make the device the accelerator of this process and, if it is one of several, the group their collectives."""
    stand_in_device.register()
    stand_in_device.use_in_runs()
    if processes == 1:
        return
    dist.Backend.register_backend(BACKEND, StandInGroup, devices=[stand_in_device.NAME])
    PartialState._prepare_backend = lambda self, *args, **kwargs: (BACKEND, DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device(stand_in_device.NAME, 0))
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # each process has a device of its own, number 0
