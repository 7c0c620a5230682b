"""The frozen reference: the adapter switched off, or a copy that stays as it was."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.rollout.reference import AdapterReference, CopiedReference, disable_adapters


class Policy:
    """Replays by a network: its own, or those that it is given."""

    def __init__(self, network):
        self.network = network

    def replay(self, inputs, trajectory, step, forwards=None, sources=None):
        assert not torch.is_grad_enabled()
        (forward,) = [self.network] if forwards is None else forwards
        return forward(inputs)

    denoise = replay


def wrap_lora():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 3))
    model = get_peft_model(network, LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    return model, network


def test_the_reference_of_a_lora_is_the_network_without_it():
    model, network = wrap_lora()
    inputs = torch.randn(2, 3)
    base = network[0].base_layer(inputs)
    reference = AdapterReference(Policy(model), model, None)
    reference.shard()
    assert reference.module is None
    for ask in (reference.replay, reference.denoise):
        torch.testing.assert_close(ask(inputs, None, 0), base)
    assert not torch.allclose(model(inputs), base)  # switched on again


def test_several_networks_are_switched_off_together():
    models = nn.ModuleDict({"transformer": wrap_lora()[0], "transformer_2": wrap_lora()[0]})
    inputs = torch.randn(2, 3)
    before = [model(inputs) for model in models.values()]
    with disable_adapters(models):
        assert not any(torch.allclose(model(inputs), own) for model, own in zip(models.values(), before))
    assert all(torch.allclose(model(inputs), own) for model, own in zip(models.values(), before))


def test_a_network_without_adapter_is_refused():
    with pytest.raises(TypeError, match="Linear has no adapter to switch off"), disable_adapters(nn.Linear(1, 1)):
        pass


def make_copy(model, is_offloaded=False):
    backend = DistributedBackend(None, ContextGroups())
    backend.bind(SimpleNamespace(unwrap_model=lambda module: module), model, [])
    return CopiedReference(Policy(model), model, backend, torch.device("cpu"), is_offloaded)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_copy_stays_as_the_network_was(is_offloaded):
    model, inputs = nn.Linear(3, 3), torch.randn(2, 3)
    model.bias.requires_grad_(False)
    before, reference = model(inputs).detach(), make_copy(model, is_offloaded)
    reference.shard()
    with torch.no_grad():
        model.weight.add_(1)
    for ask in (reference.replay, reference.denoise):
        torch.testing.assert_close(ask(inputs, None, 0), before)
    assert not any(parameter.requires_grad for parameter in reference.module.parameters())
    assert not reference.module.training and reference.plain_module is reference.module
    assert [id(own) for own in reference.weights.parameters] == [id(reference.module.weight)]  # what the policy trains


def test_a_copy_of_several_networks_replays_with_each():
    reference = make_copy(nn.ModuleDict({"one": nn.Linear(3, 3)}))
    inputs = torch.randn(2, 3)
    torch.testing.assert_close(reference.replay(inputs, None, 0), reference.module["one"](inputs))
