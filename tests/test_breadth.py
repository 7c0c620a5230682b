"""Every kind of pipeline trains: the ratio is 1 within 1e-5, and a real training step changes the network."""

import json
import re

import numpy as np
import pytest
import sweep
import tiny_pipelines
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from sweep_builders import build_ours
from tiny_runs import LORA, SETTINGS

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, check_pipeline
from diffusion_grpo.policy.drivers import Driver
from diffusion_grpo.policy.rollout import denoise, replay, rollout
from diffusion_grpo.policy.token import make_policy
from diffusion_grpo.training.model_checks import check_sigmas

NAMES = sorted(tiny_pipelines.EVERY)
NAMES += [name for name in tiny_pipelines.MODULAR if not name.startswith("modular_")]  # without a classic form
SPACED = ["flux", "flux2", "flux_controlnet", "flux_img2img", "flux_inpaint", "flux_kontext", "hunyuan_video"]
SPACED += ["hunyuan_video_image", "ltx2", "qwen_image", "qwen_image_edit", "sd3"]
SPACED += ["sd3_controlnet", "sd3_img2img", "sd3_pag", "z_image"]
SWEPT = ["AnimaModularPipeline", "Ideogram4Pipeline", "QwenImage21Pipeline", "TextToVideoSDPipeline"]
FEW = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 1}


def first_number(completions, **columns):
    """A reward that any completion has: what its values add up to."""
    return [float(torch.as_tensor(_array(completion)).float().mean()) for completion in completions]


def _array(completion):
    if isinstance(completion, list):
        return np.stack([np.asarray(frame) for frame in completion])
    return np.asarray(completion)


@pytest.mark.parametrize("name", NAMES)
def test_it_replays_and_trains(name, tmp_path):
    pipe, inputs = tiny_pipelines.build(name)
    report = check_pipeline(pipe, inputs, num_inference_steps=4)
    assert report.trains and report.max_ratio_error <= 1e-5 and report.steps >= 2, report
    train(pipe, inputs, tmp_path, report.steps)


@pytest.mark.parametrize("name", SWEPT)
def test_classes_that_only_the_sweep_builds_replay(name):
    pipe, inputs = build_ours(name)
    report = check_pipeline(pipe, inputs, num_inference_steps=4)
    assert report.trains and report.max_ratio_error <= 1e-5 and report.steps == 3, report


def test_frames_that_a_pipeline_steps_as_a_batch_are_told_from_copies_by_the_networks_output():
    driver, batch = Driver(torch.tensor([0, 1])), torch.zeros(4, 3, 8, 8)
    driver.note_output((torch.zeros(2, 3, 2, 8, 8),))  # of two samples, with an axis of frames
    assert driver.join_frames(batch).shape == (2, 2, 3, 8, 8)
    driver.note_output((batch,))  # two copies of each sample, as guidance makes them
    assert driver.join_frames(batch) is batch


def test_frames_are_noised_and_denoised_with_their_own_sample():
    pipe, inputs = build_ours("TextToVideoSDPipeline")
    policy, prompts, errors = make_policy(pipe), ["a red cat", "a blue dog"], []
    for seeds in ([0, 1], [0], [1]):
        given = inputs | {"prompt": [prompts[seed] for seed in seeds]}
        _, samples = rollout(policy, given, seeds=seeds, num_inference_steps=3, keeps_clean=True)
        errors.append(denoise(policy, given, samples, 1).error())
    torch.testing.assert_close(errors[0], torch.cat(errors[1:]))


def test_the_sweep_examines_again_what_is_asked_for_and_keeps_the_other_rows(tmp_path, monkeypatch):
    asked, saved = [], tmp_path / "rows.jsonl"
    rows = [{"case": [sweep.OURS, name, False], "trains": True, "seconds": 1} for name in SWEPT[1:3]]
    saved.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tests" / "pipelines").mkdir(parents=True)
    monkeypatch.setattr(sweep.Worker, "examine", lambda self, case, limit: asked.append(case) or {"case": [*case]})
    monkeypatch.setattr(sweep, "line", str)
    monkeypatch.syspath_prepend(str(tmp_path))  # which the sweep adds too
    sweep.main(f"--diffusers {tmp_path} --rows {saved} --resume --no-page --only .{SWEPT[1]}$".split())
    assert asked == [(sweep.OURS, SWEPT[1], False), (sweep.OURS, SWEPT[1], True)]
    found = [json.loads(line) for line in saved.read_text().splitlines()]
    assert found == [{"case": rows[0]["case"]}, rows[1], {"case": [sweep.OURS, SWEPT[1], True]}]


def test_every_class_that_diffusers_exports_is_on_the_page():
    text = sweep.PAGE.read_text()
    names = {*sweep.exported(is_modular=False), *sweep.exported(is_modular=True)}
    assert not names - set(re.findall(r"\w+", text))


def train(pipe, inputs, folder, steps):
    """One update; images and prompts come from the dataset, all else from the settings."""
    columns = {key: value for key, value in inputs.items() if _is_column(value)}
    rows = {"prompt": ["a red cat", "a blue dog"], **{key: value for key, value in columns.items() if key != "prompt"}}
    fixed = {key: value for key, value in inputs.items() if key not in rows}
    own = {"trained_steps": [0, min(steps, 2)], "epsilon": 0.1}
    if any(isinstance(value, list) and isinstance(value[0], list) for value in fixed.values()):
        own["samples_per_latent"] = 1  # they fit calls of two samples, and samples that share calls make smaller ones
    args = DiffusionGRPOConfig(str(folder), **{**SETTINGS, **FEW, **own}, pipeline_kwargs=fixed)
    trainer = DiffusionGRPOTrainer(
        pipe, first_number, args, train_dataset=Dataset.from_dict(rows), peft_config=LoraConfig(**LORA)
    )
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    after = [p for p in trainer.model.parameters() if p.requires_grad]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    errors = [entry["ratio/max_error"] for entry in trainer.state.log_history if "ratio/max_error" in entry]
    assert errors and max(errors) <= 1e-5


def _is_column(value):
    return isinstance(value, list) and all(isinstance(item, (str, Image.Image)) for item in value)


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
