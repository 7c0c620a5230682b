"""A LoRA is trained on a quantised base, loaded by name or given."""

import json
from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig
from peft.tuners.lora.torchao import TorchaoLoraLinear
from quantized import INT8, allow_bitsandbytes_on_a_cpu, call_network, save_pipeline, trainer_of
from safetensors.torch import load_file
from tiny_runs import are_equal, logged, trained_weights
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

from diffusion_grpo.config.quantization import QuantizationSettings, QuantizationSpec
from diffusion_grpo.weights import quantization
from diffusion_grpo.weights.quantization import (
    QuantizedLoading,
    choose_specs,
    dequantize_weight,
    describe_quantization,
    list_trained_methods,
    make_config,
    make_plain_layer,
    name_method,
    show_plain_layers,
)

FLUX = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_pipeline(tmp_path_factory.mktemp("base") / "sd3")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run by name with all that a LoRA's run may have: reference, average, checkpointing, checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    kept = {"beta": 0.1, "ema_decay": 0.9, "ema_update_interval": 1, "gradient_checkpointing": True}
    trainer = trainer_of(base, folder, quantization=INT8, **SAVED, **kept)
    trainer.train()
    trainer.save_model()
    return trainer, folder, kept


def test_the_ratio_is_exactly_1_and_the_reference_is_the_quantised_base(run, base):
    trainer, _, _ = run
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]
    assert logged(trainer, "kl")[0] == 0.0 < logged(trainer, "kl")[1]
    assert describe_quantization(trainer.pipe) == {"transformer": "torchao", "text_encoder_3": "torchao"}
    layers = [module for module in trainer.model.modules() if isinstance(module, TorchaoLoraLinear)]
    assert layers and all(p.dtype == torch.float32 for p in trained_weights(trainer).values())
    with trainer.model.disable_adapter():
        reference = call_network(trainer.pipe.transformer)
    fresh = trainer_of(base, trainer.args.output_dir + "-fresh", quantization=INT8)
    with fresh.model.disable_adapter():
        assert torch.equal(call_network(fresh.pipe.transformer), reference)


def test_a_resumed_run_ends_with_the_same_bits(run, base, tmp_path):
    _, folder, kept = run
    again = trainer_of(base, tmp_path, quantization=INT8, **SAVED, **kept)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    again.save_model()
    for name in ("adapter_model.safetensors", "policy/adapter_model.safetensors"):
        assert are_equal(load_file(folder / name), load_file(tmp_path / name)), name


def test_plain_diffusers_loads_the_lora_on_the_plain_and_on_the_quantised_model(run, base):
    trainer, folder, _ = run
    expected = call_network(trainer.pipe.transformer)  # with the average's weights, which are saved
    plain = DiffusionPipeline.from_pretrained(base)
    before = call_network(plain.transformer)
    plain.load_lora_weights(folder)
    config = PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(Int8WeightOnlyConfig())})
    pipe = DiffusionPipeline.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    pipe.load_lora_weights(folder)
    torch.testing.assert_close(call_network(pipe.transformer), expected, rtol=1e-4, atol=1e-5)
    rounding = (call_network(plain.transformer) - expected).abs().max()
    assert 0 < rounding < (before - expected).abs().max()


def test_what_is_saved_whole_is_plain_and_merged(run, tmp_path):
    network = run[0].pipe.transformer
    expected = call_network(network)
    assert_saved_merged(network, tmp_path, rtol=1e-4, atol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(call_network(network), expected)


def test_the_run_and_the_card_say_how_the_base_was_quantised(run):
    _, folder, _ = run
    assert json.loads((folder / "run.json").read_text())["settings"]["quantization"] == INT8
    assert "`transformer` (torchao)" in (folder / "README.md").read_text()


def test_the_gradient_is_that_of_the_dequantised_network(base, tmp_path):
    quantised = trainer_of(base, tmp_path / "a", quantization={"transformer": "torchao"}, max_steps=1)
    layers = dict(quantised.pipe.transformer.named_modules())
    quantised.train()
    pipe = DiffusionPipeline.from_pretrained(base)
    for name, layer in pipe.transformer.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = dequantize_weight(layers.get(f"{name}.base_layer", layers[name]), torch.float32)
    plain = trainer_of(pipe, tmp_path / "b", max_steps=1)
    plain.train()
    assert logged(plain, "grad_norm")[0] == pytest.approx(logged(quantised, "grad_norm")[0], rel=1e-3)


def test_a_pipeline_that_is_quantised_already_just_works(base, tmp_path):
    config = PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(Int8WeightOnlyConfig())})
    pipe = DiffusionPipeline.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16)
    trainer = trainer_of(pipe, tmp_path, bf16=True, max_steps=1)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0]
    assert all(p.dtype == torch.float32 for p in trained_weights(trainer).values())  # the LoRA beside bf16 layers
    with pytest.raises(ValueError, match="Full training cannot move the quantised weights of transformer"):
        trainer_of(pipe, tmp_path / "full", lora=False)
    with pytest.raises(ValueError, match="quantization is for a model given by its name, but model is a pipeline"):
        trainer_of(pipe, tmp_path / "late", quantization=INT8)


