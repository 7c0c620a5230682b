"""Networks that a run trains are named from a model's index, and refused before any weights are read."""

import json

import pytest
import tiny_pipelines
from command_line import make_config
from diffusers import GlmImagePipeline, WanPipeline
from tiny_runs import brightness

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.training.model import find_networks
from diffusion_grpo.training.trained_networks import check_tokens, check_trained_networks, choose_networks

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
        (WAN, "transformer, transformer_2", ("transformer", "transformer_2")),
        ({"transformer_2": 0, "vae": 0}, None, ("transformer_2",)),
        ({"unet": 0, "text_encoder": 0}, None, ("unet",)),
        ({"vae": 0}, None, ()),
    ],
)
def test_the_names_are_those_that_the_loaded_pipeline_would_have(components, train_component, names):
    assert choose_networks(components, train_component) == names


@pytest.mark.parametrize("name", ["sd3", "sd15", "wan_experts", "glm_image"])
def test_an_index_and_its_pipeline_train_the_same_networks(tmp_path, name):
    pipe, _ = tiny_pipelines.build(name)
    (tmp_path / "model_index.json").write_text(pipe.to_json_string())
    args = make_config()
    assert find_networks(str(tmp_path), args) == find_networks(pipe, args)


def test_a_component_that_is_left_out_of_the_pipeline_is_not_trained(tmp_path):
    index = {name: ["diffusers", "WanTransformer3DModel"] for name in ("transformer", "transformer_2")}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"} | index))
    assert find_networks(str(tmp_path), make_config()) == ("transformer", "transformer_2")
    assert find_networks(str(tmp_path), make_config(model_init_kwargs={"transformer_2": None})) == ("transformer",)


@pytest.mark.parametrize(
    ("pipeline", "networks", "settings", "expected"),
    [
        (WanPipeline, ("transformer", "transformer_2"), {"permute_steps": True}, {"own_steps": True}),
        (WanPipeline, ("transformer",), {"advantage_estimator": "gae"}, {"has_values": True}),
        (GlmImagePipeline, ("vision_language_encoder",), {}, {"draws_tokens": True}),
        (GlmImagePipeline, ("transformer",), {}, {}),
    ],
)
def test_the_processes_are_asked_about_them(pipeline, networks, settings, expected):
    backend = Refusing(None, ContextGroups())
    with pytest.raises(ValueError, match="not with these processes"):
        check_trained_networks(networks, pipeline, make_config(**settings), backend)
    run = {"processes": 1, "own_steps": False, "draws_tokens": False, "has_values": False}
    assert backend.asked == (networks, run | expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_level": 0.7}, "noise_level=0.7 is for denoising steps"),
        ({"loss_type": "diffusion_grpo.losses.dppo"}, "dppo' compares means of denoising steps, which tokens lack"),
    ],
)
def test_settings_of_denoising_steps_are_refused_for_tokens(settings, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(make_config(**settings))


@pytest.mark.parametrize(
    ("index", "settings", "error", "message"),
    [
        (
            {"_class_name": "GlmImagePipeline", "vision_language_encoder": ["transformers", "GlmImageForCausalLM"]},
            {"train_component": "vision_language_encoder", "loss_type": "nft"},
            ValueError,
            "'nft' is for denoising steps; tokens are trained with grpo",
        ),
        (
            {"_class_name": "Ideogram4Pipeline", "transformer": ["diffusers", "Ideogram4Transformer2DModel"]},
            {"loss_type": "nft"},
            UnsupportedPipeline,
            "also guides by guidance_schedule.*use loss_type='grpo'",
        ),
    ],
)
def test_a_named_model_is_refused_before_its_weights_are_read(tmp_path, index, settings, error, message):
    """The folder has nothing but the index."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        DiffusionGRPOTrainer(
            str(folder), brightness, DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **settings)
        )
