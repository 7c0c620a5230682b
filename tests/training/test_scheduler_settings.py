"""Settings of a pipeline's scheduler: what changes nothing is refused, and the sentence says what to set."""

import json

import diffusers
import pytest
import torch
from tiny_pipelines import build
from tiny_runs import brightness, trainer_for

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.training.model import set_scheduler
from diffusion_grpo.training.scheduler_settings import change_scheduler, check_sigmas

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "flux",
            {"shift": 5.0},
            "shift=5.0 changes no step of FluxPipeline, whose scheduler has use_dynamic_shifting=True; also set "
            "use_dynamic_shifting: false, or leave it out",
        ),
        (
            "qwen_image",
            {"shift": 5.0},
            "also set use_dynamic_shifting: false, and shift_terminal: null, or the sigmas are stretched to 0.02",
        ),
        ("wan", {"shift": 5.0}, "UniPCMultistepScheduler has no setting shift; .*did you mean flow_shift"),
        ("wan", {"solver_order": 1}, "solver_order=1 changes no step of WanPipeline as its UniPC"),
        ("z_image", {"max_shift": 2.0}, "use_dynamic_shifting=False; also set use_dynamic_shifting: true"),
        ("sdxl", {"use_karras_sigmas": True}, "use_karras_sigmas=True changes no step of StableDiffusionXLPipeline"),
        ("stable_audio", {"solver_order": 1}, "solver_order=1 changes no step of StableAudioPipeline"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_setting_without_effect_is_refused(name, settings, message):
    pipe = build(name)[0]
    before = pipe.scheduler
    with pytest.raises(ValueError, match=message) as refusal:
        set_scheduler(pipe, settings)
    assert "\n" not in str(refusal.value) and pipe.scheduler is before


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flux", {"shift": 5.0, "use_dynamic_shifting": False}),
        ("flux", {"base_shift": 0.7}),  # which the pipeline reads
        ("qwen_image", {"shift": 5.0, "use_dynamic_shifting": False, "shift_terminal": None}),
        ("wan", {"flow_shift": 5.0}),
        ("sd3", {"shift": 5.0}),
        ("sd3", {"shift": build("sd3")[0].scheduler.config.shift}),  # what it is anyway
    ],
    ids=str,
)
def test_the_call_of_the_pipeline_has_the_sigmas_of_the_setting(name, settings):
    """Its own schedule, as the call sets it: the refusal's advice and what is accepted."""
    found = []
    for given in ({}, settings):
        pipe, inputs = build(name)
        plain = pipe.scheduler.config.get(next(iter(settings)))
        set_scheduler(pipe, given)
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
    ("scheduler", "settings", "acts"),
    [
        (diffusers.DDIMScheduler(**BETAS), {"beta_end": 0.02}, True),
        (diffusers.DDIMScheduler(**BETAS), {"clip_sample": False}, True),
        (diffusers.DDIMScheduler(**BETAS, clip_sample=False), {"clip_sample_range": 2.0}, False),
        (diffusers.DDIMScheduler(**BETAS), {"set_alpha_to_one": False}, True),
        (diffusers.PNDMScheduler(**BETAS), {"skip_prk_steps": True}, False),  # its steps are DDIM's here
        (diffusers.EDMEulerScheduler(), {"sigma_max": 40.0}, True),
        (diffusers.EDMEulerScheduler(), {"num_train_timesteps": 10}, False),
        (diffusers.DDPMWuerstchenScheduler(), {"s": 0.02}, True),
        (diffusers.FlowMatchHeunDiscreteScheduler(), {"shift": 3.0}, True),
        (diffusers.FlowMatchEulerDiscreteScheduler(), {"use_karras_sigmas": True}, True),
        (diffusers.DPMSolverMultistepScheduler(), {"prediction_type": "flow_prediction"}, True),  # another kind
        (diffusers.LCMScheduler(), {"beta_end": 0.02}, True),  # refused for itself
        (
            diffusers.FlowMatchEulerDiscreteScheduler(use_exponential_sigmas=True),
            {"use_karras_sigmas": True, "use_exponential_sigmas": False},  # one needs the other
            True,
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else str(value),
)
def test_settings_of_every_kind_of_steps_are_measured(scheduler, settings, acts):
    def change():
        return change_scheduler(scheduler, settings, diffusers.StableDiffusionPipeline)

    if acts:
        assert all(change().config[name] == value for name, value in settings.items())
    else:
        with pytest.raises(ValueError, match="changes no step.*leave it out"):
            change()


def test_the_trainer_refuses_before_weights_are_loaded(tmp_path, monkeypatch):
    build("flux")[0].save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    for settings, message in (
        ({"scheduler_kwargs": {"shift": 5.0}}, "shift=5.0 changes no step of FluxPipeline"),
        ({"sde_type": "ddim"}, "sde_type='ddim' does not fit FlowMatchEulerDiscreteScheduler; use auto or one of"),
    ):
        args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **settings)
        with pytest.raises(ValueError, match=message):
            DiffusionGRPOTrainer(model=str(tmp_path / "model"), reward_funcs=brightness, args=args)
    with pytest.raises(ValueError, match="shift=5.0 changes no step of FluxPipeline"):
        trainer_for(tmp_path / "run", name="flux", scheduler_kwargs={"shift": 5.0})


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (diffusers.DDIMScheduler(**BETAS), "flow matching only; this pipeline's scheduler is DDIMScheduler"),
        (
            diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
            "UniPCMultistepScheduler spaces its steps itself; give the pipeline a FlowMatchEulerDiscreteScheduler",
        ),
        (
            diffusers.FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True),
            "it has use_beta_sigmas=True; set scheduler_kwargs: {use_beta_sigmas: false}",
        ),
        (diffusers.FlowMatchEulerDiscreteScheduler(), None),
    ],
    ids=["ddim", "unipc", "beta", "euler"],
)
def test_sigmas_are_refused_by_schedulers_that_space_their_steps(scheduler, message):
    if message is None:
        check_sigmas(scheduler)
    else:
        with pytest.raises(ValueError, match=message):
            check_sigmas(scheduler)


