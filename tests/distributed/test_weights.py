"""The trained parameters of one process, and how they are shown whole."""

import pytest
import torch
from torch import nn

from diffusion_grpo.distributed.trained_weights import TrainedWeights


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
