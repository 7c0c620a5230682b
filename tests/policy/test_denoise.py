"""`denoise` hands a step a finished sample, noised again, and says what the network takes it for."""

import numpy as np
import pytest
import tiny_pipelines
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from recorded import make_policy, record

from diffusion_grpo.policy.base import call_arguments
from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.replaying import InputWatch
from diffusion_grpo.policy.rollout import DenoisingPolicy, denoise, replay, rollout
from diffusion_grpo.policy.schedulers import watch_solver
from diffusion_grpo.policy.trajectory import Trajectory, sample_seed
from diffusion_grpo.policy.unguided import switch_guidance_off

# flow matching by Euler, Heun, UniPC and DPM-Solver, with several networks
FLOWS = ["sd3", "flux", "sd3_heun", "wan", "wan_experts", "sana"]
# variance-preserving: epsilon-, v- and sample-prediction, a learned variance
PRESERVING = ["sd15", "sd15_heun", "sd2", "sdxl", "pixart", "cogvideox", "kandinsky_prior", "deepfloyd"]
# latents written as data + sigma * noise, and Stable Cascade's cosine
OTHERS = ["cosmos", "cosmos2", "stable_audio", "svd", "cascade_prior"]
STEPS = 4


def clean_rollout(name):
    policy, inputs = make_policy(name)
    return policy, inputs, record(policy, inputs, num_inference_steps=STEPS, keeps_clean=True)


