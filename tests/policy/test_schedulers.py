"""The stochastic scheduler in place of the pipeline's own: the same without noise, the same to a pipeline's eyes."""

import copy
import inspect

import pytest
import tiny_pipelines
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)

from diffusion_grpo.policy.rollout import DenoisingPolicy, rollout
from diffusion_grpo.policy.schedulers import stochastic_scheduler
from diffusion_grpo.policy.stochastic_steps import CleanEstimate, UnsupportedScheduler

SEEDS = [11, 12]


def plain_images(pipe, inputs, steps):
    """What the pipeline makes by itself, from the seeds of `rollout`."""
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    return pipe(**inputs, num_inference_steps=steps, generator=generators, output_type="np")[0]


@pytest.mark.parametrize("name", ["sd3", "flux", "sdxl", "sd15", "wan", "cosmos", "cosmos2", "anyflow"])
def test_without_noise_it_is_the_stock_deterministic_sampler_bit_for_bit(name):
    pipe, inputs = tiny_pipelines.build(name)
    policy = DenoisingPolicy(pipe)
    mine, _ = rollout(policy, {**inputs, "output_type": "np"}, seeds=SEEDS, num_inference_steps=4, noise_level=0.0)
    if name in ("sdxl", "sd15"):  # Euler and PNDM are trained as DDIM: that is what must come out
        pipe.scheduler = DDIMScheduler.from_config({"clip_sample": False, **pipe.scheduler.config})
    if name == "wan":  # UniPC becomes Euler on UniPC's own sigmas
        pipe.scheduler = euler_on_sigmas_of(pipe.scheduler)
    with policy.prompts.serve(pipe):  # encoded alone, as in the rollout: beside others the last bits would differ
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


