"""Each process against references in float64 that are derived anew from the papers, and the identities it must keep.

The references do not repeat the closed forms of `sde.py`: they go from the SDE and the score of a Gaussian,
from Bayes' rule, or from angles, and from diffusers' own schedulers.
"""

import functools
import math

import pytest
import tiny_pipelines
import torch
from diffusers import DDIMScheduler
from tiny_runs import logged, train_and_compare, trainer_for

from diffusion_grpo.policy import sde
from diffusion_grpo.policy.rollout import DenoisingPolicy
from diffusion_grpo.policy.sde import (
    ancestral,
    check_log_prob,
    cps,
    dance_sde,
    ddim,
    flow_sde,
    log_density,
    precise,
    wan_sde,
)

SHAPE = (3, 4, 5, 6)
SIGMA_PAIRS = [(0.98, 0.9), (0.75, 0.6), (0.5, 0.35), (0.2, 0.02), (0.1, 0.0)]
ALPHA_PAIRS = [(0.0047, 0.05), (0.2, 0.35), (0.6, 0.9), (0.95, 0.999), (0.9, 1.0)]
LEVELS = [0.1, 0.3, 0.7, 1.0]
FLOW = {"flow_sde": functools.partial(flow_sde, sigma_max=torch.tensor(0.97)), "dance_sde": dance_sde, "cps": cps}
FLOW |= {"wan_sde": functools.partial(wan_sde, sigma_max=torch.tensor(0.97), sigma_min=torch.tensor(0.01))}
FLOW |= {"precise": precise}


def latents(seed=0, dtype=torch.float32):
    """A prediction and a sample."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def double(value):
    return torch.tensor(value, dtype=torch.float64)


def assert_same(actual, expected):
    """Mean and std in float32 against the reference: within some roundings of the largest number that enters."""
    mean, std = actual
    assert mean.dtype == std.dtype == torch.float32
    scale = expected[0].abs().max().item()
    torch.testing.assert_close(mean.double(), expected[0], rtol=0, atol=2e-6 * max(scale, 1))
    torch.testing.assert_close(std.double(), double(expected[1]), rtol=1e-5, atol=1e-7)


# References


def gaussian_score(sample, clean, sigma):
    """Gradient of the log-density of sample = (1 - sigma) * clean + sigma * noise, by autograd."""
    sample = sample.detach().requires_grad_()
    density = torch.distributions.Normal((1 - sigma) * clean.detach(), sigma).log_prob(sample).sum()
    return torch.autograd.grad(density, sample)[0]


def euler_maruyama(prediction, sample, sigma, sigma_next, diffusion):
    """A step of dx = (v - g**2 / 2 * score) dt + g dw, run backwards: the SDE with the marginals of dx = v dt."""
    dt = sigma_next - sigma
    score = gaussian_score(sample, sample - sigma * prediction, sigma)
    return sample + (prediction - diffusion**2 / 2 * score) * dt, diffusion * math.sqrt(-dt)


def flow_sde_reference(prediction, sample, sigma, sigma_next, level):
    return euler_maruyama(prediction, sample, sigma, sigma_next, level * math.sqrt(sigma / (1 - sigma)))


def dance_sde_reference(prediction, sample, sigma, sigma_next, level):
    return euler_maruyama(prediction, sample, sigma, sigma_next, level)


def cps_reference(prediction, sample, sigma, sigma_next, level):
    """The noise is turned by an angle: of sigma_next, the cosine stays predicted and the sine is fresh."""
    angle = level * math.pi / 2
    clean, noise = sample - sigma * prediction, sample + (1 - sigma) * prediction
    return (1 - sigma_next) * clean + sigma_next * math.cos(angle) * noise, sigma_next * math.sin(angle)


def wan_sde_reference(prediction, sample, sigma, sigma_next, level):
    """The noise is that of sigma, moved from [0, 1] to the schedule's [0.01, 0.97]."""
    return euler_maruyama(prediction, sample, sigma, sigma_next, level * (0.97 * sigma + 0.01 * (1 - sigma)))


def precise_reference(prediction, sample, sigma, sigma_next, level):
    """The share of the noise that stays is the ratio of the noise-to-signal ratios, to the power of eta squared.

    As sigma_next goes to 0, so does that share (for eta above 0), and mean and std go to the clean sample and 0.
    """
    if sigma_next == 0:
        kept = 0.0
    else:
        kept = math.exp(level**2 * (math.log(sigma_next / (1 - sigma_next)) - math.log(sigma / (1 - sigma))))
    return cps_reference(prediction, sample, sigma, sigma_next, math.acos(math.sqrt(kept)) / (math.pi / 2))


FLOW_REFERENCES = {"flow_sde": flow_sde_reference, "dance_sde": dance_sde_reference, "cps": cps_reference}
FLOW_REFERENCES |= {"wan_sde": wan_sde_reference, "precise": precise_reference}


