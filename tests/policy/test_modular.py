"""A modular pipeline is the same policy as a classic one with its components, and guiders act as they do there."""

import copy
import functools
import inspect

import pytest
import tiny_pipelines
import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    DiffusionPipeline,
    LayerSkipConfig,
    ModularPipeline,
    PerturbedAttentionGuidance,
    SkipLayerGuidance,
    StableDiffusion3AutoBlocks,
    TangentialClassifierFreeGuidance,
)
from diffusers.modular_pipelines import (
    InputParam,
    LoopSequentialPipelineBlocks,
    ModularPipelineBlocks,
    OutputParam,
    SequentialPipelineBlocks,
)
from peft import LoraConfig, get_peft_model
from stand_ins import offline
from sweep_builders import (
    around,
    as_modular,
    cosmos3,
    ernie_image,
    fill_blanks,
    flux2,
    hunyuan15,
    ideogram4,
    krea2,
    layered,
    qwen_image21,
    wider,
)
from tiny_pipelines import basic, large, more, sound
from tiny_runs import LORA

from diffusion_grpo import check_pipeline
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.modular import as_pipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy, denoise, replay, rollout, sample_seed

BOTH = [name for name in tiny_pipelines.MODULAR if name.startswith("modular_")]

# guidance by two passes, where the classic pipeline makes one of twice the size, rounds differently
ROUNDED = {"modular_sd3": 5e-6, "modular_sdxl": 3e-5, "LTX2": 5e-6}


def with_expert(make):
    """Wan with a second network for the later steps, guided at a scale of its own."""
    pipe, inputs = make()
    parts = {**pipe.components, "transformer_2": wider("transformer")(pipe)}
    return type(pipe)(**parts, boundary_ratio=0.875), inputs | {"guidance_scale_2": 3.0}


def wan21_image():
    """Wan 2.1 from an image, which CLIP reads too."""
    clip = {"image_encoder": more.clip_vision(), "image_processor": more.clip_image_processor()}
    network = wider("transformer", image_dim=basic.WIDTH, added_kv_proj_dim=24)
    return around("WanImageToVideoPipeline", more.wan_image, transformer=network, **clip)


def qwen_edit(name="QwenImageEditPipeline"):
    """One image for one prompt; the modular pipelines take all images of a list for each prompt."""
    _, given = large.qwen_image_edit()
    own = {"image": given["image"][0], "prompt": "a cat", "negative_prompt": " "}
    return around(name, large.qwen_image_edit, own)


# families whose tiny pipelines the sweep has: what makes the classic one, and what the modular call takes instead
FAMILIES = {
    "Cosmos3Omni": (cosmos3, {}),
    "ErnieImage": (ernie_image, {}),
    "Flux2": (flux2, {}),
    "HunyuanVideo15": (hunyuan15, {}),
    "Ideogram4": (ideogram4, {"guidance_scale": None, "guidance_schedule": [7.0] * 3}),
    "Krea2": (krea2, {}),
    "LTX2": (functools.partial(sound.ltx2, is_guided=True), {}),
    "QwenImage21": (qwen_image21, {}),
    "QwenImageEdit": (qwen_edit, {}),
    "QwenImageEditPlus": (functools.partial(qwen_edit, "QwenImageEditPlusPipeline"), {}),
    "QwenImageLayered": (layered, {}),
    "Wan22Image2Video": (functools.partial(with_expert, more.wan_image), {}),
    "Wan22Vace": (functools.partial(with_expert, more.wan_vace), {}),
    "WanImage2Video": (wan21_image, {}),
}


def measure(pipe, inputs):
    """Samples, log-probabilities, and the gradient of a LoRA whose second matrices are not zero."""
    torch.manual_seed(0)
    policy = DenoisingPolicy(pipe)
    config = LoraConfig(**LORA, init_lora_weights=False)
    loras = [get_peft_model(network.requires_grad_(False), config) for network in policy.networks]
    rows = 1 if isinstance(inputs["prompt"], str) else len(inputs["prompt"])
    settings = {"seeds": [sample_seed(0, row) for row in range(rows)], "num_inference_steps": 3}
    samples, trajectory = rollout(policy, inputs | {"output_type": "pt"}, **settings)
    scored = replay(policy, inputs | {"output_type": "pt"}, trajectory, 1)
    scored.log_prob.sum().backward()
    gradients = [p.grad for lora in loras for p in lora.parameters() if p.grad is not None]
    return as_tensor(samples), trajectory.log_probs, torch.cat([g.flatten() for g in gradients])


def as_tensor(samples):
    """One tensor, also of samples that are several images each."""
    return (
        torch.stack([as_tensor(each) for each in samples]) if isinstance(samples, list) else torch.as_tensor(samples)
    )


