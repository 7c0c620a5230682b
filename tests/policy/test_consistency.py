"""Steps of consistency samplers are those of diffusers, and can be trained."""

import math

import pytest
import tiny_pipelines
import torch
from diffusers import CMStochasticIterativeScheduler, FlowMatchLCMScheduler, LCMScheduler, TCDScheduler
from diffusers.schedulers import SCMScheduler
from peft import LoraConfig
from tiny_runs import LORA, logged, trainer_for

from diffusion_grpo.policy.check import check_pipeline
from diffusion_grpo.policy.drivers import Driver
from diffusion_grpo.policy.schedulers import stochastic_scheduler

SHAPE = (2, 4, 3, 5)
SCHEDULERS = {
    "lcm": (LCMScheduler(), 1.0),
    "lcm, v": (LCMScheduler(prediction_type="v_prediction", clip_sample=True), 1.0),
    "lcm, skips": (LCMScheduler(timestep_scaling=0.001), 1.0),  # keeps more of the latent than published ones do
    "tcd": (TCDScheduler(), 0.3),
    "tcd, v": (TCDScheduler(prediction_type="v_prediction"), 0.8),
    "scm": (SCMScheduler(), 1.0),
    "flow": (FlowMatchLCMScheduler(shift=3.0), 1.0),
    "edm": (CMStochasticIterativeScheduler(), 1.0),
}


def prepared(scheduler):
    options = {"intermediate_timesteps": None} if isinstance(scheduler, SCMScheduler) else {}
    scheduler.set_timesteps(4, **options)
    return scheduler


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_step_with_its_noise_is_that_of_diffusers(name):
    theirs, level = SCHEDULERS[name]
    theirs, mine = prepared(theirs), prepared(stochastic_scheduler(theirs))
    sample, times = torch.randn(SHAPE, dtype=torch.float64).float(), theirs.timesteps[:4]
    for index, timestep in enumerate(times):
        prediction = torch.randn(SHAPE)
        for scheduler in (theirs, mine):
            scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else None
        options = {"eta": level} if name.startswith("tcd") else {}
        expected = theirs.step(prediction, timestep, sample, generator=torch.manual_seed(index), **options).prev_sample
        mine.locate(timestep)
        mean, std = mine.distribution(prediction, timestep, sample, level)
        noise = torch.randn(SHAPE, generator=torch.manual_seed(index))
        torch.testing.assert_close(mean + std * noise, expected, rtol=2e-5, atol=2e-5)
        assert mine.loop_length == 4 and (std > 0) == (index < 3)
        assert mine.sde.noise_level == (0.3 if name.startswith("tcd") else 1.0)
        mine.index += 1
        sample = expected
    mine.index = 3  # a pipeline that decodes what the tuple has second gets the clean sample of the last step
    last, shown = mine.step(prediction, timestep, sample, return_dict=False)
    mine.index = 3
    assert torch.equal(last, shown) and torch.equal(last, mine.step(prediction, timestep, sample).prev_sample)


def step_in_float64(name, scheduler, prediction, sample, index, level):
    """Mean and standard deviation of a step by the formulas of the papers."""
    time, is_last = scheduler.timesteps[index], index == 3
    if name == "scm":
        angle, after = time.double(), scheduler.timesteps[index + 1].double()
        clean = angle.cos() * sample - angle.sin() * prediction
        return (clean, 0.0) if is_last else (after.cos() * clean, after.sin() * scheduler.config.sigma_data)
    if name == "flow":
        sigma, after = scheduler.sigmas.double()[index : index + 2]
        return (1 - after) * (sample - sigma * prediction), after
    alphas = scheduler.alphas_cumprod.double()
    signal, noise = alphas[time].sqrt(), (1 - alphas[time]).sqrt()
    is_velocity = name.endswith("v")
    clean = signal * sample - noise * prediction if is_velocity else (sample - noise * prediction) / signal
    drift = noise * sample + signal * prediction if is_velocity else prediction
    if name.startswith("tcd"):
        after = 0 if is_last else int(scheduler.timesteps[index + 1])
        between = alphas[math.floor((1 - level) * after)]
        part = between.sqrt() * clean + (1 - between).sqrt() * drift
        left = alphas[after] / between
        return (part, 0.0) if is_last else (left.sqrt() * part, (1 - left).sqrt())
    clean = clean.clamp(-1, 1) if scheduler.config.clip_sample else clean
    scaled = float(time) * scheduler.config.timestep_scaling
    clean = 0.25 / (scaled**2 + 0.25) * sample + scaled / (scaled**2 + 0.25) ** 0.5 * clean
    after = None if is_last else alphas[scheduler.timesteps[index + 1]]
    return (clean, 0.0) if is_last else (after.sqrt() * clean, (1 - after).sqrt())


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "edm"])
def test_mean_and_deviation_are_those_of_the_papers(name):
    scheduler, level = prepared(stochastic_scheduler(SCHEDULERS[name][0])), SCHEDULERS[name][1]
    for index, timestep in enumerate(scheduler.timesteps[:4]):
        sample, prediction = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
        scheduler.locate(timestep)
        found = scheduler.distribution(prediction.float(), timestep, sample.float(), level)
        expected = step_in_float64(name, scheduler, prediction, sample, index, level)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), torch.as_tensor(other).double(), rtol=2e-5, atol=2e-5)
        scheduler.index += 1