def ddpm_posterior(clean, sample, alpha, alpha_next):
    """Bayes' rule: next latents are N(sqrt(alpha_next) clean, 1 - alpha_next) before sample is seen, and sample is
    N(sqrt(ratio) next, 1 - ratio) with ratio = alpha / alpha_next."""
    ratio = alpha / alpha_next
    precision = 1 / (1 - alpha_next) + ratio / (1 - ratio)
    mean = math.sqrt(alpha_next) * clean / (1 - alpha_next) + math.sqrt(ratio) * sample / (1 - ratio)
    return mean / precision, math.sqrt(1 / precision)


def predictions(clean, noise, alpha):
    """What networks of the three types put out for the same belief."""
    return {
        "epsilon": noise,
        "sample": clean,
        "v_prediction": math.sqrt(alpha) * noise - math.sqrt(1 - alpha) * clean,
    }


# Against the references


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sigmas", SIGMA_PAIRS)
@pytest.mark.parametrize("process", FLOW)
def test_flow_sdes_equal_their_papers(process, sigmas, level):
    prediction, sample = latents()
    sigmas = [torch.tensor(sigma) for sigma in sigmas]
    actual = FLOW[process](prediction, sample, *sigmas, noise_level=level)
    rounded = [sigma.item() for sigma in sigmas]  # to float32: 1 - 0.98 is sensitive to it
    expected = FLOW_REFERENCES[process](prediction.double(), sample.double(), *rounded, level)
    assert_same(actual, expected)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("alphas", ALPHA_PAIRS[:-1])
