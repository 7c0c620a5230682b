"""The tiny pipelines are fit for testing: real, random, deterministic, and what they are told matters."""

import pytest
import tiny_pipelines
import torch


@pytest.fixture(params=tiny_pipelines.PIPELINES)
def name(request):
    return request.param


def latents(pipe, inputs):
    """Two samples after three steps, each from noise of its own."""
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    return pipe(**inputs, num_inference_steps=3, generator=generators, output_type="latent", return_dict=False)[0]


def test_same_seed_same_latents_and_prompts_and_guidance_matter(name):
    pipe, inputs = tiny_pipelines.build(name)
    first = latents(pipe, inputs)
    assert first.isfinite().all()
    assert torch.equal(first, latents(*tiny_pipelines.build(name)))
    for change in ({"prompt": ["a dog", "a cat"]}, {"guidance_scale": 2.0}):
        moved = (first - latents(pipe, inputs | change)).flatten(1).abs().mean(1)
        assert moved[0] > 0.01, change  # the second prompt is the same


def test_outputs_are_of_order_one_and_no_weight_is_zero(name):
    pipe, inputs = tiny_pipelines.build(name)
    outputs = []
    network = tiny_pipelines.policy(pipe)
    network.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    latents(pipe, inputs)
    assert 0.1 < outputs[0].std() < 2
    assert all((parameter != 0).all() for parameter in network.parameters())
    assert not any(module.training for module in network.modules())


def test_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    tiny_pipelines.build("sd3")
    assert torch.equal(state, torch.get_rng_state())