def shifted():
    """A scheduler whose shift was set after loading."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_shift(5.0)
    return scheduler


@pytest.mark.parametrize(
    "scheduler",
    [
        shifted(),
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
    assert mine.sde.name == "flow_sde" and isinstance(mine, type(scheduler))


@pytest.mark.parametrize("cls", [DDPMScheduler, PNDMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_variance_preserving_schedulers_become_ddim_with_their_own_alphas(cls, prediction_type):
    if cls is PNDMScheduler and prediction_type == "sample":
        pytest.skip("PNDM has no sample prediction")
    scheduler = cls(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type)
    mine = stochastic_scheduler(scheduler)
    assert mine.sde.name == "ddim" and isinstance(mine, DDIMScheduler)
    assert torch.equal(mine.alphas_cumprod, scheduler.alphas_cumprod)
    assert mine.config.prediction_type == prediction_type
    assert mine.config.clip_sample == scheduler.config.get("clip_sample", False)


@pytest.mark.parametrize(
    "scheduler",
    [
        *(DDIMScheduler(prediction_type=kind, clip_sample=True) for kind in ("epsilon", "v_prediction", "sample")),
        DDPMScheduler(thresholding=True, clip_sample=False, sample_max_value=1.5),
    ],
    ids=["epsilon", "v", "sample", "thresholds"],
)
def test_the_mean_at_vanishing_noise_is_ddims_own_step(scheduler):
    mine = stochastic_scheduler(scheduler)
    mine.set_timesteps(5)
    sample, prediction = 3 * torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for timestep in mine.timesteps:
        mean, std = mine.distribution(prediction, timestep, sample, noise_level=0.0)
        stock = mine.deterministic(prediction, timestep, sample)
        torch.testing.assert_close(mean, stock, rtol=1e-4, atol=1e-4)
        assert std == 0


def test_what_cannot_be_scored_is_refused_with_what_can():
    with pytest.raises(UnsupportedScheduler, match="HeliosScheduler belongs to a rollout over chunks"):
        stochastic_scheduler(HeliosScheduler())
    with pytest.raises(ValueError, match="cps.*does not fit DDIMScheduler.*ddim"):
        stochastic_scheduler(DDIMScheduler(), "cps")
    with pytest.raises(ValueError, match="euler.*does not fit DDIMScheduler.*ddim"):
        stochastic_scheduler(DDIMScheduler(), "euler")


CONTINUOUS = {"timestep_type": "continuous", "use_karras_sigmas": True, "sigma_min": 0.002, "sigma_max": 700.0}


@pytest.mark.parametrize(
    "scheduler",
    [
        EulerDiscreteScheduler(prediction_type="v_prediction", **CONTINUOUS),
        EDMEulerScheduler(prediction_type="epsilon"),
        EDMEulerScheduler(prediction_type="v_prediction", sigma_schedule="exponential"),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_sigma_schedules_take_the_original_step_without_noise(scheduler):
    mine = stochastic_scheduler(scheduler)
    assert mine.sde.name == "ancestral" and isinstance(mine, type(scheduler))
    for each in (scheduler, mine):
        each.set_timesteps(5)
    sample, prediction = torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for timestep in mine.timesteps[:-1]:
        assert torch.equal(mine.scale_model_input(sample, timestep), scheduler.scale_model_input(sample, timestep))
        stepped = mine.step(prediction, timestep, sample).prev_sample
        assert torch.equal(stepped, scheduler.step(prediction, timestep, sample).prev_sample)
        mine.index -= 1
        mean, std = mine.distribution(prediction, timestep, sample, noise_level=0.0)
        mine.index += 1
        torch.testing.assert_close(mean, stepped, rtol=1e-5, atol=1e-4)
        assert std == 0


def test_an_estimate_that_is_read_alone_is_no_step():
    """Cosmos steps with [1] of one call, the clean sample, which it changes and gives to the next call."""
    stock, mine = EDMEulerScheduler(), stochastic_scheduler(EDMEulerScheduler())
    sample, prediction = torch.randn(2, 2, 4, 8, 8)
    outcomes = []
    for scheduler in (stock, mine):
        scheduler.set_timesteps(4)
        timestep = scheduler.timesteps[0]
        estimate = scheduler.step(prediction, timestep, sample, return_dict=False)[1]
        scheduler._step_index -= 1
        given = {"return_dict": False, "pred_original_sample": 0.5 * estimate}
        outcomes.append((estimate, scheduler.step(prediction, timestep, sample, **given)[0]))
    assert mine.index == 1
    for theirs, ours in zip(*outcomes, strict=True):
        assert torch.equal(theirs, ours)


def test_a_step_that_a_replay_ends_leaves_no_argument_for_the_next():
    class Leaving(Driver):
        def step(self, *args):
            raise StopIteration

    scheduler = stochastic_scheduler(EDMEulerScheduler())
    scheduler.set_timesteps(4)
    scheduler.driver, sample = Leaving(), torch.randn(1, 4, 8, 8)
    with pytest.raises(StopIteration):
        scheduler.step(sample, scheduler.timesteps[0], sample, pred_original_sample=torch.zeros(1))
    estimate = scheduler.step(sample, scheduler.timesteps[0], sample, return_dict=False)[1]
    assert estimate.shape == sample.shape


def test_flows_with_sigmas_above_one_are_edm():
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    assert stochastic_scheduler(scheduler).sde.name == "flow_sde"
    scheduler.register_to_config(sigma_max=80.0, sigma_min=0.002)
    assert stochastic_scheduler(scheduler).sde.name == "ancestral"


def test_cascades_scheduler_takes_the_step_of_ddpm():
    scheduler = DDPMWuerstchenScheduler()
    mine = stochastic_scheduler(scheduler)
    for each in (scheduler, mine):
        each.set_timesteps(6)
    sample, prediction = torch.randn(2, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for timestep in mine.timesteps[1:-2]:  # the first level is clamped
        mean, std = mine.distribution(prediction, timestep.expand(2), sample, noise_level=1.0)
        stock = scheduler.step(prediction, timestep.expand(2), sample, torch.Generator().manual_seed(1)).prev_sample
        noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(mean + std * noise, stock, rtol=1e-4, atol=1e-4)


def test_a_learned_variance_is_left_to_ddims():
    mine = stochastic_scheduler(DDPMScheduler(variance_type="learned_range", clip_sample=False))
    mine.set_timesteps(5)
    sample, prediction, variance = torch.randn(3, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    both = torch.cat([prediction, variance], dim=1)

    def step(output):
        mine.set_timesteps(5)
        return mine.step(output, mine.timesteps[0], sample).prev_sample

    assert torch.equal(step(prediction), step(both))
    assert mine.config.variance_type == "learned_range"


def test_what_a_replaced_scheduler_lacks_is_the_originals():
    scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear")
    mine = stochastic_scheduler(scheduler)
    for each in (scheduler, mine):
        each.set_timesteps(5)
    assert torch.equal(mine.sigmas, scheduler.sigmas) and mine.init_noise_sigma == 1.0
    with pytest.raises(AttributeError):
        mine.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "cps", "wan_sde", "precise"])
def test_tokens_with_timesteps_of_their_own(process):
    scheduler = FlowMatchEulerDiscreteScheduler()
    mine = stochastic_scheduler(scheduler, process)
    for each in (scheduler, mine):
        each.set_timesteps(4)
    sample, velocity = torch.randn(2, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    timestep = mine.timesteps[1]
    tokens = timestep.expand(1, 6).clone()
    tokens[:, :2] = 0.0  # a condition
    stock = scheduler.step(-velocity, timestep, sample, per_token_timesteps=tokens).prev_sample
    stepped = mine.step(-velocity, timestep, sample, per_token_timesteps=tokens).prev_sample
    torch.testing.assert_close(stepped, stock, rtol=0, atol=1e-6)
    mine.index, mine.options = 0, {"per_token_timesteps": tokens}
    mean, std = mine.distribution(-velocity, timestep, sample, noise_level=0.5)
    mine.options = {}
    plain_mean, plain_std = mine.distribution(velocity, timestep, sample, noise_level=0.5)
    assert torch.equal(mean[:, :2], sample[:, :2]) and (std[:, :2] == 0).all()
    torch.testing.assert_close(mean[:, 2:], plain_mean[:, 2:])
    torch.testing.assert_close(std[:, 2:], plain_std.expand(1, 4, 1))
    plain = mine.scale(timestep, sample, 0.5)
    mine.options = {"per_token_timesteps": tokens}
    assert_same_scale(mine.scale(timestep, sample, 0.5), plain.std, plain.jacobian, moving=16)  # only those that move


def assert_same_scale(scale, std, jacobian, moving):
    torch.testing.assert_close(scale.std, torch.as_tensor(std).float().expand(len(scale.std)))
    torch.testing.assert_close(scale.jacobian, torch.as_tensor(jacobian).float().abs().expand(len(scale.std)))
    assert scale.moving.tolist() == [moving] * len(scale.std)


SCALED = {
    "flow_sde": (FlowMatchEulerDiscreteScheduler(), "flow_sde"),
    "dance_sde": (FlowMatchEulerDiscreteScheduler(shift=3.0), "dance_sde"),
    "wan_sde": (UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True), "wan_sde"),
    "cps": (FlowMatchEulerDiscreteScheduler(), "cps"),
    "precise": (FlowMatchEulerDiscreteScheduler(), "precise"),
    "inverted": (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "flow_sde"),
    "epsilon": (DDIMScheduler(clip_sample=False), "ddim"),
    "v": (DDIMScheduler(clip_sample=False, prediction_type="v_prediction"), "ddim"),
    "sample": (DDIMScheduler(clip_sample=False, prediction_type="sample"), "ddim"),
    "clipped": (DDIMScheduler(clip_sample=True, clip_sample_range=0.1), "ddim"),
    "cosine": (DDPMWuerstchenScheduler(), "ddim"),
    "edm": (EDMEulerScheduler(), "ancestral"),
    "continuous": (EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction"), "ancestral"),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_a_step_is_its_std_and_the_derivative_of_its_mean(name):
    """By autograd, at any prediction and any latent: neither matters."""
    scheduler = stochastic_scheduler(*SCALED[name])
    scheduler.set_timesteps(5)
    scheduler.first, scheduler.index = 0, 2
    timestep, drawn = scheduler.timesteps[2], torch.Generator().manual_seed(0)
    timestep = timestep.expand(3) if name == "cosine" else timestep
    sample, prediction = torch.randn(2, 3, 4, 5, 6, generator=drawn)
    if name == "clipped":
        sample, prediction = 1e-3 * sample, 1e-3 * prediction  # within the bound, where nothing is clipped
    prediction.requires_grad_()
    mean, std = scheduler.distribution(prediction, timestep, sample, 0.5)
    (derivative,) = torch.autograd.grad(mean.sum(), prediction)
    assert derivative.abs().min() > 1e-3
    scale = scheduler.scale(timestep, sample, 0.5)
    assert_same_scale(scale, std.flatten()[0], derivative.mean(), moving=4 * 5 * 6)
    half = scheduler.scale(timestep, sample, 0.5, count=1)  # both halves of guidance in one batch
    assert len(half.std) == len(half.jacobian) == len(half.moving) == 1
    assert scheduler.scale(timestep, sample, 0.0).moving.tolist() == [4 * 5 * 6] * 3


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("process", ["flow_sde", "dance_sde", "cps"])
def test_mochis_time_runs_from_noise_to_data(process, index):
    """Its sigmas are 1 - s and its velocity is data - noise; in s and noise - data it is any other flow."""
    inverted = stochastic_scheduler(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), process)
    inverted.set_timesteps(4)
    inverted.first, inverted.index = 0, index
    torch.manual_seed(index)
    clean, noise = torch.randn(2, 3, 4, dtype=torch.float64)
    s, after, second = (1 - inverted.sigmas.double())[[index, index + 1, 1]]
    x = (1 - s) * clean + s * noise
    mean, std = inverted.distribution((clean - noise).float(), inverted.timesteps[index], x.float(), 0.5)
    if process == "cps":
        expected_std = after * torch.sin(torch.tensor(torch.pi / 4))
        expected = (1 - after) * clean + (after**2 - expected_std**2).sqrt() * noise
    else:
        g = 0.5 * (torch.sqrt(s / (1 - (second if s == 1 else s))) if process == "flow_sde" else torch.ones(()))
        score = -(x - (1 - s) * clean) / s**2
        expected = x + (after - s) * (noise - clean - g**2 / 2 * score)
        expected_std = g * torch.sqrt(s - after)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std.double(), expected_std.double(), rtol=1e-5, atol=1e-6)
    # and the step without noise goes the same way: towards the data
    euler = inverted.deterministic((clean - noise).float(), inverted.timesteps[index], x.float())
    torch.testing.assert_close(euler.double(), (1 - after) * clean + after * noise, rtol=1e-5, atol=1e-5)


class Driver:
    """Notes the steps that it is asked for, and leaves zeros."""

    def __init__(self):
        self.steps = []

    def join_frames(self, batch):
        return batch

    def step(self, scheduler, index, prediction, timestep, sample):
        self.steps.append((index, scheduler.position))
        return torch.zeros_like(sample)


def flow(begin=None):
    scheduler = stochastic_scheduler(FlowMatchEulerDiscreteScheduler())
    scheduler.set_timesteps(4)
    if begin is not None:
        scheduler.set_begin_index(begin)
    return scheduler


@pytest.mark.parametrize(("begin", "first"), [(None, 0), (2, 2), (None, 2)], ids=["all", "begin index", "timestep"])
def test_a_driver_chooses_the_next_latent_and_a_loop_may_start_in_the_middle(begin, first):
    scheduler, driver, sample = flow(begin), Driver(), torch.ones(2, 3)
    scheduler.driver = driver
    for timestep in scheduler.timesteps[first:]:
        assert torch.equal(scheduler.step(sample, timestep, sample, return_dict=False)[0], torch.zeros(2, 3))
    assert driver.steps == list(enumerate(range(first, 4)))
    assert scheduler.loop_length == 4 - first


def test_a_copy_keeps_its_place_and_its_driver():
    scheduler = flow()
    scheduler.step(torch.ones(2, 3), scheduler.timesteps[0], torch.ones(2, 3))
    scheduler.driver = object()
    clone = copy.deepcopy(scheduler)
    assert clone.position == scheduler.position == 1
    assert clone.driver is scheduler.driver and clone.sigmas is not scheduler.sigmas


def test_sigmas_above_one_do_not_fit_a_flow():
    scheduler = flow()
    scheduler.sigmas = scheduler.sigmas * 3
    scheduler.step(torch.zeros(1, 3), scheduler.timesteps[0], torch.zeros(1, 3))
    with pytest.raises(UnsupportedScheduler, match="runs through sigma .* need sigmas between 0 and 1"):
        scheduler.distribution(torch.zeros(1, 3), scheduler.timesteps[1], torch.zeros(1, 3), 0.7)


def test_elements_that_a_step_does_not_move_have_no_velocity():
    parts = torch.tensor([[1.0, 2.0]]), torch.tensor(0.5), torch.zeros(1, 2)  # clean, sigma, origin
    assert CleanEstimate(*parts).velocity().tolist() == [[-2.0, -4.0]]
    assert CleanEstimate(*parts, moves=torch.tensor([[True, False]])).velocity().tolist() == [[-2.0, 0.0]]
