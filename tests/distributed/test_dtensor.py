"""Shares of tensors as FSDP2 lays them out, on the second of two processes, without communication."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from diffusion_grpo.distributed.trained_weights import as_dtensor, as_shard


@pytest.fixture
def mesh():
    """Of two processes, of which this is the second."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_share_is_this_processs_part_of_the_whole(mesh):
    like = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None)
    whole = torch.arange(12.0).view(4, 3)
    found = as_shard(whole, like)
    assert torch.equal(found.to_local(), whole[2:]) and found.shape == (4, 3) and found.placements == like.placements
    replicated = as_shard(whole, distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None))
    assert torch.equal(replicated.to_local(), whole)


def test_an_uneven_share_knows_the_whole_shape(mesh):
    like = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)], src_data_rank=None)
    found = as_dtensor(torch.ones(1, 2), like)
    assert found.shape == (3, 2) and found.stride() == (2, 1) and found.to_local().shape == (1, 2)
