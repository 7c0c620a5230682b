"""Calls without classifier-free guidance."""

import pytest
import tiny_pipelines

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.unguided import switch_guidance_off


def test_guidance_that_the_network_takes_as_an_input_stays():
    flux, inputs = tiny_pipelines.build("flux")
    off = switch_guidance_off(flux, [flux.transformer], inputs | {"guidance_scale": 3.5})
    assert off["true_cfg_scale"] == 1.0 and off["guidance_scale"] == 3.5
    sd3, inputs = tiny_pipelines.build("sd3")
    off = switch_guidance_off(sd3, [sd3.transformer], inputs | {"guidance_scale": 3.5, "negative_prompt": "dull"})
    assert off["guidance_scale"] == 1.0 and "negative_prompt" not in off


def test_negative_prompts_go_with_the_guidance_and_stay_with_an_embedded_one():
    qwen, inputs = tiny_pipelines.build("qwen_image")
    off = switch_guidance_off(qwen, [qwen.transformer], inputs | {"true_cfg_scale": 4.0, "negative_prompt": "dull"})
    assert off["true_cfg_scale"] == 1.0 and "negative_prompt" not in off
    wan, inputs = tiny_pipelines.build("wan_experts")
    off = switch_guidance_off(wan, [wan.transformer], inputs | {"guidance_scale": 4.0, "guidance_scale_2": 3.0})
    assert off["guidance_scale"] == off["guidance_scale_2"] == 1.0
    inputs.pop("guidance_scale_2", None)
    assert "guidance_scale_2" not in switch_guidance_off(wan, [wan.transformer], inputs | {"guidance_scale": 4.0})


def test_a_distilled_network_keeps_its_scale():
    sdxl, inputs = tiny_pipelines.build("sdxl")
    sdxl.unet.register_to_config(time_cond_proj_dim=256)
    given = inputs | {"guidance_scale": 7.0}
    assert switch_guidance_off(sdxl, [sdxl.unet], given) == given


def test_every_scale_of_video_with_sound_is_off():
    pipe, inputs = tiny_pipelines.build("ltx2")
    off = switch_guidance_off(pipe, [pipe.transformer], inputs)
    assert off["guidance_scale"] == off["audio_guidance_scale"] == off["modality_scale"] == 1.0
    assert off["stg_scale"] == off["audio_stg_scale"] == 0.0


def test_perturbed_attention_is_off():
    pipe, inputs = tiny_pipelines.build("sd15_pag")
    assert switch_guidance_off(pipe, [pipe.unet], inputs)["pag_scale"] == 0.0


def test_guidance_as_a_component_is_refused():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.__dict__["guider"] = object()
    with pytest.raises(UnsupportedPipeline, match="guides by its component object, which no argument switches off"):
        switch_guidance_off(pipe, [pipe.transformer], inputs)


def test_an_inner_pipelines_conditions_keep_their_negatives():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.__dict__["prior_pipe"] = tiny_pipelines.build("sd15")[0]
    assert switch_guidance_off(pipe, [pipe.transformer], inputs | {"negative_prompt": "dull"})["negative_prompt"]
