"""What a model's index says is known and checked before any weights are read."""

import json

import diffusers
import pytest
import tiny_pipelines
from command_line import make_config
from tiny_runs import brightness

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.training.model_index import find_networks, pipeline_class


def test_the_class_of_a_pipeline_is_known_before_its_weights_are_loaded(tmp_path):
    pipe = tiny_pipelines.build("sd3")[0]
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert pipeline_class(pipe, make_config()) is type(pipe)
    assert pipeline_class(str(tmp_path), make_config()) is diffusers.FluxPipeline
    assert pipeline_class("tiny", make_config()) is diffusers.StableDiffusion3Pipeline
    elsewhere = make_config(model_init_kwargs={"custom_pipeline": "mine"})
    assert pipeline_class(str(tmp_path), elsewhere) is None


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
    ("index", "settings", "error", "message"),
    [
        (
            {"_class_name": "GlmImagePipeline", "vision_language_encoder": ["transformers", "GlmImageForCausalLM"]},
            {"train_component": "vision_language_encoder", "loss_type": "nft"},
            ValueError,
            "'nft' is for denoising steps; set loss_type='grpo' to train tokens",
        ),
        (
            {"_class_name": "Ideogram4Pipeline", "transformer": ["diffusers", "Ideogram4Transformer2DModel"]},
            {"loss_type": "nft"},
            UnsupportedPipeline,
            "also applies guidance through guidance_schedule.*use loss_type='grpo'",
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
