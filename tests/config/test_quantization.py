"""What settings of quantisation ask for, and what they may not ask for, before torch is imported."""

import json

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config import quantization


def test_json_of_the_command_line_is_read(tmp_path):
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, quantization=json.dumps({"transformer": "torchao"}))
    assert args.quantization == {"transformer": "torchao"} and quantization.asks_for_quantization(args)
    assert not quantization.asks_for_quantization(DiffusionGRPOConfig(str(tmp_path), use_cpu=True))
