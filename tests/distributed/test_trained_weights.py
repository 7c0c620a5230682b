"""The trained parameters of one process, and shares of tensors as FSDP2 lays them out."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from diffusion_grpo.distributed.trained_weights import TrainedWeights, as_dtensor, as_shard


def make(dtype=torch.float32):
    parameters = [
        nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype)),
        nn.Parameter(torch.tensor([[3.0]], dtype=dtype)),
    ]
    return TrainedWeights(parameters), parameters


def test_one_process_has_all_of_every_parameter():
    weights, parameters = make()
    assert not weights.is_sharded and not weights.leave_some_without_gradient
    assert weights.used() == parameters and not any(value.requires_grad for value in weights.exact())
    with torch.no_grad():
        weights.used()[0].add_(1)
    assert weights.exact()[0].tolist() == [2.0, 3.0]
    values = [torch.zeros(2), torch.zeros(1, 1)]
    assert weights.shard(values) is values and list(weights.join(values)) == values


def test_zero_gives_every_parameter_a_gradient_of_zero():
    weights, parameters = make()
    weights.zero().backward()
    assert [parameter.grad.tolist() for parameter in parameters] == [[0.0, 0.0], [[0.0]]]


def test_other_values_are_shown_and_taken_away_again():
    weights, parameters = make()
    shown = [torch.tensor([5.0, 6.0]), torch.tensor([[7.0]])]
    with weights.show_whole():
        assert parameters[0].tolist() == [1.0, 2.0]
    with pytest.raises(KeyError), weights.show_whole(shown):
        assert parameters[0].tolist() == [5.0, 6.0]
        assert parameters[0].data_ptr() == shown[0].data_ptr()  # no copy, which a large network may have no memory for
        raise KeyError
    assert parameters[0].tolist() == [1.0, 2.0]
    with weights.show_whole(shown, is_kept=False):
        assert parameters[0].tolist() == [1.0, 2.0]


def test_hooks_of_gradients_survive_other_values():
    """DDP's hooks are on nodes of autograd, which a parameter forgets if its data changes in kind."""
    weights, parameters = make(torch.float64)  # neither float32 nor, on a GPU, in CPU memory
    seen = []
    nodes = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *_, number=number: seen.append(number))
    with weights.show_whole([torch.zeros(2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)]):
        pass
    weights.zero().backward()
    assert sorted(seen) == [0, 1]


# Shares, on the second of two processes, without communication


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