def test_steps_without_noise_of_their_own_have_the_noise_of_their_latent():
    scheduler = prepared(stochastic_scheduler(LCMScheduler()))
    timestep = scheduler.timesteps[0]
    scheduler.locate(timestep)
    sample, prediction = torch.randn(1, 4, 3, 5).expand(3, -1, -1, -1), torch.zeros(3, 4, 3, 5)
    scheduler.driver = Driver(torch.tensor([7, 8, 7]))
    first, second, third = scheduler.deterministic(prediction, timestep, sample)
    assert torch.equal(first, third) and not torch.allclose(first, second, atol=0.1)
    clean = scheduler.denoise(prediction, timestep, sample).clean
    signal, deviation = scheduler.next_level(sample)
    noise = (torch.stack([first, second]) - signal * clean[:2]) / deviation
    assert abs(noise.mean()) < 0.4 and 0.7 < noise.std() < 1.3
    half, std = scheduler.distribution(prediction, timestep, sample, 0.6)
    torch.testing.assert_close(half[0], (signal * clean + 0.8 * deviation * noise[0])[0], rtol=1e-5, atol=1e-5)
    assert std == 0.6 * deviation  # the variances of both add up to that of the level


def perfect(name, scheduler, clean, noise):
    """A sample noised to the level of step 1, what a perfect network predicts there, and the velocity."""
    timestep = scheduler.timesteps[1]
    if name in ("lcm", "lcm, v", "tcd", "tcd, v"):
        alpha = scheduler.alphas_cumprod[int(timestep)].double()
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * clean
        return alpha.sqrt() * clean + (1 - alpha).sqrt() * noise, velocity if name.endswith("v") else noise, velocity
    if name == "scm":
        angle, noise = timestep.double(), scheduler.config.sigma_data * noise
        velocity = angle.cos() * noise - angle.sin() * clean
        return angle.cos() * clean + angle.sin() * noise, velocity, velocity
    sigma = scheduler.sigmas[1].double()
    return (1 - sigma) * clean + sigma * noise, noise - clean, noise - clean


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name not in ("edm", "lcm, skips")])
def test_a_finished_sample_is_noised_again_and_found_again(name):
    scheduler = prepared(stochastic_scheduler(SCHEDULERS[name][0]))
    clean, noise = (torch.rand(SHAPE, dtype=torch.float64) * 2 - 1 for _ in range(2))  # within what is clipped
    noised, prediction, velocity = perfect(name, scheduler, clean, noise)
    scheduler.locate(scheduler.timesteps[0])
    scheduler.index = 1
    mine = scheduler.renoise(clean.float(), noise.float(), noised, 1)
    torch.testing.assert_close(mine.double(), noised, rtol=1e-5, atol=1e-5)
    found = scheduler.denoise(prediction.float(), scheduler.timesteps[1], noised.float())
    torch.testing.assert_close(found.clean.double(), clean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.velocity().double(), velocity, rtol=1e-4, atol=1e-4)
    half = prediction.bfloat16(), scheduler.timesteps[1], noised.bfloat16()  # computed in float32 all the same
    single = half[0].float(), half[1], half[2].float()
    assert torch.equal(scheduler.denoise(*half).clean, scheduler.denoise(*single).clean)


def test_the_shared_noise_is_another_in_each_step_and_the_same_for_both_halves_of_guidance():
    scheduler = prepared(stochastic_scheduler(LCMScheduler()))
    scheduler.locate(scheduler.timesteps[0])
    scheduler.driver = Driver(torch.tensor([7]))
    clean, noises = torch.zeros(2, 4, 3, 5), []
    for scheduler.index in range(3):
        latents = scheduler.deterministic(clean, scheduler.timesteps[scheduler.index], clean)
        assert torch.equal(*latents)
        noises.append(latents[0] / scheduler.next_level(clean)[1])
    assert not any(torch.allclose(noises[0], other, atol=0.1) for other in noises[1:])


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
@pytest.mark.parametrize("scheduler", [LCMScheduler, TCDScheduler])
def test_a_usual_pipeline_with_a_consistency_sampler_replays_exactly(scheduler, name):
    pipe, inputs = tiny_pipelines.build(name)
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    report = check_pipeline(pipe, inputs)
    assert report.trains and report.max_ratio_error == 0.0


def test_a_lora_is_trained_over_that_of_a_consistency_model(tmp_path):
    pipe, _ = tiny_pipelines.build("sdxl")
    pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    pipe.unet.add_adapter(LoraConfig(**LORA, init_lora_weights=False), adapter_name="lcm")
    before = {name: weight.clone() for name, weight in pipe.unet.state_dict().items() if ".lcm." in name}
    trainer = trainer_for(tmp_path, "sdxl", model=pipe, keep_adapters=True, guidance_scale=1.0)
    trainer.train()
    assert logged(trainer, "ratio/max_error") == [0.0] * 2 and min(logged(trainer, "grad_norm")) > 0
    after = {name: weight for name, weight in trainer.model.state_dict().items() if ".lcm." in name}
    assert len(after) == len(before) > 0
    assert all(torch.equal(*pair) for pair in zip(after.values(), before.values(), strict=True))
