"""What is known of a pipeline before its weights are loaded, and what cannot be trained as it is."""

import json

import diffusers
import pytest
import tiny_pipelines
import torch
import transformers
from command_line import make_config
from diffusers import GlmImagePipeline, WanPipeline
from peft import IA3Config, LoraConfig
from tiny_runs import brightness, trainer_for
from transformers.utils import is_torchvision_available

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.training.model_checks import (
    check_given_parts,
    check_peft_config,
    check_processors,
    check_trained_networks,
)
from diffusion_grpo.training.model_index import choose_networks

CPU = torch.device("cpu")
CHANGES = {
    "fused": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "compiled": lambda pipe: setattr(pipe, "transformer", torch.compile(pipe.transformer, backend="eager")),
    "model offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential offload": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    "group offload": lambda pipe: pipe.enable_group_offload(onload_device=CPU, offload_type="leaf_level"),
}
MESSAGES = {"fused": "unfuse_qkv_projections", "compiled": "torch_compile=True"}  # and for the others:
OFFLOADED = "set offload_frozen='cpu', or group_offload"


@pytest.mark.parametrize("change", CHANGES)
def test_pipelines_that_cannot_be_trained_as_they_are(change, tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    CHANGES[change](pipe)
    with pytest.raises(ValueError, match=MESSAGES.get(change, OFFLOADED)):
        trainer_for(tmp_path, model=pipe)


@pytest.mark.parametrize("offload", ["model offload", "sequential offload"])
def test_a_pipeline_without_its_hooks_is_accepted(offload):
    pipe, _ = tiny_pipelines.build("sd3")
    CHANGES[offload](pipe)
    pipe.remove_all_hooks()
    check_given_parts(pipe, make_config(), ["transformer"])


def test_what_an_earlier_run_left_is_no_obstacle(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    for run in ("first", "second"):
        trainer_for(tmp_path / run, group_offload="block_level", offload_frozen="cpu", model=pipe)
        pipe.unload_lora_weights()  # puts diffusers' hooks in the place of those for training
    with pytest.raises(ValueError, match=OFFLOADED):
        trainer_for(tmp_path / "third", model=pipe)


@pytest.mark.parametrize("name", ["sd3", "sd15", "flux"])
def test_fused_projections_are_seen_until_they_are_unfused(name):
    """Also on the older layers (sd15), whose mark stays. Those of a frozen part are no obstacle."""
    pipe, _ = tiny_pipelines.build(name)
    network = pipe.unet if name == "sd15" else pipe.transformer
    network.fuse_qkv_projections()
    pipe.vae.fuse_qkv_projections()
    with pytest.raises(ValueError, match="has fused projections"):
        check_given_parts(pipe, make_config(), ["transformer", "unet"])
    network.unfuse_qkv_projections()
    check_given_parts(pipe, make_config(), ["transformer", "unet"])


def test_frozen_parts_may_be_compiled_and_given_ones_are_looked_at():
    pipe, _ = tiny_pipelines.build("sd15")
    pipe.text_encoder = torch.compile(pipe.text_encoder, backend="eager")
    check_given_parts(pipe, make_config(), ["unet"])
    given = {"unet": torch.compile(pipe.unet, backend="eager")}
    with pytest.raises(ValueError, match="torch_compile"):
        check_given_parts("owner/name", make_config(model_init_kwargs=given), ["unet"])
    with pytest.raises(ValueError, match="model_init_kwargs"):
        check_given_parts(pipe, make_config(model_init_kwargs={"torch_dtype": "float16"}), ["unet"])


def test_group_offloading_on_disk_is_refused_beside_group_offload_too(tmp_path):
    pipe, _ = tiny_pipelines.build("sd3")
    offload = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path / "disk")}
    pipe.transformer.enable_group_offload(onload_device=CPU, **offload)
    with pytest.raises(ValueError, match=OFFLOADED):
        trainer_for(tmp_path / "run", model=pipe, group_offload="block_level")


