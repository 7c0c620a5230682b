"""Bytes of tensors."""

import pytest
import torch

from diffusion_grpo.training.memory import count_bytes


def test_each_tensor_counts_once_also_where_the_next_one_takes_its_place():
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert count_bytes([weight, weight, torch.zeros(2)]) == 3 * 5 * 2 + 2 * 4
    assert count_bytes(torch.zeros(2) for _ in range(10)) == 10 * 2 * 4


def test_a_tensor_that_wraps_others_counts_as_what_it_wraps():
    int8 = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(64, 32, bias=False)
    int8.quantize_(layer, int8.Int8WeightOnlyConfig())
    assert 64 * 32 <= count_bytes([layer.weight]) <= 64 * 32 + 8 * 32
