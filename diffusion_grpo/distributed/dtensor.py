"""Shares of tensors in the layout of FSDP2."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


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