# Processors that need torchvision


def write_index(folder, **parts):
    """A folder with nothing but the list of a pipeline's parts."""
    folder.mkdir(exist_ok=True)
    index = {"_class_name": "QwenImageEditPipeline", "_diffusers_version": diffusers.__version__, **parts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_is_refused_before_weights_are_loaded(tmp_path):
    folder = write_index(tmp_path / "model", processor=["transformers", "Qwen2VLProcessor"])
    args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ImportError, match="pip install torchvision"):
        DiffusionGRPOTrainer(folder, brightness, args)


@pytest.mark.parametrize("kind", ["Qwen2VLProcessor", "PixtralProcessor"])
def test_a_processor_is_not_refused_where_torchvision_is_installed_or_it_is_given(kind, monkeypatch):
    index = {"processor": ["transformers", kind]}
    check_processors(index, given=["processor"])
    for name in (kind, "AutoVideoProcessor"):
        if "torchvision" in getattr(getattr(transformers, name), "_backends", ()):
            monkeypatch.setattr(transformers, name, object)  # what transformers puts there without torchvision
    check_processors(index)
    check_processors({"_class_name": "A", "processor": ["transformers", "Gemma3Processor"], "safety": [None, None]})


def test_a_named_model_is_refused_before_its_weights_are_read(tmp_path):
    """The folder has nothing but the index."""
    index = {"_class_name": "Ideogram4Pipeline", "transformer": ["diffusers", "Ideogram4Transformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedPipeline, match="guidance_schedule"):
        DiffusionGRPOTrainer(str(tmp_path), brightness, make_config(loss_type="nft"))


# Networks that a run trains

WAN = {"transformer": 0, "transformer_2": 0, "vae": 0}


class Refusing(DistributedBackend):
    """Notes what it is asked."""

    def check_run(self, component, **run):
        self.asked = component, run
        raise ValueError("not with these processes")


@pytest.mark.parametrize(
    ("components", "train_component", "names"),
    [
        (WAN, None, ("transformer", "transformer_2")),
        (WAN, "transformer_2", ("transformer_2",)),
        ({"unet": 0, "text_encoder": 0}, None, ("unet",)),
        ({"vae": 0}, None, ()),
    ],
)
def test_the_names_are_those_that_the_loaded_pipeline_would_have(components, train_component, names):
    assert choose_networks(components, train_component) == names


@pytest.mark.parametrize(
    ("pipeline", "networks", "settings", "expected"),
    [
        (WanPipeline, ("transformer", "transformer_2"), {"step_selection": "sample"}, {"own_steps": True}),
        (GlmImagePipeline, ("vision_language_encoder",), {}, {"draws_tokens": True}),
    ],
)
def test_the_processes_are_asked_about_them(pipeline, networks, settings, expected):
    backend = Refusing(None, ContextGroups())
    with pytest.raises(ValueError, match="not with these processes"):
        check_trained_networks(networks, pipeline, make_config(**settings), backend)
    run = {"processes": 1, "own_steps": False, "draws_tokens": False}
    assert backend.asked == (networks, run | expected)


# LoRAs that cannot be trained exactly, or loaded again


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (IA3Config(), "LoraConfig"),
        ({"r": 4}, "LoraConfig"),
        (LoraConfig(init_lora_weights="olora"), "init_lora_weights"),
        (LoraConfig(bias="lora_only"), "bias"),
        (LoraConfig(modules_to_save=["proj_out"]), "modules_to_save"),
        (LoraConfig(lora_dropout=0.1), "lora_dropout"),
    ],
    ids=str,
)
def test_adapters_that_make_a_replay_differ_are_refused(config, name):
    with pytest.raises(ValueError, match=name):
        check_peft_config(config)


def test_adapters_that_train_exactly():
    check_peft_config(None)
    for init in (True, False, "gaussian", "orthogonal"):
        check_peft_config(LoraConfig(init_lora_weights=init))