def test_ddim_with_eta_one_is_the_posterior_of_ddpm(alphas, kind):
    clean, noise = latents(dtype=torch.float64)
    alpha, alpha_next = alphas
    sample = math.sqrt(alpha) * clean + math.sqrt(1 - alpha) * noise
    prediction = predictions(clean, noise, alpha)[kind]
    arguments = prediction.float(), sample.float(), torch.tensor(alpha), torch.tensor(alpha_next)
    mean, std = ddim(*arguments, noise_level=1.0, prediction_type=kind)
    expected = ddpm_posterior(clean, sample, alpha, alpha_next)
    # dividing by sqrt(alpha) makes roundings larger
    torch.testing.assert_close(mean.double(), expected[0], rtol=0, atol=1e-6 / math.sqrt(alpha))
    torch.testing.assert_close(std.double(), double(expected[1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("timestep", [901, 501, 1])
def test_ddim_equals_the_scheduler_of_diffusers(timestep, eta, kind):
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    ends = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    scheduler = DDIMScheduler(prediction_type=kind, **betas, **ends)
    scheduler.set_timesteps(10)
    alphas = scheduler.alphas_cumprod
    alpha_next = alphas[timestep - 100] if timestep > 100 else scheduler.final_alpha_cumprod
    prediction, sample = latents()
    noise = torch.ones(SHAPE)
    stock = [
        scheduler.step(prediction, timestep, sample, eta=eta, variance_noise=z, return_dict=False)[0]
        for z in (noise, -noise)
    ]
    mean, std = ddim(prediction, sample, alphas[timestep], alpha_next, noise_level=eta, prediction_type=kind)
    torch.testing.assert_close(mean, (stock[0] + stock[1]) / 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std, ((stock[0] - stock[1]) / 2).mean(), rtol=1e-4, atol=1e-6)


def test_log_density_is_the_gaussians_averaged():
    value, mean = latents()
    for std in (torch.tensor(0.3), torch.rand(3, 1, 1, 1) + 0.1):
        expected = torch.distributions.Normal(mean.double(), std.double()).log_prob(value.double()).mean((1, 2, 3))
        actual = log_density(value, mean, std)
        assert actual.shape == (3,) and actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


# Identities


@pytest.mark.parametrize("sigmas", SIGMA_PAIRS)
@pytest.mark.parametrize("process", FLOW)
def test_without_noise_a_flow_process_is_euler(process, sigmas):
    prediction, sample = latents()
    mean, std = FLOW[process](prediction, sample, *map(torch.tensor, sigmas), noise_level=0.0)
    assert std == 0
    expected = sample + (torch.tensor(sigmas[1]) - torch.tensor(sigmas[0])) * prediction
    if process in ("cps", "precise"):  # go by way of the clean sample
        torch.testing.assert_close(mean, expected, rtol=0, atol=2e-6)
    else:
        assert torch.equal(mean, expected)


def test_flow_sde_starts_at_pure_noise_with_the_second_sigma_in_the_denominator():
    prediction, sample = latents()
    sigma, sigma_next = torch.tensor(1.0), torch.tensor(0.9)
    mean, std = flow_sde(prediction, sample, sigma, sigma_next, noise_level=0.7, sigma_max=sigma_next)
    expected = euler_maruyama(prediction.double(), sample.double(), 1.0, 0.9, 0.7 * math.sqrt(1 / (1 - 0.9)))
    assert_same((mean, std), expected)


@pytest.mark.parametrize("process", FLOW)
def test_each_sample_may_have_sigmas_of_its_own(process):
    prediction, sample = latents()
    sigma, sigma_next = torch.tensor([1.0, 0.5, 0.3]), torch.tensor([0.97, 0.4, 0.0])
    column = (-1, 1, 1, 1)
    together = FLOW[process](prediction, sample, sigma.view(column), sigma_next.view(column), noise_level=0.6)
    for i in range(3):
        one = slice(i, i + 1)
        alone = FLOW[process](prediction[one], sample[one], sigma[i], sigma_next[i], noise_level=0.6)
        torch.testing.assert_close(together[0][one], alone[0])
        torch.testing.assert_close(together[1][i].squeeze(), alone[1])


# Marginals of a point mass, where the network's prediction is exact whatever the sample: next latents must be
# distributed as if clean data had been noised to the next level. Mean and std are affine in the noise of the sample,
# so that evaluating the process at two noises gives the exact distribution.


def transported(step, coefficients, clean=1.7):
    """Mean and variance of the next latent if sample = data * clean + noise * N(0, 1)."""
    data, noise = coefficients
    means, std = [], None
    for z in (0.0, 1.0):
        mean, std = step(double([[data * clean + noise * z]]), double([[z]]), double([[clean]]))
        means.append(mean.item())
    return means[0], (means[1] - means[0]) ** 2 + std.item() ** 2


def flow_step(process, sigma, sigma_next, level):
    def step(sample, noise, clean):
        return process(noise - clean, sample, double(sigma), double(sigma_next), noise_level=level)

    return functools.partial(transported, step, (1 - sigma, sigma))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sigmas", [(1.0, 0.9), (1.0, 0.0), *SIGMA_PAIRS])
def test_cps_preserves_the_marginals_of_a_point_mass_exactly(sigmas, level):
    mean, variance = flow_step(cps, *sigmas, level)()
    assert mean == pytest.approx((1 - sigmas[1]) * 1.7, abs=1e-12)
    assert variance == pytest.approx(sigmas[1] ** 2, abs=1e-12)


@pytest.mark.parametrize("eta", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("sigmas", [(1.0, 0.9), *SIGMA_PAIRS])
def test_precise_is_cps_with_its_std_and_keeps_the_same_marginals(sigmas, eta):
    prediction, sample = latents(dtype=torch.float64)
    sigma, sigma_next = map(double, sigmas)
    mean, std = precise(prediction, sample, sigma, sigma_next, noise_level=eta)
    if sigma == 1:
        assert std == sigma_next
    angle = math.asin((std / sigma_next).item()) if sigma_next > 0 else 0.0
    expected = cps(prediction, sample, sigma, sigma_next, noise_level=angle / (math.pi / 2))
    torch.testing.assert_close((mean, std), expected, rtol=1e-7, atol=1e-7)
    assert (std == 0) == (sigma_next == 0)  # silent at the end
    shifted = flow_step(precise, *sigmas, eta)()
    assert shifted == pytest.approx(((1 - sigmas[1]) * 1.7, sigmas[1] ** 2), abs=1e-12)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("alphas", ALPHA_PAIRS)
def test_ddim_preserves_the_marginals_of_a_point_mass_exactly(alphas, kind, eta):
    alpha, alpha_next = alphas

    def step(sample, noise, clean):
        prediction = predictions(clean, noise, alpha)[kind]
        return ddim(prediction, sample, double(alpha), double(alpha_next), noise_level=eta, prediction_type=kind)

    mean, variance = transported(step, (math.sqrt(alpha), math.sqrt(1 - alpha)))
    assert mean == pytest.approx(math.sqrt(alpha_next) * 1.7, abs=1e-9)
    assert variance == pytest.approx(1 - alpha_next, abs=1e-9)


@pytest.mark.parametrize("sigma", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("process", [FLOW["flow_sde"], dance_sde, FLOW["wan_sde"]])
def test_sdes_preserve_the_marginals_of_a_point_mass_to_first_order(process, sigma):
    errors = []
    for dt in (0.02, 0.01, 0.005):
        mean, variance = flow_step(process, sigma, sigma - dt, 0.6)()
        assert mean == pytest.approx((1 - sigma + dt) * 1.7, abs=1e-12)
        errors.append(abs(variance - (sigma - dt) ** 2))
    assert errors[0] > 1e-9  # a discretisation, not exact
    for longer, shorter in zip(errors, errors[1:]):
        assert longer / shorter == pytest.approx(4, rel=0.1)


# Ends of the schedule


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_ddim_starts_at_zero_signal_to_noise(eta):
    """CogVideoX's first step: alpha is 0, and with eta 1 nothing but the predicted clean sample stays.

    Rounding must not make the variance that is left negative: one alpha in many shows it.
    """
    generator = torch.Generator().manual_seed(0)
    prediction, sample = torch.randn(2, 997, 2, 2, generator=generator)
    alpha_next = torch.linspace(0.001, 0.999, 997).view(-1, 1, 1)
    mean, std = ddim(
        prediction, sample, torch.tensor(0.0), alpha_next, noise_level=eta, prediction_type="v_prediction"
    )
    assert mean.isfinite().all() and std.isfinite().all()
    rest = (1 - alpha_next.double()) * (1 - eta**2)
    # the prediction is minus the clean sample, the sample is the noise
    expected = -alpha_next.double().sqrt() * prediction.double() + rest.sqrt() * sample.double()
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=2e-3)
    torch.testing.assert_close(std.double(), eta * (1 - alpha_next.double()).sqrt(), rtol=1e-4, atol=0)


def test_ddim_clips_the_clean_sample_and_nothing_else():
    prediction, sample = latents()
    alpha, alpha_next = torch.tensor(0.5), torch.tensor(0.8)
    clean = (sample - (1 - alpha).sqrt() * prediction) / alpha.sqrt()
    mean, std = ddim(prediction, sample, alpha, alpha_next, noise_level=0.3, clip=lambda clean: clean.clamp(-0.5, 0.5))
    free, free_std = ddim(prediction, sample, alpha, alpha_next, noise_level=0.3)
    assert std == free_std
    torch.testing.assert_close(free - mean, alpha_next.sqrt() * (clean - clean.clamp(-0.5, 0.5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("sigmas", [(80.0, 12.0), (1.5, 0.7), (0.1, 0.002)])
def test_ancestral_sampling_is_ddim_in_the_coordinates_of_edm(sigmas, eta):
    sigma, sigma_next = (torch.tensor(value, dtype=torch.float64) for value in sigmas)
    clean, sample = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha, alpha_next = 1 / (1 + sigma**2), 1 / (1 + sigma_next**2)
    mean, std = ddim(clean, sample * alpha.sqrt(), alpha, alpha_next, noise_level=eta, prediction_type="sample")
    ours = ancestral(clean, sample, sigma, sigma_next, noise_level=eta)
    torch.testing.assert_close(ours[0], mean / alpha_next.sqrt(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[1], std / alpha_next.sqrt(), rtol=1e-9, atol=1e-9)
    single = ancestral(*(x.float() for x in (clean, sample, sigma, sigma_next)), noise_level=eta)
    torch.testing.assert_close(single[0].double(), ours[0], rtol=1e-4, atol=1e-4)


def test_what_is_held_fixed_has_no_density():
    value, mean = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    std = torch.full((3, 6, 1), 0.3)
    std[:, :2] = 0.0
    torch.testing.assert_close(log_density(value, mean, std), log_density(value[:, 2:], mean[:, 2:], std[:, 2:]))


# one from outside


def constant(prediction, sample, sigma, sigma_next, *, noise_level):
    """Euler's step, and a standard deviation that is the same at all steps."""
    return sample + (sigma_next - sigma) * prediction, torch.full_like(sigma, noise_level / 10)


def test_a_process_from_outside_trains_and_fits_the_schedulers_it_names(monkeypatch, tmp_path):
    monkeypatch.setitem(sde.SDES, "mine", sde.SDE("mine", constant, "flow", 0.5, 1))
    with pytest.raises(ValueError, match="sde_type='mine' does not fit PNDMScheduler; use auto or one of ddim"):
        DenoisingPolicy(tiny_pipelines.build("sd15")[0], sde_type="mine")
    with pytest.raises(ValueError, match="use auto or one of .*, mine"):
        DenoisingPolicy(tiny_pipelines.build("sd3")[0], sde_type="yours")
    trainer = trainer_for(tmp_path, sde_type="mine", max_ratio_error=1e-12)
    assert train_and_compare(trainer)
    assert trainer.policy.scheduler.sde is sde.SDES["mine"]
    assert trainer.loader.buffer.samples[0].noise_level == trainer.policy.default_noise_level == 0.5
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0]


@pytest.mark.parametrize(("log_prob_type", "sde_type"), [("square", "cps"), ("squared_error", "ddim")])
def test_a_form_of_the_log_probability_that_an_sde_does_not_have_is_refused(log_prob_type, sde_type):
    with pytest.raises(ValueError, match="log_prob_type"):
        check_log_prob(log_prob_type, sde_type)