@pytest.mark.parametrize("name", BOTH)
def test_the_modular_form_gives_the_same_samples_log_probabilities_and_gradient(name):
    pipe, inputs = tiny_pipelines.build(name)
    classic, given = build_classic(name)
    assert_same(measure(pipe, inputs), measure(classic, given), name)


def assert_same(found, expected, name):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=ROUNDED.get(name, 1e-6))
    assert found[2].abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_both_forms_of_more_families_give_the_same(name):
    make, instead = FAMILIES[name]
    with offline():
        classic, given = build_filled(make)
        pipe, inputs = as_modular(f"{name}ModularPipeline", functools.partial(build_filled, make), instead)
        assert_same(measure(pipe, inputs), measure(classic, given), name)


def build_filled(make):
    """A pipeline with the weights that any other one of the same parts gets, none of them zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, inputs = make()
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                fill_blanks(part.eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"prompt": "a cat", **inputs}


def build_classic(name):
    """The classic pipeline whose components a modular one has, with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, inputs = tiny_pipelines.modular.PIPELINES[name].args[1]()
        tiny_pipelines.randomize(tiny_pipelines.policy(pipe))
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe, {"prompt": list(tiny_pipelines.PROMPTS), **inputs}


def test_the_pipeline_keeps_its_own_interface():
    pipe, inputs = tiny_pipelines.MODULAR["modular_sd3"]()
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.update_components(guider=ClassifierFreeGuidance(4.0, stop=0.5))  # which does not guide the last step
    call = inputs | {"prompt": tiny_pipelines.PROMPTS, "num_inference_steps": 2, "output_type": "pt"}
    del call["guidance_scale"]
    before = pipe(**call, generator=torch.Generator().manual_seed(0), output="images")
    as_pipeline(pipe)
    assert isinstance(pipe, DiffusionPipeline) and isinstance(pipe, ModularPipeline)
    assert type(pipe).__name__ == "StableDiffusion3ModularPipeline"
    state = pipe(**call, generator=torch.Generator().manual_seed(0))
    assert torch.equal(state.images, before) and state.latents.shape[0] == 2
    scale = inspect.signature(type(pipe).__call__).parameters["guidance_scale"]
    assert scale.default == pipe.guider.guidance_scale and as_pipeline(pipe) is pipe


def count_passes(pipe, inputs, run):
    made, network = [], pipe.transformer
    forward = network.forward
    network.forward = lambda *args, **kwargs: made.append(1) or forward(*args, **kwargs)
    try:
        return run(DenoisingPolicy(pipe), inputs), len(made)
    finally:
        del network.forward


def test_losses_on_renoised_samples_make_one_pass():
    pipe, inputs = tiny_pipelines.build("modular_wan")
    seeds = {"seeds": [3, 4], "num_inference_steps": 3}
    (_, clean), passes = count_passes(
        pipe, inputs, lambda policy, call: rollout(policy, call, steps=[[1], [1]], keeps_clean=True, **seeds)
    )
    assert passes == 6  # two in each step
    found, passes = count_passes(pipe, inputs, lambda policy, call: denoise(policy, call, clean, 1))
    assert passes == 2  # one for the shape of the output, one in the step
    plain, given = tiny_pipelines.build("wan")
    torch.testing.assert_close(found.clean, denoise(DenoisingPolicy(plain), given, clean, 1).clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["flux3_distilled", "anyflow"])
def test_a_network_that_predicts_jumps_has_no_clean_sample_to_train(name):
    pipe, inputs = tiny_pipelines.build(name)
    inputs["prompt"] = "a cat"
    seeds = {"seeds": [3], "num_inference_steps": 3}
    _, clean = rollout(pipe, inputs, steps=[[1]], keeps_clean=True, **seeds)
    with pytest.raises(UnsupportedPipeline, match="flow map"):
        denoise(pipe, inputs, clean, 1)


@pytest.mark.parametrize("scale, is_on, call", [(4.0, False, {"guidance_scale": "off"}), (1.0, True, {})])
def test_a_guider_of_one_pass_guides_calls_with_a_scale(scale, is_on, call):
    pipe, inputs = tiny_pipelines.build("modular_wan")
    settings = {"seeds": [3, 4], "num_inference_steps": 3, "steps": [[0], [0]]}
    del inputs["guidance_scale"]
    _, expected = rollout(pipe, inputs | {"guidance_scale": 5.0}, **settings)
    guider = ClassifierFreeGuidance(scale)
    guider._enabled = is_on
    pipe.update_components(guider=guider)
    policy = DenoisingPolicy(pipe)
    _, alone = rollout(policy, inputs | call, **settings)
    _, guided = rollout(policy, inputs | {"guidance_scale": 5.0}, **settings)  # with the prompts of the other call
    assert torch.equal(guided.next_latents, expected.next_latents)
    assert not torch.equal(alone.next_latents, expected.next_latents)


