"""Networks that take turns: the optimizer passes over those that an update has not trained."""

import pytest
import torch
from torch import nn

from diffusion_grpo.distributed.zero import IdleNetworks

TURNS = (0, 0, 1, 0, 1)  # which network each update trains


def make_networks():
    torch.manual_seed(0)
    return nn.ModuleDict({"transformer": nn.Linear(3, 2), "transformer_2": nn.Linear(3, 2)})


def make_optimizer(networks):
    """As `Trainer` makes it: weights that decay in one group, biases in another."""
    decayed, others = ([p for p in networks.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )


def train(networks, optimizer, begin=lambda optimizers: None, fills_zeros=False):
    """Let updates train the networks in turns; DeepSpeed fills in zeros for the gradients that are missing.

    `begin` is called before each update, with what is stepped.
    """
    kept = []
    for turn, number in enumerate(TURNS):
        begin([optimizer])
        network = list(networks.values())[number]
        network(torch.full((4, 3), 1.0 + turn)).square().sum().backward()
        for parameter in networks.parameters() if fills_zeros else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        given = [parameter.grad for parameter in networks.parameters()]
        optimizer.step()
        kept += [own is parameter.grad for own, parameter in zip(given, networks.parameters(), strict=True)]
        optimizer.zero_grad()
    return kept


def largest_difference(ours, others):
    return max(
        (one - other).abs().max().item() for one, other in zip(ours.parameters(), others.parameters(), strict=True)
    )


def test_zeros_move_no_idle_network():
    plain, zeros, ours = make_networks(), make_networks(), make_networks()
    train(plain, make_optimizer(plain))
    train(zeros, make_optimizer(zeros), fills_zeros=True)
    optimizer = make_optimizer(ours)
    groups = len(optimizer.param_groups)
    kept = train(ours, optimizer, IdleNetworks(ours, optimizer, torch.device("cpu")).begin_update, fills_zeros=True)
    assert largest_difference(ours, plain) == 0.0 < 0.01 < largest_difference(zeros, plain)
    assert len(optimizer.param_groups) == 2 * groups  # each network has its own
    assert all(kept)  # the engine finds its gradients where it has put them


def test_the_engine_may_step_another_optimizer_with_the_same_groups():
    """As accelerate makes a DeepSpeedCPUAdam, from the groups of an optimizer that is offloaded."""
    plain, ours = make_networks(), make_networks()
    train(plain, make_optimizer(plain))
    optimizer = make_optimizer(ours)
    idle = IdleNetworks(ours, optimizer, torch.device("cpu"))
    train(ours, torch.optim.AdamW(optimizer.param_groups, lr=0.1), idle.begin_update, fills_zeros=True)
    assert largest_difference(ours, plain) == 0.0


def test_once_closed_it_leaves_the_networks_alone():
    """Trainer may make an optimizer more than once."""
    zeros, ours = make_networks(), make_networks()
    train(zeros, make_optimizer(zeros), fills_zeros=True)
    optimizer = make_optimizer(ours)
    idle = IdleNetworks(ours, optimizer, torch.device("cpu"))
    idle.begin_update([optimizer])
    idle.close()
    train(ours, optimizer, fills_zeros=True)
    assert largest_difference(ours, zeros) == 0.0


@pytest.mark.parametrize("passes", [1, 3])
def test_a_gradient_of_zero_is_no_training(passes):
    """Such as that of a group whose samples all have the same reward: Adam's momentum would move the weights."""
    networks = make_networks()
    optimizer = make_optimizer(networks)
    idle = IdleNetworks(networks, optimizer, torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in networks.parameters()]
    idle.begin_update([optimizer])
    for _ in range(passes):
        (0.0 * networks["transformer"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, networks.parameters(), strict=True))
