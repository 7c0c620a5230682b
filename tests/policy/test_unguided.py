"""Calls without classifier-free guidance."""

import diffusers
import pytest
import tiny_pipelines
import torch

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy, denoise, rollout
from diffusion_grpo.policy.unguided import find_default_guidance, find_guidance_argument, switch_guidance_off


@pytest.mark.parametrize(
    ("name", "given", "off"),
    [
        ("flux", {"guidance_scale": 3.5}, {"guidance_scale": 3.5, "true_cfg_scale": 1.0}),  # an input of the network
        ("sd3", {"guidance_scale": 3.5, "negative_prompt": "dull"}, {"guidance_scale": 1.0}),
        ("qwen_image", {"true_cfg_scale": 4.0, "negative_prompt": "dull"}, {"true_cfg_scale": 1.0}),
        ("wan_experts", {"guidance_scale": 4.0}, {"guidance_scale": 1.0}),  # a second scale follows the first
    ],
)
def test_scales_are_switched_off_and_negative_prompts_go_with_them(name, given, off):
    pipe, _ = tiny_pipelines.build(name)
    assert switch_guidance_off(pipe, [pipe.transformer], given | {"height": 16}) == off | {"height": 16}


def test_a_distilled_network_keeps_its_scale():
    sdxl, inputs = tiny_pipelines.build("sdxl")
    sdxl.unet.register_to_config(time_cond_proj_dim=256)
    given = inputs | {"guidance_scale": 7.0}
    assert switch_guidance_off(sdxl, [sdxl.unet], given) == given
    upscaler = object.__new__(diffusers.StableDiffusionLatentUpscalePipeline)  # whose network embeds a level of noise
    assert switch_guidance_off(upscaler, [sdxl.unet], given)["guidance_scale"] == 1.0


def test_guidance_as_a_component_is_refused():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.__dict__["guider"] = object()
    with pytest.raises(
        UnsupportedPipeline, match="guidance through its component object, which no argument switches off"
    ):
        switch_guidance_off(pipe, [pipe.transformer], inputs)


def test_an_inner_pipelines_conditions_keep_their_negatives():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.__dict__["prior_pipe"] = tiny_pipelines.build("sd15")[0]
    assert switch_guidance_off(pipe, [pipe.transformer], inputs | {"negative_prompt": "dull"})["negative_prompt"]


# what is guided only if asked for
GUIDED = {
    "flux": {"true_cfg_scale": 4.0, "negative_prompt": ["dull", "dull"]},
    "qwen_image": {"true_cfg_scale": 4.0, "negative_prompt": ["dull", "dull"]},
    "ltx2": {"guidance_scale": 3.0, "audio_guidance_scale": 7.0, "modality_scale": 3.0, "audio_modality_scale": 3.0}
    | {"stg_scale": 1.0, "audio_stg_scale": 1.0, "spatio_temporal_guidance_blocks": [0]},
}


@pytest.mark.parametrize("name", sorted(tiny_pipelines.EVERY.keys() - {"anyflow"}))  # whose network predicts jumps
def test_the_network_is_called_once_and_with_one_row_per_sample(name):
    """Guidance would double the rows, or the calls."""
    pipe, inputs = tiny_pipelines.build(name)
    policy, inputs = DenoisingPolicy(pipe), inputs | GUIDED.get(name, {})
    count = 1 if isinstance(inputs.get("prompt"), str) else 2
    _, clean = rollout(
        policy, inputs, seeds=range(count), num_inference_steps=3, keeps_clean=True, steps=[[1]] * count
    )
    rows = []

    def watch(network):
        def forward(*args, **kwargs):
            output = network(*args, **kwargs)
            rows.append(len(output[0]))
            return output

        return forward

    with torch.no_grad():
        for _ in range(2):  # shapes are known in the second
            rows.clear()
            denoise(policy, inputs, clean, 1, forward=[watch(network.forward) for network in policy.networks])
    images = [1] * count if name == "glm_image_edit" else []  # are passed by themselves
    assert rows == [*images, count]


def unguided(name, **inputs):
    """What a call of diffusers' class is given; no component is needed for that."""
    return switch_guidance_off(object.__new__(getattr(diffusers, name)), [], inputs)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("OmniGenPipeline", {"guidance_scale": 1.0, "img_guidance_scale": 1.0}),
        ("DreamLitePipeline", {"guidance_scale": 1.0, "image_guidance_scale": 1.0}),
        ("DreamLiteMobilePipeline", {}),  # which has none
        ("StableVideoDiffusionPipeline", {"min_guidance_scale": 1.0, "max_guidance_scale": 1.0}),
        ("StableDiffusionSAGPipeline", {"guidance_scale": 1.0, "sag_scale": 0.0}),
        ("ChromaInpaintPipeline", {"guidance_scale": 1.0, "true_cfg_scale": 1.0}),
        ("ZImageImg2ImgPipeline", {"guidance_scale": 0.0}),  # whose guidance is cond + scale * (cond - uncond)
        ("Krea2Pipeline", {"guidance_scale": 0.0}),
        ("KandinskyV22CombinedPipeline", {"guidance_scale": 1.0}),  # not the prior's
    ],
)
def test_every_scale_is_set_to_where_it_changes_nothing(name, off):
    assert unguided(name) == off


def test_a_scale_that_is_not_known_is_refused():
    for name, scale in (
        ("Ideogram4Pipeline", "guidance_schedule"),
        ("CycleDiffusionPipeline", "source_guidance_scale"),
    ):
        with pytest.raises(
            UnsupportedPipeline, match=f"^{name} also applies .* through {scale}, which .*loss_type='grpo'"
        ):
            unguided(name)
    schedule = {"guidance_scale": 4.0, "guidance_schedule": None}
    assert unguided("Ideogram4Pipeline", **schedule) == schedule | {"guidance_scale": 1.0}


def test_negatives_that_a_call_needs_stay():
    given = {"negative_image_embeds": 1, "negative_prompt": "dull"}
    assert unguided("KandinskyV22Pipeline", **given) == {"negative_image_embeds": 1, "guidance_scale": 1.0}


def test_the_argument_that_guides_is_the_one_with_an_effect():
    def argument(name: str, network: str = "transformer") -> str:
        pipe, _ = tiny_pipelines.build(name)
        return find_guidance_argument(pipe, [getattr(pipe, network)])

    assert argument("qwen_image") == argument("qwen_image", "text_encoder") == "true_cfg_scale"
    assert argument("sd3") == argument("wan_experts") == argument("sdxl", "unet") == "guidance_scale"
    flux, _ = tiny_pipelines.build("flux")
    flux.transformer.register_to_config(guidance_embeds=True)  # dev
    assert find_guidance_argument(flux, [flux.transformer]) == "guidance_scale"
    flux.transformer.register_to_config(guidance_embeds=False)  # schnell
    assert find_guidance_argument(flux, [flux.transformer]) == "true_cfg_scale"
    with pytest.raises(UnsupportedPipeline, match="DDPMPipeline takes neither guidance_scale nor true_cfg_scale"):
        find_guidance_argument(diffusers.DDPMPipeline(None, None), [])


@pytest.mark.parametrize(
    ("name", "default"),
    [("sd3", 7.0), ("sdxl", 5.0), ("flux", None), ("qwen_image", None), ("sd15_controlnet", 7.5), ("z_image", 5.0)],
)
def test_the_default_of_classifier_free_guidance_is_found(name, default):
    pipe, _ = tiny_pipelines.build(name)
    network = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    assert find_default_guidance(pipe, [network]) == default