FROM_START = {"start": 0.0, "stop": 1.0}  # their own third pass: in each step after the first
WITHOUT_LAYER = {f"skip_layer_guidance_{name}": value for name, value in FROM_START.items()}
PERTURBED = {f"perturbed_guidance_{name}": value for name, value in FROM_START.items()}
SCORES = LayerSkipConfig([0], skip_attention=False, skip_attention_scores=True, skip_ff=False)


@pytest.mark.parametrize(
    "name, guider, passes",
    [
        ("modular_wan", TangentialClassifierFreeGuidance(4.0), 6),
        ("modular_wan", AdaptiveProjectedGuidance(4.0), 6),
        ("modular_wan", SkipLayerGuidance(4.0, skip_layer_config=LayerSkipConfig([0]), **WITHOUT_LAYER), 8),
        ("modular_z_image", PerturbedAttentionGuidance(4.0, perturbed_guidance_config=SCORES, **PERTURBED), 8),
    ],
    ids=["tangential", "projected", "skipped layer", "perturbed attention"],
)
def test_other_guiders_are_replayed(name, guider, passes):
    pipe, inputs = tiny_pipelines.build(name)
    pipe.update_components(guider=guider)
    inputs = {key: value for key, value in inputs.items() if key != "guidance_scale"}
    report = check_pipeline(pipe, inputs, num_inference_steps=3)
    assert report.trains and report.max_ratio_error == 0.0, report.reason
    seeds = {"seeds": [3, 4], "num_inference_steps": 3}
    assert count_passes(pipe, inputs, lambda policy, call: rollout(policy, call, **seeds))[1] == passes


def test_a_guider_with_a_memory_is_refused():
    pipe, inputs = tiny_pipelines.build("modular_wan")
    pipe.update_components(guider=AdaptiveProjectedGuidance(4.0, adaptive_projected_guidance_momentum=-0.5))
    report = check_pipeline(pipe, inputs, num_inference_steps=3)
    assert not report.trains and "momentum_buffer" in report.reason


class Halve(ModularPipelineBlocks):
    """A user's block in the loop: it halves the prediction."""

    @property
    def inputs(self):
        return [InputParam("strength_of_it", default=0.5)]

    @torch.no_grad()
    def __call__(self, components, block_state, i, t):
        block_state.noise_pred = block_state.noise_pred * block_state.strength_of_it
        return components, block_state


def own_blocks():
    """SD3's blocks for text to image, with `Halve` between the network and the scheduler."""
    # a copy, because all instances share the blocks inside
    blocks = copy.deepcopy(StableDiffusion3AutoBlocks().get_workflow("text2image").sub_blocks)
    for block in blocks.values():
        if isinstance(block, LoopSequentialPipelineBlocks):
            block.sub_blocks.insert("halve", Halve(), 1)
    return SequentialPipelineBlocks.from_blocks_dict(blocks)


def test_own_blocks_train():
    plain, inputs = tiny_pipelines.build("modular_sd3")
    pipe = own_blocks().init_pipeline()
    pipe.update_components(**{name: part for name, part in plain.components.items() if name != "guider"})
    reports = [
        check_pipeline(pipe, inputs | {"strength_of_it": share}, num_inference_steps=3, noise_level=0.5)
        for share in (0.5, 0.25)
    ]
    assert all(report.trains and report.max_ratio_error == 0.0 for report in reports), reports
    assert reports[0].grad_norm > reports[1].grad_norm


def test_blocks_without_a_sample_are_refused():
    blocks = own_blocks()
    blocks.sub_blocks.popitem()
    with pytest.raises(UnsupportedPipeline, match="sample"):
        as_pipeline(SequentialPipelineBlocks.from_blocks_dict(blocks.sub_blocks).init_pipeline())


class Wrong(ModularPipelineBlocks):
    """A last block that replaces the images."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    @property
    def intermediate_outputs(self):
        return [OutputParam("images")]

    def __call__(self, components, state):
        state.set("images", self.value)
        return components, state


@pytest.mark.parametrize("value", [None, "a text"])
def test_an_output_that_is_no_sample_is_refused(value):
    plain, inputs = tiny_pipelines.build("modular_sd3")
    blocks = own_blocks().sub_blocks
    blocks.insert("wrong", Wrong(value), len(blocks))
    pipe = SequentialPipelineBlocks.from_blocks_dict(blocks).init_pipeline()
    pipe.update_components(**{name: part for name, part in plain.components.items() if name != "guider"})
    report = check_pipeline(pipe, inputs, num_inference_steps=3)
    assert not report.trains and type(value).__name__ in report.reason and "samples" in report.reason


def test_a_missing_guider_is_refused():
    pipe, _ = tiny_pipelines.MODULAR["modular_wan"]()
    pipe.guider = None
    with pytest.raises(UnsupportedPipeline, match="guider"):
        as_pipeline(pipe)
