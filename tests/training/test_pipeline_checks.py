"""Pipelines whose parts cannot be trained, moved or loaded as they are."""

import json

import diffusers
import pytest
import tiny_pipelines
import torch
import transformers
from tiny_runs import brightness, trained_weights, trainer_for
from transformers.utils import is_torchvision_available

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.planning.weightless import build_weightless_pipeline
from diffusion_grpo.training.model import name_networks
from diffusion_grpo.training.model_index import check_packages
from diffusion_grpo.training.pipeline_checks import check_fused, check_given_parts, check_processors

CPU = torch.device("cpu")
CHANGES = {
    "fused": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "compiled": lambda pipe: setattr(pipe, "transformer", torch.compile(pipe.transformer, backend="eager")),
    "meta": lambda pipe: pipe.vae.to("meta"),
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential offload": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    "group offload": lambda pipe: pipe.enable_group_offload(onload_device=CPU, offload_type="leaf_level"),
}
MESSAGES = {
    "fused": r"transformer has fused projections.*call transformer\.unfuse_qkv_projections",
    "compiled": "transformer is wrapped by torch.compile.*set torch_compile=True",
    "meta": "vae is on the meta device and has no weights",
    "model offload": "is moved by enable_model_cpu_offload.*remove_all_hooks.*offload_frozen='cpu'",
    "sequential offload": "enable_sequential_cpu_offload.*remove_all_hooks.*offload_frozen='cpu'",
    "group offload": "is moved by diffusers' group offloading.*load .* again, and set group_offload",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_pipelines_that_cannot_be_trained_as_they_are(change, lora, tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    CHANGES[change](pipe)
    with pytest.raises(ValueError, match=MESSAGES[change]):
        trainer_for(tmp_path, model=pipe, lora=lora)


@pytest.mark.parametrize("offload", ["model offload", "sequential offload"])
def test_a_pipeline_without_its_hooks_is_trained(offload, tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    CHANGES[offload](pipe)
    pipe.remove_all_hooks()
    trainer = trainer_for(tmp_path, model=pipe, max_steps=1)
    before = trained_weights(trainer)
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in trained_weights(trainer).items())


def test_what_an_earlier_run_left_is_no_obstacle(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    for run in ("first", "second"):
        trainer_for(tmp_path / run, group_offload="block_level", offload_frozen="cpu", model=pipe)
        pipe.unload_lora_weights()  # puts diffusers' hooks in the place of those for training
    with pytest.raises(ValueError, match="transformer is moved by diffusers' group offloading.*set group_offload"):
        trainer_for(tmp_path / "third", model=pipe)


@pytest.mark.parametrize("name", ["sd3", "sd15", "flux", "wan"])
def test_fused_projections_are_seen_until_they_are_unfused(name):
    """Also on the older layers, whose mark stays."""
    pipe, _ = tiny_pipelines.build(name)
    network = pipe.unet if name == "sd15" else pipe.transformer
    network.fuse_qkv_projections()
    with pytest.raises(ValueError, match="net has fused projections"):
        check_fused("net", network)
    network.unfuse_qkv_projections()
    check_fused("net", network)


def test_frozen_parts_may_be_fused_and_compiled_and_given_ones_are_looked_at(tmp_path):
    pipe, _ = tiny_pipelines.build("sd15")
    pipe.vae.fuse_qkv_projections()
    pipe.text_encoder = torch.compile(pipe.text_encoder, backend="eager")
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True)
    check_given_parts(pipe, args, name_networks(args))
    args.cache_prompt_embeds = "memory"
    with pytest.raises(ValueError, match="text_encoder is wrapped by torch.compile and cannot leave memory"):
        check_given_parts(pipe, args, name_networks(args))
    pipe.unet.fuse_qkv_projections()
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, model_init_kwargs={"unet": pipe.unet})
    with pytest.raises(ValueError, match="unet has fused projections"):
        check_given_parts("owner/name", args, name_networks(args))


def test_group_offloading_on_disk_is_refused_beside_group_offload_too(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    offload = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path / "disk")}
    pipe.transformer.enable_group_offload(onload_device=CPU, **offload)
    with pytest.raises(ValueError, match="transformer is moved by diffusers' group offloading"):
        trainer_for(tmp_path / "run", model=pipe, group_offload="block_level")


# Processors that need torchvision


def write_index(folder, **parts):
    """A folder with nothing but the list of a pipeline's parts."""
    folder.mkdir(exist_ok=True)
    index = {"_class_name": "QwenImageEditPipeline", "_diffusers_version": diffusers.__version__, **parts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
@pytest.mark.parametrize("kind", ["Qwen2VLProcessor", "PixtralProcessor"])
def test_a_processor_that_needs_torchvision_is_refused_before_weights_are_loaded(kind, tmp_path):
    folder = write_index(tmp_path / "model", processor=["transformers", kind])
    args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True)
    message = f"QwenImageEditPipeline needs torchvision for its processor, a {kind} .* pip install torchvision"
    with pytest.raises(ImportError, match=message):
        DiffusionGRPOTrainer(folder, brightness, args)
    with pytest.raises(ImportError, match=message):
        check_packages(folder, args)
    with pytest.raises(ImportError, match=message):
        build_weightless_pipeline(tmp_path / "model", args, is_full_training=False)


@pytest.mark.parametrize("kind", ["Qwen2VLProcessor", "PixtralProcessor"])
def test_a_processor_is_not_refused_where_torchvision_is_installed_or_it_is_given(kind, monkeypatch):
    index = {"processor": ["transformers", kind]}
    check_processors(index, given=["processor"])
    for name in (kind, "AutoVideoProcessor"):
        if "torchvision" in getattr(getattr(transformers, name), "_backends", ()):
            monkeypatch.setattr(transformers, name, object)  # what transformers puts there without torchvision
    check_processors(index)


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "SiglipProcessor", "Gemma3Processor", "NoSuchProcessor"])
def test_processors_that_do_without_torchvision_are_not_refused(kind):
    other = {"_class_name": "A", "vae": ["diffusers", "AutoencoderKL"], "safety": [None, None], "flag": True}
    check_processors(other | {"processor": ["transformers", kind]})
