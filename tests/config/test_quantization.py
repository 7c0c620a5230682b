"""What settings of quantisation ask for, and what they may not ask for, before torch is imported."""

import json

import pytest
from command_line import make_config

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config import quantization

REFUSED = [
    ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit are both set; choose one"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf8"}, "'nf8' is unknown; choose one of nf4, fp4"),
    ({"quantization": {"transformer": "torcha"}}, "'torcha'.*Did you mean 'torchao'"),
    ({"quantization": {"transformer": 8}}, "transformer is 8; write the name of a backend"),
    ({"quantization": {"transformer": {"quant_type": "x"}}}, "a mapping with `backend`"),
    ({"quantization": {"transformer": "gguf"}}, "gguf reads weights from a file.* already quantised; give it"),
    ({"quantization": {"transformer": {"backend": "torchao", "bits": 4}}}, "torchao has no option bits; it has quant"),
    (
        {"load_in_8bit": True, "model_init_kwargs": {"quantization_config": {}}},
        "quantization_config is set together with",
    ),
    (
        {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16", "bf16": False},
        "'bfloat16' would be cast to float32, the dtype of this run.*change the packed weights; set it to float32",
    ),
]


@pytest.mark.parametrize(("settings", "match"), REFUSED)
def test_contradictions_are_refused_in_one_sentence(settings, match):
    with pytest.raises(ValueError, match=match):
        make_config(**settings)


def test_json_of_the_command_line_is_read(tmp_path):
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, quantization=json.dumps({"transformer": "torchao"}))
    assert args.quantization == {"transformer": "torchao"} and quantization.asks_for_quantization(args)
    assert not quantization.asks_for_quantization(DiffusionGRPOConfig(str(tmp_path), use_cpu=True))