def test_text_encoders_may_be_quantised_in_full_training(base, tmp_path):
    trainer = trainer_of(base, tmp_path, lora=False, quantization={"text_encoder_3": "torchao"}, max_steps=1)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0]
    trainer.save_model()
    assert describe_quantization(DiffusionPipeline.from_pretrained(tmp_path)) == {"text_encoder_3": "torchao"}


# What is refused

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, it is loaded")


@pytest.mark.parametrize(
    ("settings", "lora", "match"),
    [
        ({"quantization": INT8}, False, "Full training.*of transformer; train a LoRA"),
        ({"load_in_4bit": True}, False, "Full training.*of transformer; train a LoRA"),
        ({"quantization": {"text_encoder_3": "quanto"}}, False, "cannot save what quanto"),
        ({"quantization": {"vae_2": "torchao"}}, True, "the pipeline has no network 'vae_2'"),
        ({"quantization": {"tokenizer": "torchao"}}, True, "no network 'tokenizer'; it has text_encoder, text_enc"),
        ({"quantization": {"vae": {"backend": "torchao", "quant_type": "Int9"}}}, True, "quantization: vae: .*Int9"),
        ({"quantization": {"vae": {"backend": "torchao", "quant_type_kwargs": {"bits": 9}}}}, True, "vae: .*bits"),
        ({"quantization": {"text_encoder_3": {"backend": "gguf", "file": "x"}}}, True, "_3: .*T5EncoderModel"),
        pytest.param({"load_in_4bit": True}, True, "needs a GPU", marks=WITHOUT_GPU),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(base, tmp_path, monkeypatch, settings, lora, match):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", load)
    with pytest.raises(ValueError, match=match):
        trainer_of(base, tmp_path, lora=lora, **settings)


def test_networks_that_cannot_have_a_lora_are_refused(monkeypatch):
    def network(method, trainable=False, **config):
        config = SimpleNamespace(quant_method=method, **config)
        return SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=config, is_trainable=trainable))

    check = quantization.check_quantized_training
    with pytest.raises(ValueError, match="with torchao's Int4WeightOnlyConfig, on which no LoRA"):
        check("transformer", network("torchao", True, quant_type=Int4WeightOnlyConfig()), False)
    with pytest.raises(ValueError, match="with nunchaku_lite, on which no LoRA"):
        check("transformer", network("nunchaku_lite"), False)
    check("transformer", network("gguf"), False)
    monkeypatch.setenv("DIFFUSERS_GGUF_CUDA_KERNELS", "true")
    with pytest.raises(ValueError, match="DIFFUSERS_GGUF_CUDA_KERNELS"):
        check("transformer", network("gguf"), False)


# Which components are quantised


def settings(**given):
    return SimpleNamespace(**vars(QuantizationSettings(**given)))


def test_the_short_form():
    found = choose_specs(settings(load_in_4bit=True, use_bnb_nested_quant=True), FLUX, ("transformer",))
    assert found.keys() == {"transformer", "text_encoder_2"}  # neither CLIP nor VAE
    assert found["transformer"].backend == "bitsandbytes_4bit"
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


# Configuration objects


def test_the_objects_that_diffusers_and_transformers_get():
    spec = QuantizationSpec("torchao", {"modules_to_not_convert": ["proj_out"]})
    for home, library in ((diffusers, "diffusers"), (transformers, "transformers")):
        made = make_config(spec, library, torch.bfloat16)
        assert type(made) is home.TorchAoConfig and made.modules_to_not_convert == ["proj_out"]
        assert isinstance(made.quant_type, Int8WeightOnlyConfig)


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_bitsandbytes_gets_the_settings_and_the_dtype_of_the_run(monkeypatch, library):
    """With a stand-in for the class, which asks for the package when it is made."""
    stand_in = SimpleNamespace(BitsAndBytesConfig=lambda **kwargs: kwargs)
    monkeypatch.setattr(quantization, library, stand_in)
    four = QuantizationSpec("bitsandbytes_4bit", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True})
    assert make_config(four, library, torch.bfloat16) == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    bare = make_config(QuantizationSpec("bitsandbytes_4bit"), library, None)
    assert (bare["bnb_4bit_quant_type"], bare["bnb_4bit_compute_dtype"]) == ("nf4", torch.float32)
    assert make_config(QuantizationSpec("bitsandbytes_8bit"), library, None) == {"load_in_8bit": True}


