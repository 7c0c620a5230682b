"""A quantised network is saved with plain weights, and is quantised again afterwards."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel, TorchAoConfig
from quantized import call_network, save_pipeline
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig

from diffusion_grpo.run.dequantize import dequantize_weight, make_plain_layer, show_plain_layers


@pytest.fixture
def network(tmp_path):
    config = TorchAoConfig(Int8WeightOnlyConfig())
    folder = save_pipeline(tmp_path / "sd3")
    return SD3Transformer2DModel.from_pretrained(
        folder, subfolder="transformer", quantization_config=config, torch_dtype=torch.float32
    )


def test_a_plain_layer_computes_what_the_quantised_one_does(network):
    layer = network.transformer_blocks[0].attn.to_q
    plain, inputs = make_plain_layer(layer, torch.float32), torch.randn(3, layer.in_features)
    assert type(plain) is nn.Linear and type(plain.weight) is nn.Parameter
    assert torch.equal(plain.weight, dequantize_weight(layer, torch.float32))
    torch.testing.assert_close(plain(inputs), layer(inputs), rtol=1e-5, atol=1e-6)


def test_inside_the_network_is_plain_and_afterwards_as_before(network, tmp_path):
    before, layers = call_network(network), dict(network.named_modules())
    with show_plain_layers(network):
        torch.testing.assert_close(call_network(network), before, rtol=1e-4, atol=1e-5)
        assert all(type(parameter) is nn.Parameter for parameter in network.parameters())
        SD3Transformer2DModel.save_pretrained(network, tmp_path / "plain")
    assert dict(network.named_modules()) == layers and torch.equal(call_network(network), before)
    assert network.hf_quantizer is not None and "quantization_config" in network.config
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = SD3Transformer2DModel.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(call_network(loaded), before, rtol=1e-4, atol=1e-5)
