"""Quantised networks and weights are told from plain ones."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import SD3Transformer2DModel
from quantized import save_pipeline
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusion_grpo.policy.networks import find_quantization, is_quantized_weight, list_quantized_weights


def quantizer(**config):
    return SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=SimpleNamespace(**config)))


def test_methods_have_the_names_of_backends():
    assert find_quantization(nn.Linear(2, 2)) is None
    assert find_quantization(quantizer(quant_method="torchao")) == "torchao"
    assert find_quantization(quantizer(quant_method="bitsandbytes", load_in_4bit=True)) == "bitsandbytes_4bit"
    assert find_quantization(quantizer(quant_method="bitsandbytes", load_in_4bit=False)) == "bitsandbytes_8bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int8])
def test_bytes_are_no_plain_numbers(dtype):
    weight = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    assert is_quantized_weight(weight) == (dtype in (torch.uint8, torch.int8))


def test_only_weights_of_quantised_networks_are_listed(tmp_path):
    plain = SD3Transformer2DModel.from_pretrained(save_pipeline(tmp_path / "sd3"), subfolder="transformer")
    model = nn.ModuleDict({"network": plain})
    assert list_quantized_weights(model) == []
    quantize_(plain, Int8WeightOnlyConfig())
    plain.hf_quantizer = quantizer(quant_method="torchao").hf_quantizer
    names = list_quantized_weights(model)
    linear = [f"network.{n}.weight" for n, module in plain.named_modules() if isinstance(module, nn.Linear)]
    assert names and set(names) == set(linear)