def noise_of(clean, step):
    """The noise of each sample at a step, as its seed fixes it."""
    seeds, size = [sample_seed("renoise", int(seed), step) for seed in clean.seeds], clean.latents.shape[1:]
    return torch.stack([torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def predict(policy, inputs, latents, step, clean):
    """What the scheduler gets for any latents at a step, without guidance and with gradient."""
    kind, seen = type(policy.scheduler), []
    inputs = switch_guidance_off(policy.pipe, policy.networks, inputs)
    distribution = kind.distribution
    steps = torch.full((len(latents), 1), step)
    records = latents[:, None], latents[:, None], torch.zeros(len(latents), 1), steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "distribution", lambda self, x, *args: seen.append(x) or distribution(self, x, *args))
        replay(policy, inputs, Trajectory(*records, clean.seeds, clean.initial_seeds, STEPS, 0.7), step)
    return seen[0]


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_is_noised_as_diffusers_does_it(name):
    """Against the velocity at the latent made by hand, in float64."""
    policy, inputs, clean = clean_rollout(name)
    for step in (1, STEPS - 1):
        with torch.no_grad():
            found = denoise(policy, inputs, clean, step)
            sigma = policy.scheduler.sigmas[policy.scheduler.first + step].double()
            noise = noise_of(clean, step)
            noised = ((1 - sigma) * clean.latents + sigma * noise).float()
            velocity = predict(policy, inputs, noised, step, clean)
        assert found.moves is None and torch.allclose(found.sigma.double(), sigma)
        torch.testing.assert_close(found.clean, noised - sigma.float() * velocity, rtol=1e-4, atol=1e-4)
        error = ((velocity.double() - (noise - clean.latents)) ** 2).flatten(1).mean(1)
        torch.testing.assert_close(found.error(), error, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(found.norm(), velocity.double().flatten(1).pow(2).mean(1).sqrt(), rtol=2e-3, atol=0)
        assert found.compare(found)["velocity/ratio_to_ref"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", PRESERVING)
def test_a_variance_preserving_latent_is_noised_as_diffusers_does_it(name):
    policy, inputs, clean = clean_rollout(name)
    for step in (1, 2):
        with torch.no_grad():
            found = denoise(policy, inputs, clean, step)
            scheduler, noise = policy.scheduler, noise_of(clean, step)
            time = scheduler.timesteps[scheduler.first + step].reshape(1)
            noised = scheduler.add_noise(clean.latents, noise, time.expand(2).long())
            output = predict(policy, inputs, noised, step, clean).double()
        alpha = scheduler.alphas_cumprod[int(time)].double()
        output = output.chunk(2, 1)[0] if output.shape[1] == 2 * noised.shape[1] else output
        a, b, x = alpha.sqrt(), (1 - alpha).sqrt(), noised.double()
        kind = scheduler.config.prediction_type
        expected = {"epsilon": (x - b * output) / a, "v_prediction": a * x - b * output, "sample": output}[kind]
        scale = float(expected.abs().max())
        assert torch.allclose(found.sigma.double(), b)
        torch.testing.assert_close(found.clean.double(), expected, rtol=1e-3, atol=1e-4 * scale)
        v = (a * x - expected) / b
        torch.testing.assert_close(found.norm(), v.flatten(1).pow(2).mean(1).sqrt(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_coordinates(name):
    """The network is handed data + sigma * noise, or the cosine schedule's mix of the two."""
    policy, inputs, clean = clean_rollout(name)
    handed, scheduler = {}, policy.scheduler
    step_of = type(scheduler).denoise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(scheduler), "denoise", lambda self, p, t, s: handed.update(time=t, sample=s) or step_of(self, p, t, s)
        )
        with torch.no_grad():
            found = denoise(policy, inputs, clean, 2)
    noise = noise_of(clean, 2).double()
    if name == "cascade_prior":
        alpha = scheduler._alpha_cumprod(handed["time"][:1], "cpu").double()
        expected, share = alpha.sqrt() * clean.latents + (1 - alpha).sqrt() * noise, (1 - alpha).sqrt()
    else:
        sigma = scheduler.sigmas[2].double()
        expected, share = clean.latents + sigma * noise, sigma / (1 + sigma**2).sqrt()
    sample = handed["sample"][:2].double()
    torch.testing.assert_close(sample, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.sigma.double().flatten()[0], share.flatten()[0], rtol=1e-5, atol=0)


def test_two_latents_are_noised_each_by_its_own_scheduler():
    policy, inputs, clean = clean_rollout("ltx2")
    with torch.no_grad():
        found = denoise(policy, inputs, clean, 1)
    assert found.clean.shape == clean.latents.shape == found.sigma.shape
    assert torch.isfinite(found.error()).all() and torch.equal(found.target, clean.latents)


@pytest.mark.parametrize("name", ["sd3", "wan", "sd15", "sdxl", "sana", "cosmos"])
def test_a_rollout_is_what_the_plain_pipeline_samples(name):
    """By its own solver, multistep ones included: the same images as a user's own call with the same seeds."""
    pipe, inputs = tiny_pipelines.build(name)
    policy, solver = DenoisingPolicy(pipe), pipe.scheduler
    made, clean = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=STEPS, keeps_clean=True)
    arguments = call_arguments(policy.pipe, inputs, STEPS, clean.initial_seeds)
    with torch.no_grad():
        latents = pipe(**{**arguments, "output_type": "latent"})[0]
    assert pipe.scheduler is solver and len(made) == 2
    scale = float(latents.abs().max())  # prompts are encoded one by one here, which changes the last bits
    torch.testing.assert_close(latents.float().flatten(1), clean.latents.flatten(1), rtol=0, atol=1e-4 * scale)


def test_a_solver_that_draws_noise_is_replaced():
    for name, is_watched in (("sd3", True), ("wan", True), ("kandinsky_prior", False), ("deepfloyd", False)):
        pipe, _ = tiny_pipelines.build(name)
        assert (watch_solver(pipe.scheduler, lambda *_: None) is not None) == is_watched
    twice = [clean_rollout("deepfloyd")[2].latents for _ in range(2)]
    assert torch.equal(*twice)


def test_what_the_pipeline_holds_fixed_is_no_target():
    """Inpainting writes the known half into its latents after every step."""
    policy, inputs, clean = clean_rollout("flux_inpaint")
    with torch.no_grad():
        found = denoise(policy, inputs, clean, 2)
    assert 0.4 < found.moves.float().mean() < 0.6
    worse = torch.where(found.moves, found.clean, found.clean + 100.0)
    assert torch.equal(found.error(worse), torch.zeros(2, dtype=torch.float64))  # what is fixed does not count
    assert found.error(found.clean + 1.0)[0].item() == pytest.approx(1 / found.sigma.item() ** 2, rel=1e-4)


def continue_image(seed=0):
    """Wan 2.2 TI2V from an image: the first of two latent frames is the image's, in the network's input alone."""
    pipe, inputs = tiny_pipelines.build("wan_ti2v")
    parts = {**pipe.components, "image_encoder": None, "image_processor": None}
    pipe = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    numbers = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    return DenoisingPolicy(pipe), inputs | {"image": Image.fromarray(numbers), "prompt": ["a cat"]}


def test_a_frame_that_only_the_network_gets_is_no_target():
    """Against float64, and whatever the solver left there: the pipeline replaces it before it decodes."""
    policy, inputs = continue_image()
    _, clean = rollout(policy, inputs, seeds=[1], num_inference_steps=STEPS, keeps_clean=True)
    found, step = denoise(policy, inputs, clean, 2), 2
    assert found.moves[:, :, 1:].all() and not found.moves[:, :, 0].any()
    sigma = policy.scheduler.sigmas[policy.scheduler.first + step].double()
    noise = noise_of(clean, step)
    noised = ((1 - sigma) * clean.latents + sigma * noise).float()
    velocity = predict(policy, inputs, noised, step, clean)
    error = ((velocity.double() - (noise - clean.latents)) ** 2)[:, :, 1:].flatten(1).mean(1)
    torch.testing.assert_close(found.error(), error, rtol=1e-3, atol=0)
    weights = [parameter for parameter in policy.network.parameters() if parameter.requires_grad]
    expected, gradients = (torch.autograd.grad(value.sum(), weights) for value in (error, found.error()))
    largest = max(gradient.abs().max() for gradient in expected)
    assert all((a - b).abs().max() < 1e-3 * largest for a, b in zip(expected, gradients, strict=True))
    clean.latents[:, :, 0] += 100.0
    with torch.no_grad():
        torch.testing.assert_close(denoise(policy, inputs, clean, step).error(), found.error(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["wan_image", "sd15_inpaint_9", "sd15_controlnet"])
def test_a_condition_beside_the_latents_holds_nothing(name):
    policy, inputs, clean = clean_rollout(name)
    with torch.no_grad():
        assert denoise(policy, inputs, clean, 2).moves is None


def test_a_network_that_is_not_given_the_latents_is_refused(monkeypatch):
    policy, inputs, clean = clean_rollout("sd3")
    monkeypatch.setattr(InputWatch, "follow", lambda self, latents: self.seen.append(None) or latents)
    with pytest.raises(UnsupportedPipeline, match="unknown which parts of the latents stay fixed; train it on"):
        denoise(policy, inputs, clean, 2)


def test_a_step_beyond_the_loop_is_named():
    pipe, inputs = tiny_pipelines.build("sd15_img2img")  # strength below 1: fewer steps than asked for
    _, clean = rollout(pipe, inputs, seeds=[1, 2], num_inference_steps=STEPS, keeps_clean=True)
    with pytest.raises(UnsupportedPipeline, match="there is no step 3 to train at"):
        denoise(pipe, inputs, clean, 3)
    with pytest.raises(ValueError, match="train at 1 or later"):
        denoise(pipe, inputs, clean, 0)


@pytest.mark.parametrize("name", ["sd3", "sd15", "sd2", "cosmos", "cascade_prior"])
def test_a_change_is_measured_relative_to_what_the_network_puts_out(name, monkeypatch):
    """Whatever it predicts: 10 % more of it is a difference of 10 %."""
    policy, inputs, clean = clean_rollout(name)
    real = policy.network.forward
    with torch.no_grad():
        now = denoise(policy, inputs, clean, 2)

        def scaled(*args, **kwargs):
            (output,) = real(*args, **kwargs | {"return_dict": False})[:1]
            return (1.1 * output,)

        monkeypatch.setattr(policy.network, "forward", scaled)
        other = denoise(policy, inputs, clean, 2)
    assert now.difference(other.clean).tolist() == pytest.approx([0.1] * 2, rel=1e-3)
    assert now.difference(now.clean).tolist() == [0.0] * 2