def test_each_component_gets_an_object_of_its_own_library_and_dtype():
    components = {"transformer": ("diffusers", "A"), "text_encoder": ("transformers", "T5EncoderModel")}
    args = settings(quantization={"transformer": "torchao", "text_encoder": "torchao"})
    loading = QuantizedLoading(choose_specs(args, components, ("transformer",)), components, ("transformer",))
    assert loading.trains_quantized == "transformer" and list_trained_methods("name", None, loading) == {"torchao"}
    made = loading.keywords("somewhere", {"transformer": torch.float32, "default": torch.bfloat16}, {})
    mapping = made["quantization_config"].quant_mapping
    assert type(mapping["transformer"]) is diffusers.TorchAoConfig
    assert type(mapping["text_encoder"]) is transformers.TorchAoConfig
    assert name_method(mapping["transformer"]) == "torchao" and name_method(None) is None


# Plain weights


@pytest.fixture
def network(tmp_path):
    config = TorchAoConfig(Int8WeightOnlyConfig())
    folder = save_pipeline(tmp_path / "sd3")
    return diffusers.SD3Transformer2DModel.from_pretrained(
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
        diffusers.SD3Transformer2DModel.save_pretrained(network, tmp_path / "plain")
    assert dict(network.named_modules()) == layers and torch.equal(call_network(network), before)
    assert network.hf_quantizer is not None and "quantization_config" in network.config
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(call_network(loaded), before, rtol=1e-4, atol=1e-5)


# Backends that the tests' environment may lack


def assert_saved_merged(network, folder, **tolerance):
    """What the network saves loads as a plain one, with its LoRA merged, that computes the same."""
    expected = call_network(network)
    network.save_pretrained(folder)
    loaded = diffusers.SD3Transformer2DModel.from_pretrained(folder)
    torch.testing.assert_close(call_network(loaded), expected, **tolerance)


@pytest.mark.parametrize("setting", ["load_in_4bit", "load_in_8bit"])
def test_bitsandbytes_trains_and_saves(base, tmp_path, monkeypatch, setting):
    pytest.importorskip("bitsandbytes")
    allow_bitsandbytes_on_a_cpu(monkeypatch.setattr)
    trainer = trainer_of(base, tmp_path, **{setting: True})
    backend = f"bitsandbytes_{setting[-4:]}"
    assert describe_quantization(trainer.pipe) == {"transformer": backend, "text_encoder_3": backend}
    trainer.train()
    trainer.save_model()
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]
    tolerance = 1e-4 if setting == "load_in_4bit" else 0.05  # 8 bit rounds the inputs too
    assert_saved_merged(trainer.pipe.transformer, tmp_path / "merged", rtol=tolerance, atol=tolerance)


def test_gguf_files_train_and_save(base, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer, kind = gguf.GGUFWriter(str(tmp_path / "q8.gguf"), "sd3"), gguf.GGMLQuantizationType.Q8_0
    network = diffusers.SD3Transformer2DModel.from_pretrained(base, subfolder="transformer")
    for name, value in network.state_dict().items():
        numbers = value.numpy()
        if name.endswith("weight") and numbers.ndim == 2 and numbers.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = {"transformer": {"backend": "gguf", "file": str(tmp_path / "q8.gguf")}}
    trainer = trainer_of(base, tmp_path / "run", quantization=spec)
    assert describe_quantization(trainer.pipe) == {"transformer": "gguf"}
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]
    assert_saved_merged(trainer.pipe.transformer, tmp_path / "merged", rtol=1e-4, atol=1e-5)


def test_quanto_trains_and_saves(base, tmp_path):
    pytest.importorskip("optimum.quanto")
    trainer = trainer_of(base, tmp_path, quantization={"transformer": "quanto", "text_encoder_3": "quanto"})
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]
    assert_saved_merged(trainer.pipe.transformer, tmp_path / "merged", rtol=1e-4, atol=1e-5)