def test_sigmas_are_refused_before_weights_are_loaded(tmp_path):
    steps = {"sigmas": [1.0, 0.6, 0.3], "num_inference_steps": 3, "eval_num_inference_steps": 3}
    for name, message in (
        ("sdxl", "sigmas work with flow matching only; this pipeline's scheduler is EulerDiscreteScheduler"),
        ("wan", r"sigmas: \w+ spaces its steps itself"),
    ):
        build(name)[0].save_pretrained(tmp_path / name)
        for file in (tmp_path / name).rglob("*.safetensors"):
            file.unlink()
        args = DiffusionGRPOConfig(str(tmp_path / "run"), use_cpu=True, **steps)
        with pytest.raises(ValueError, match=message):
            DiffusionGRPOTrainer(model=str(tmp_path / name), reward_funcs=brightness, args=args)
        with pytest.raises(ValueError, match=message):
            trainer_for(tmp_path / "run", name=name, **steps)


def test_a_guider_is_refused_before_weights_are_loaded(tmp_path):
    """Guidance by a component cannot be switched off, as losses on re-noised samples need."""
    (tmp_path / "model").mkdir()
    index = {"_class_name": "HunyuanImagePipeline", "guider": ["diffusers", "AdaptiveProjectedMixGuidance"]}
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index))
    args = DiffusionGRPOConfig(str(tmp_path / "run"), loss_type="nft", use_cpu=True)
    with pytest.raises(UnsupportedPipeline, match="guidance through its component AdaptiveProjectedMixGuidance"):
        DiffusionGRPOTrainer(model=str(tmp_path / "model"), reward_funcs=brightness, args=args)
