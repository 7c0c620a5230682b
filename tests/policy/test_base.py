"""What every policy shares: its networks, the arguments of a call, and what it leaves alone."""

import inspect

import pytest
import tiny_pipelines
import torch

from diffusion_grpo.policy.base import call_arguments, policy_component
from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.drivers import UnsupportedPipeline


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("sd3", None, ("transformer",)),
        ("sd15", None, ("unet",)),
        ("wan_experts", None, ("transformer", "transformer_2")),
        ("wan_experts", "transformer_2", ("transformer_2",)),
        ("wan_experts", "transformer, transformer_2", ("transformer", "transformer_2")),
        ("wan_experts", ["transformer_2", "transformer"], ("transformer_2", "transformer")),
        ("sd3", "vae", ("vae",)),
    ],
)
def test_the_trained_networks(name, wanted, expected):
    assert policy_component(tiny_pipelines.build(name)[0], wanted) == expected


def test_a_pipeline_without_a_network_is_refused():
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.transformer = None
    with pytest.raises(UnsupportedPipeline, match="has none of the networks transformer, unet, prior, decoder"):
        policy_component(pipe)


def test_a_call_has_one_generator_per_sample_seeded_by_it():
    pipe, inputs = tiny_pipelines.build("sd3")
    seeds = torch.tensor([5, 6])
    arguments = call_arguments(pipe, inputs, 4, seeds)
    assert arguments["num_inference_steps"] == 4 and arguments["output_type"] == "pil"
    assert [generator.initial_seed() for generator in arguments["generator"]] == [5, 6]
    assert call_arguments(pipe, {**inputs, "output_type": "latent"}, None, seeds)["output_type"] == "latent"
    single = call_arguments(pipe, inputs, None, seeds[:1])
    assert single["generator"].initial_seed() == 5 and "num_inference_steps" not in single
    assert set(arguments) <= set(inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters)


def test_settings_of_tokens_are_refused_where_none_are_drawn():
    pipe, _ = tiny_pipelines.build("sd3")
    assert DenoisingPolicy(pipe, sampling={"temperature": None}).sampling is None
    with pytest.raises(ValueError, match="does not sample tokens; leave out temperature"):
        DenoisingPolicy(pipe, sampling={"temperature": 1.0, "top_k": None})


def test_the_global_generator_is_left_as_it_was():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy, state = DenoisingPolicy(pipe), torch.get_rng_state()
    from diffusion_grpo.policy.rollout import rollout

    rollout(policy, inputs, seeds=[1, 2], num_inference_steps=2)
    assert torch.equal(torch.get_rng_state(), state) and not policy.draws_globally
