"""Set up what a run needs from its settings."""

import re

import pytest
import torch
from command_line import make_config
from datasets import Dataset
from diffusers import StableDiffusion3Pipeline
from tiny_runs import finished_run, logged, trainer_for

from diffusion_grpo.data.inputs import PipelineInputs
from diffusion_grpo.training.build import describe_call


def test_the_call_of_evaluations_has_plain_arguments_and_names_inputs():
    args = make_config(num_inference_steps=8, eval_num_inference_steps=20, guidance_scale=4.5, height=16)
    args.pipeline_kwargs = {"negative_prompt": "grey", "ip_adapter_image": torch.zeros(2), "max_sequence_length": 8}
    dataset = Dataset.from_dict({"prompt": ["a"], "height": [32], "answer": ["b"]})
    inputs = PipelineInputs(StableDiffusion3Pipeline, args)
    found = describe_call(inputs, dataset)
    assert found["inputs"] == ["prompt", "height", "ip_adapter_image"]
    assert found["arguments"] == {
        "num_inference_steps": 20,
        "guidance_scale": 4.5,
        "negative_prompt": "grey",
        "max_sequence_length": 8,
    }
    assert describe_call(inputs, {"held out": dataset}) == found
    args.eval_pipeline_kwargs = {"height": 64}
    larger = describe_call(inputs, dataset)
    assert "height" not in larger["inputs"] and larger["arguments"]["height"] == 64


@pytest.mark.parametrize("loss", ["dpo", "nft"])
def test_advantages_are_not_clipped_where_the_loss_chooses_samples_by_them(tmp_path, loss):
    trainer = finished_run(tmp_path, loss_type=loss, guidance_scale=1.0, advantage_clip=1e-6, max_steps=1)
    assert logged(trainer, "frac_advantage_clipped") == ([] if loss == "dpo" else [1.0])
    assert (max(map(abs, logged(trainer, "spread/advantage_max"))) > 1e-5) == (loss == "dpo")


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"loss_type": "nft", "guidance_scale": None}, True),
        ({"loss_type": "nft", "guidance_scale": 7.0}, False),  # asked for
        ({"loss_type": "nft", "guidance_scale": None, "columns": {"guidance_scale": [4.0] * 4}}, False),
        ({"loss_type": "nft", "name": "flux", "guidance_scale": None}, False),  # an input of the network
    ],
)
def test_a_default_guidance_that_is_not_trained_is_named(tmp_path, caplog, settings, is_warned):
    trainer_for(tmp_path, gradient_accumulation_steps=1, num_inference_steps=3, **settings)
    message = "loss_type='nft' trains the prediction without guidance, but .*default, guidance_scale=7. Set guidance"
    assert bool(re.search(message, caplog.text)) == is_warned
    assert is_warned or "without guidance" not in caplog.text
