"""What of a latent reaches a network: found by autograd, without a trace in what runs."""

import pytest
import torch
from torch import nn

from diffusion_grpo.policy.input_watch import InputWatch


class Network(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, watch=None):
        super().__init__()
        self.scale, self.watch, self.given = nn.Parameter(torch.ones(())), watch, []

    def forward(self, *args, **kwargs):
        args, kwargs = self.watch.take_inputs(args, kwargs)
        self.given.append((args, kwargs))
        return args[0] * self.scale


class ControlNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        self.result = self.inner(x)
        return self.result


@pytest.fixture
def network():
    network = Network()
    network.watch = InputWatch([network])
    return network


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_replaced_scaled_moved_or_summed(network, mode):
    latents, condition = torch.randn(2, 4, 3), torch.randn(2, 3)
    with torch.set_grad_enabled(mode), network.watch.closing():
        handed = network.watch.follow(latents)
        assert torch.equal(handed, latents)
        handed[:, 0] = condition  # in place
        mask = torch.tensor([0.0, 1.0, 1.0])[:, None]
        given = [torch.cat([handed[:, :1], mask * handed[:, 1:]], dim=1).half() * 1e-2, {"x": (handed * 0.0).sum()}]
        output = network(given[0], time=given[1])
        assert torch.is_grad_enabled() == mode and output.requires_grad == mode
    expected = torch.ones(2, 4, 3, dtype=torch.bool)
    expected[:, :2] = False
    assert torch.equal(network.watch.seen[0], expected)
    args, kwargs = network.given[0]
    assert torch.equal(args[0], given[0]) and not args[0].requires_grad and not kwargs["time"]["x"].requires_grad


def test_several_latents_and_several_calls(network):
    first, second, third = torch.randn(1, 2), torch.randn(1, 2), torch.randn(1, 2)
    with torch.no_grad(), network.watch.closing():
        one, two, _ = (network.watch.follow(latents) for latents in (first, second, third))
        once, again = one * torch.tensor([1.0, 0.0]), [one * torch.tensor([0.0, 2.0]), two]
        network(once)
        network(*again, "text")
    assert [seen if seen is None else seen.tolist() for seen in network.watch.seen] == [
        [[True, True]],
        [[True, True]],
        None,
    ]


def test_other_modules_make_no_graph_and_what_comes_from_weights_keeps_its_own(network):
    control, weight = ControlNet(), nn.Parameter(torch.ones(1, 3))
    with network.watch.closing():
        handed = network.watch.follow(torch.randn(1, 3))
        network(handed, control(handed), weight * 2)
    (_, residual, own), _ = network.given[0]
    assert not control.result.requires_grad and not residual.requires_grad and own.requires_grad
    assert network.watch.seen[0].all()


def test_an_error_on_the_way_leaves_nothing_behind(network):
    control = ControlNet()
    with torch.no_grad():
        with pytest.raises(RuntimeError), network.watch.closing():
            control(network.watch.follow(torch.randn(1, 5)))
        assert not torch.is_grad_enabled()
    assert control(torch.randn(1, 3)).requires_grad  # no hook is left that would switch it off
