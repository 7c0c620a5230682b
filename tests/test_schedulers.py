"""The stochastic scheduler in place of the pipeline's own: the same without noise, the same to a pipeline's eyes."""

import inspect

import pytest
import tiny_pipelines
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from diffusion_grpo.rollout import Policy, rollout
from diffusion_grpo.schedulers import PROCESSES, UnsupportedScheduler, stochastic_scheduler

SEEDS = [11, 12]


def plain_images(pipe, inputs, steps):
    """What the pipeline makes by itself, from the seeds of `rollout`."""
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    return pipe(**inputs, num_inference_steps=steps, generator=generators, output_type="np")[0]


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl", "sd15", "wan"])
def test_without_noise_it_is_the_stock_deterministic_sampler_bit_for_bit(name):
    pipe, inputs = tiny_pipelines.build(name)
    mine, _ = rollout(pipe, {**inputs, "output_type": "np"}, seeds=SEEDS, num_inference_steps=4, noise_level=0.0)
    if name in ("sdxl", "sd15"):  # Euler and PNDM are trained as DDIM: that is what must come out
        pipe.scheduler = DDIMScheduler.from_config({"clip_sample": False, **pipe.scheduler.config})
    if name == "wan":  # UniPC becomes Euler on UniPC's own sigmas
        pipe.scheduler = euler_on_sigmas_of(pipe.scheduler)
    stock = plain_images(pipe, inputs, 4)
    assert (torch.as_tensor(mine) == torch.as_tensor(stock)).all()


def euler_on_sigmas_of(scheduler):
    """Flow matching Euler with another scheduler's sigmas and timesteps."""

    class Euler(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, **kwargs):
            scheduler.set_timesteps(num_inference_steps, device=device)
            self.sigmas, self.timesteps = scheduler.sigmas.float(), scheduler.timesteps
            self._step_index, self._begin_index = 0, 0

        def step(self, model_output, timestep, sample, **kwargs):
            return super().step(model_output, torch.as_tensor(timestep).float(), sample, **kwargs)

    return Euler()


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_a_flow_schedule_keeps_its_sigmas_and_its_signature(scheduler):
    mine = stochastic_scheduler(scheduler)
    for each in (scheduler, mine):
        each.set_timesteps(7)
    assert torch.equal(mine.sigmas, scheduler.sigmas) and torch.equal(mine.timesteps, scheduler.timesteps)
    assert inspect.signature(mine.set_timesteps) == inspect.signature(scheduler.set_timesteps)
    assert mine.process == "flow_sde" and isinstance(mine, type(scheduler))


@pytest.mark.parametrize(
    "cls",
    [
        DDIMScheduler,
        DDPMScheduler,
        PNDMScheduler,
        EulerDiscreteScheduler,
        EulerAncestralDiscreteScheduler,
        DPMSolverMultistepScheduler,
    ],
)
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_variance_preserving_schedulers_become_ddim_with_their_own_alphas(cls, prediction_type):
    if cls is PNDMScheduler and prediction_type == "sample":
        pytest.skip("PNDM has no sample prediction")
    scheduler = cls(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type)
    mine = stochastic_scheduler(scheduler)
    assert mine.process == "ddim" and isinstance(mine, DDIMScheduler)
    assert torch.equal(mine.alphas_cumprod, scheduler.alphas_cumprod)
    assert mine.config.prediction_type == prediction_type
    assert mine.config.clip_sample == scheduler.config.get("clip_sample", False)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_mean_at_vanishing_noise_is_ddims_own_step(prediction_type):
    mine = stochastic_scheduler(DDIMScheduler(prediction_type=prediction_type, clip_sample=True))
    mine.set_timesteps(5)
    sample, prediction = torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for timestep in mine.timesteps:
        mean, std = mine.distribution(prediction, timestep, sample, noise_level=0.0)
        stock = mine.deterministic(prediction, timestep, sample)
        torch.testing.assert_close(mean, stock, rtol=1e-5, atol=1e-5)
        assert std == 0


def test_both_forms_of_output():
    mine = stochastic_scheduler(FlowMatchEulerDiscreteScheduler())
    sample = torch.randn(2, 4, 4, 4)
    outputs = []
    for return_dict in (True, False):
        mine.set_timesteps(4)
        outputs.append(mine.step(sample, mine.timesteps[0], sample, return_dict=return_dict))
    assert torch.equal(outputs[0].prev_sample, outputs[1][0])


def test_what_cannot_be_scored_is_refused_with_what_can():
    with pytest.raises(UnsupportedScheduler, match="LCMScheduler.*DDIM"):
        stochastic_scheduler(LCMScheduler())
    with pytest.raises(ValueError, match="cps.*does not fit DDIMScheduler.*ddim"):
        stochastic_scheduler(DDIMScheduler(), "cps")
    with pytest.raises(ValueError, match=f"one of {', '.join(PROCESSES)}"):
        stochastic_scheduler(DDIMScheduler(), "euler")


def test_the_pipeline_keeps_its_scheduler_and_its_config():
    pipe, inputs = tiny_pipelines.build("sd3")
    scheduler, config = pipe.scheduler, dict(pipe.config)
    rollout(Policy(pipe, sde_type="cps"), inputs, seeds=SEEDS, num_inference_steps=3)
    assert pipe.scheduler is scheduler and dict(pipe.config) == config


def test_a_shift_set_after_loading_is_kept():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_shift(5.0)
    mine = stochastic_scheduler(scheduler)
    for each in (scheduler, mine):
        each.set_timesteps(4)
    assert torch.equal(mine.sigmas, scheduler.sigmas)


def test_continuous_timesteps_are_refused():
    with pytest.raises(UnsupportedScheduler, match="EulerDiscreteScheduler"):
        stochastic_scheduler(EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction"))
