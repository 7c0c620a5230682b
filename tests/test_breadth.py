"""Every kind of pipeline trains: the ratio is 1 within 1e-5, and a few real updates change the network."""

import re

import pytest
import sweep
import tiny_pipelines
import torch
from sweep_builders import build_ours
from tiny_runs import train_briefly

from diffusion_grpo import check_pipeline
from diffusion_grpo.policy.drivers import Driver
from diffusion_grpo.policy.rollout import denoise, replay, rollout
from diffusion_grpo.policy.token import make_policy
from diffusion_grpo.training.model_checks import check_sigmas

# others of a family that train like its plain pipeline
VARIANTS = sorted(
    n for n in tiny_pipelines.EVERY if re.search("_(control|img2|inp|pag|heun|ip|pix2|vace)|osmos2|kandinsky_prior", n)
)
NAMES = sorted({*tiny_pipelines.EVERY} - {*VARIANTS}) + [
    pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS
]
NAMES += sorted(tiny_pipelines.MODULAR)
THRICE = {*tiny_pipelines.MODULAR} - {"minimax_h3"}  # which takes long; the sweep makes its three updates
SPACED = ["flux", "flux2", "flux_controlnet", "flux_img2img", "flux_inpaint", "flux_kontext", "hunyuan_video"]
SPACED += ["hunyuan_video_image", "ltx2", "qwen_image", "qwen_image_edit", "sd3"]
SPACED += ["sd3_controlnet", "sd3_img2img", "sd3_pag", "z_image"]
SWEPT = ["AnimaModularPipeline", "Ideogram4Pipeline", "QwenImage21Pipeline", "TextToVideoSDPipeline"]
# more that need no checkout of diffusers; `make sweep ARGS="--modular --train 3"` trains the others
MODULAR = ["Ideogram4", "MiniMaxMusic3", "QwenImage21Turbo", "Wan22Vace"]
SWEPT += [f"{name}ModularPipeline" for name in MODULAR]


@pytest.mark.parametrize("name", NAMES)
def test_it_replays_and_trains(name, tmp_path):
    pipe, inputs = tiny_pipelines.build(name)
    report = check_pipeline(pipe, inputs, num_inference_steps=4)
    assert report.trains and report.max_ratio_error <= 1e-5 and report.steps >= 2, report
    train_briefly(pipe, inputs, tmp_path, report.steps, updates=3 if name in THRICE else 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_it_replays(name):
    """What CI asks of those that are trained nightly."""
    report = check_pipeline(*tiny_pipelines.build(name), num_inference_steps=4)
    assert report.trains and report.max_ratio_error <= 1e-5 and report.steps >= 2, report


@pytest.mark.parametrize("name", SWEPT)
def test_classes_that_only_the_sweep_builds_replay(name, tmp_path):
    pipe, inputs = build_ours(name)
    report = check_pipeline(pipe, inputs, num_inference_steps=4)
    assert report.trains and report.max_ratio_error <= 1e-5 and report.steps == 3, report
    if "Modular" in name:
        train_briefly(pipe, inputs, tmp_path, report.steps, updates=3)


def test_frames_that_a_pipeline_steps_as_a_batch_are_told_from_copies_by_the_networks_output():
    driver, batch = Driver(torch.tensor([0, 1])), torch.zeros(4, 3, 8, 8)
    driver.output_ndim = 5  # of two samples, with an axis of frames
    assert driver.join_frames(batch).shape == (2, 2, 3, 8, 8)
    driver.output_ndim = batch.ndim  # two copies of each sample, as guidance makes them
    assert driver.join_frames(batch) is batch


def test_frames_are_noised_and_denoised_with_their_own_sample():
    pipe, inputs = build_ours("TextToVideoSDPipeline")
    policy, prompts, errors = make_policy(pipe), ["a red cat", "a blue dog"], []
    for seeds in ([0, 1], [0], [1]):
        given = inputs | {"prompt": [prompts[seed] for seed in seeds]}
        _, samples = rollout(policy, given, seeds=seeds, num_inference_steps=3, keeps_clean=True)
        errors.append(denoise(policy, given, samples, 1).error())
    torch.testing.assert_close(errors[0], torch.cat(errors[1:]))


def test_every_class_that_diffusers_exports_is_on_the_page():
    text = sweep.PAGE.read_text()
    names = {*sweep.exported(is_modular=False), *sweep.exported(is_modular=True)}
    assert not names - set(re.findall(r"\w+", text))


@pytest.mark.parametrize("name", SPACED)
def test_it_replays_with_steps_of_other_lengths(name):
    pipe, inputs = tiny_pipelines.build(name)
    check_sigmas(pipe.scheduler)
    policy, found = make_policy(pipe), []
    for given in ({}, {"sigmas": [1.0, 0.8, 0.4]}):
        _, trajectory = rollout(policy, inputs | given, seeds=[0], num_inference_steps=3)
        found.append(policy.scheduler.sigmas[:-1].float())
    assert torch.allclose(policy.scheduler.timesteps.float() / 1000, found[1], atol=1e-4)  # what the network is told
    assert found[0][0] == found[1][0] == 1 and not torch.allclose(found[0], found[1], atol=1e-2)
    assert trajectory.steps.tolist() == [[0, 1]]
    for step in range(2):
        assert torch.equal(replay(policy, inputs | given, trajectory, step).log_prob, trajectory.log_probs[:, step])
