"""What settings of quantisation ask for, and what they may not ask for, before torch is imported."""

import json
from types import SimpleNamespace

import pytest
from command_line import make_config

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config import quantization
from diffusion_grpo.config.quantization import QuantizationSettings, QuantizationSpec, check_specs, choose_specs

FLUX = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
REFUSED = [
    ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit are both set; choose one"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf8"}, "'nf8' is unknown; choose one of nf4, fp4"),
    ({"quantization": {"transformer": "torcha"}}, "'torcha'.*Did you mean 'torchao'"),
    ({"quantization": {"transformer": 8}}, "transformer is 8; write the name of a backend"),
    ({"quantization": {"transformer": {"quant_type": "x"}}}, "a mapping with `backend`"),
    ({"quantization": {"transformer": "gguf"}}, "gguf reads weights from a file.* already quantised; give it"),
    ({"quantization": {"transformer": {"backend": "torchao", "bits": 4}}}, "torchao has no option bits; it has quant"),
    ({"quantization": {"vae": {"backend": "quanto", "weights_dtype": "int3"}}}, "weights_dtype='int3'; choose int8"),
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


def settings(**given):
    return SimpleNamespace(**vars(QuantizationSettings(**given)))


def test_the_short_form():
    found = choose_specs(settings(load_in_4bit=True, use_bnb_nested_quant=True), FLUX, ("transformer",))
    assert found.keys() == {"transformer", "text_encoder_2"}  # neither CLIP nor VAE
    assert found["transformer"].backend == "bitsandbytes_4bit" and found["transformer"].source == "load_in_4bit"
    assert found["transformer"].options == {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    eight = choose_specs(settings(load_in_8bit=True), FLUX, ("transformer",))
    assert {spec.backend for spec in eight.values()} == {"bitsandbytes_8bit"}
    assert eight["transformer"].options == {}
    other = settings(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="bfloat16")
    options = choose_specs(other, FLUX, ("transformer",))["transformer"].options
    assert (options["bnb_4bit_quant_type"], options["bnb_4bit_quant_storage"]) == ("fp4", "bfloat16")


def test_a_component_of_its_own_wins_over_the_short_form():
    given = {"text_encoder_2": None, "vae": {"backend": "quanto", "weights_dtype": "float8"}}
    found = choose_specs(settings(load_in_4bit=True, quantization=given), FLUX, ("transformer",))
    assert found.keys() == {"transformer", "vae"}
    assert found["vae"] == QuantizationSpec("quanto", {"weights_dtype": "float8"})
    config = SimpleNamespace(quant_method="torchao")
    assert choose_specs(settings(quantization={"vae": config}), FLUX, ("transformer",)) == {"vae": config}


@pytest.mark.parametrize("name", ["transformr", "tokenizer", "scheduler"])
def test_a_component_that_is_no_network_is_refused(name):
    with pytest.raises(ValueError, match=f"no network '{name}'; it has text_encoder, text_encoder_2, transformer"):
        choose_specs(settings(quantization={name: "torchao"}), FLUX, ("transformer",))


def test_what_a_backend_cannot_do_is_refused():
    gguf = QuantizationSpec("gguf", {"file": "x.gguf"})
    with pytest.raises(ValueError, match="text_encoder_2 is a network of transformers.*decompress"):
        check_specs({"text_encoder_2": gguf}, FLUX, ("transformer",))
    int4 = QuantizationSpec("torchao", {"quant_type": "Int4WeightOnlyConfig"})
    with pytest.raises(ValueError, match="transformer is trained.*torchao's Int4WeightOnlyConfig; use one of Int8"):
        check_specs({"transformer": int4}, FLUX, ("transformer",))
    check_specs({"text_encoder_2": int4}, FLUX, ("transformer",))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    for backend, package in (("bitsandbytes_4bit", "bitsandbytes"), ("quanto", "optimum-quanto")):
        with pytest.raises(ImportError, match=f"load_in: {backend} needs the package {package}: pip install"):
            quantization.check_package(QuantizationSpec(backend, {}, "load_in"))


def test_json_of_the_command_line_is_read(tmp_path):
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, quantization=json.dumps({"transformer": "torchao"}))
    assert args.quantization == {"transformer": "torchao"} and quantization.asks_for_quantization(args)
    assert not quantization.asks_for_quantization(settings())
