"""Settings of a pipeline's scheduler."""

import json

import diffusers
import pytest
import torch
from tiny_pipelines import build
from tiny_runs import brightness

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.schedulers import change_scheduler
from diffusion_grpo.training.model_checks import check_sigmas

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def test_an_unknown_setting_is_refused_with_the_one_that_is_meant():
    pipe = build("wan")[0]
    with pytest.raises(ValueError, match="Did you mean 'flow_shift'"):
        change_scheduler(pipe.scheduler, {"shift": 5.0})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flux", {"shift": 5.0, "use_dynamic_shifting": False}),
        ("qwen_image", {"shift": 5.0, "use_dynamic_shifting": False, "shift_terminal": None}),
        ("wan", {"flow_shift": 5.0}),
        ("sd3", {"shift": build("sd3")[0].scheduler.config.shift}),  # what it is anyway
    ],
    ids=str,
)
def test_the_call_of_the_pipeline_has_the_sigmas_of_the_setting(name, settings):
    """Its own schedule, as the call sets it: as the setting says."""
    found = []
    for given in ({}, settings):
        pipe, inputs = build(name)
        plain = pipe.scheduler.config.get(next(iter(settings)))
        pipe.scheduler = change_scheduler(pipe.scheduler, given)
        real = pipe.scheduler.step

        def noting(*args, real=real, pipe=pipe, **kwargs):
            found.append(pipe.scheduler.sigmas.clone())
            return real(*args, **kwargs)

        pipe.scheduler.step = noting
        pipe(**inputs, num_inference_steps=2, output_type="latent")
    before, after = found[0], found[-1]
    assert torch.equal(before, after) == (settings.get(next(iter(settings))) == plain)
    shift = settings.get("shift", settings.get("flow_shift"))
    if settings.get("use_dynamic_shifting") is False:  # sigmas 1 and 1/2, shifted
        assert after[1] == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5), abs=1e-5)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (diffusers.DDIMScheduler(**BETAS), "DDIMScheduler"),
        (diffusers.FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True), "use_beta_sigmas"),
        (diffusers.FlowMatchEulerDiscreteScheduler(), None),
    ],
    ids=["ddim", "beta", "euler"],
)
def test_sigmas_are_refused_by_schedulers_that_space_their_steps(scheduler, message):
    if message is None:
        check_sigmas(scheduler)
    else:
        with pytest.raises(ValueError, match=message):
            check_sigmas(scheduler)


def test_sigmas_are_refused_before_weights_are_loaded(tmp_path):
    steps = {"sigmas": [1.0, 0.6, 0.3], "num_inference_steps": 3, "eval_num_inference_steps": 3}
    pipe, _ = build("wan")
    pipe.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **steps)
    for model in (str(tmp_path / "model"), pipe):
        with pytest.raises(ValueError, match="sigmas"):
            DiffusionGRPOTrainer(model=model, reward_funcs=brightness, args=args)


def test_a_guider_is_refused_before_weights_are_loaded(tmp_path):
    """Guidance by a component cannot be switched off, as losses on re-noised samples need."""
    (tmp_path / "model").mkdir()
    index = {"_class_name": "HunyuanImagePipeline", "guider": ["diffusers", "AdaptiveProjectedMixGuidance"]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    args = DiffusionGRPOConfig(str(tmp_path / "run"), loss_type="nft", use_cpu=True)
    with pytest.raises(UnsupportedPipeline, match="AdaptiveProjectedMixGuidance"):
        DiffusionGRPOTrainer(model=str(tmp_path / "model"), reward_funcs=brightness, args=args)
