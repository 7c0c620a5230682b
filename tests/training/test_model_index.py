"""What is known of a pipeline before its weights are loaded."""

import diffusers
import pytest
import tiny_pipelines
from command_line import make_config

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
    without = make_config(model_init_kwargs={"transformer_2": None})
    assert "transformer_2" not in find_networks(str(tmp_path), without)
