"""SDEs that make a deterministic sampler a stochastic policy, and the log-probabilities of their steps.

An SDE is one pure float32 function from a prediction, and the latent it was made for, to the mean and standard
deviation of the next latent. To add one, write the function and an entry of `SDES`: its name, the function, how the
schedulers that it fits write latents (`coordinates`), its usual noise level and the largest one.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

MeanStd = tuple[Tensor, Tensor]


def log_density(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the (batch,) Gaussian log-density of `value` (batch, ...), averaged over all other dimensions.

    It is an average because the sum over a tensor as large as a latent would turn rounding into ratios far from 1.

    Args:
        value, mean: (batch, ...) float32.
        std: standard deviation, broadcastable to `mean`; elements where it is 0 are held fixed and do not count.

    Examples:
        >>> round(log_density(torch.zeros(1, 8), torch.zeros(1, 8), torch.tensor(1.0)).item(), 3)
        -0.919
    """
    moves = std > 0
    std = torch.where(moves, std, 1.0)
    density = (-((value - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)).flatten(1)
    if moves.all():
        return density.mean(1)
    moves = moves.expand(value.shape).flatten(1)  # elements that a pipeline holds fixed have no density
    return (density * moves).sum(1) / moves.sum(1)


def squared_error(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return what Flow-GRPO's code uses as the log-density under CPS: `-(value - mean)**2`, averaged, (batch,).

    It leaves out 1 / (2 * std**2) and the constants, so its ratios move 2 * std**2 times as far as the Gaussian's, and
    noisy steps weigh more than later ones. `std` only tells which elements are held fixed. The average is as in
    [`log_density`].

    Examples:
        >>> squared_error(torch.ones(1, 8), torch.zeros(1, 8), torch.tensor(0.5)).item()
        -1.0
    """
    error = (-((value - mean) ** 2)).flatten(1)
    moves = (std > 0).expand(value.shape).flatten(1)
    return (error * moves).sum(1) / moves.sum(1)


LOG_PROBS = {"gaussian": log_density, "squared_error": squared_error}


def check_log_prob(log_prob_type: str, sde_type: str) -> None:
    """Refuse an unknown form of the log-probability, or one that an SDE does not have."""
    if log_prob_type not in LOG_PROBS:
        raise ValueError(f"log_prob_type must be one of {', '.join(LOG_PROBS)}, got {log_prob_type!r}.")
    if log_prob_type == "squared_error" and sde_type != "cps":
        raise ValueError(
            f"log_prob_type='squared_error' is Flow-GRPO's form for cps, but the SDE is {sde_type}; set "
            "sde_type='cps', or leave it out."
        )


def flow_sde(
    prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float, sigma_max: Tensor
) -> MeanStd:
    """Take a step of Flow-GRPO's reverse SDE (https://huggingface.co/papers/2505.05470).

    Args:
        prediction: velocity v = noise - data at `sigma`, (batch, ...).
        sample: latent x at `sigma`, (batch, ...).
        sigma, sigma_next: noise levels in [0, 1], `sigma_next < sigma`; 0-dimensional or broadcastable to `sample`.
        noise_level: the paper's a.
        sigma_max: replaces `sigma` in 1 - sigma where `sigma` is (almost) 1; usually the schedule's second sigma.

    Returns:
        Mean (batch, ...) of the next latent, and its standard deviation, broadcastable to the mean.

    Examples:
        >>> latents, velocity = torch.zeros(1, 4), torch.ones(1, 4)
        >>> sigma, sigma_next = torch.tensor(0.8), torch.tensor(0.6)
        >>> ends = {"sigma_max": torch.tensor(0.9)}
        >>> mean, std = flow_sde(velocity, latents, sigma, sigma_next, noise_level=0.7, **ends)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.626)
    """
    # schedules start at 1 or just below it, where a small 1 - sigma would make the noise too large
    bounded = torch.where(sigma > 0.99, torch.minimum(sigma, sigma_max), sigma)
    g = noise_level * torch.sqrt(sigma / (1 - bounded))
    return _reverse(prediction, sample, sigma, sigma_next, g)


def _reverse(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> MeanStd:
    """Take a step of the reverse SDE with the noise `g`."""
    dt = sigma_next - sigma
    mean = sample * (1 + g**2 / (2 * sigma) * dt) + prediction * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * torch.sqrt(-dt)


def wan_sde(
    prediction: Tensor,
    sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    noise_level: float,
    sigma_max: Tensor,
    sigma_min: Tensor,
) -> MeanStd:
    """Take a step of the SDE of Flow-GRPO's pipeline for Wan, which FastVideo and Flash-GRPO (2605.15980) use too.

    The noise is linear in sigma, g = noise_level * (sigma_min + (sigma_max - sigma_min) * sigma). The noise of
    [`flow_sde`] falls faster, and grows without bound as sigma approaches 1. All three use a `noise_level` of 1.

    Args:
        prediction, sample, sigma, sigma_next: as in [`flow_sde`].
        noise_level: factor of all noise.
        sigma_max: the schedule's second sigma.
        sigma_min: the schedule's last sigma, usually 0.

    Examples:
        >>> latents, velocity = torch.zeros(1, 4), torch.ones(1, 4)
        >>> sigma, sigma_next = torch.tensor(0.8), torch.tensor(0.6)
        >>> ends = {"sigma_max": torch.tensor(0.9), "sigma_min": torch.tensor(0.0)}
        >>> mean, std = wan_sde(velocity, latents, sigma, sigma_next, noise_level=1.0, **ends)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.322)
    """
    g = noise_level * (sigma_min + (sigma_max - sigma_min) * sigma)
    return _reverse(prediction, sample, sigma, sigma_next, g)


def dance_sde(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """Take a step of DanceGRPO's SDE with constant noise (https://huggingface.co/papers/2505.07818).

    `noise_level` is its eta. Arguments as in [`flow_sde`].

    Examples:
        >>> latents, velocity = torch.zeros(1, 4), torch.ones(1, 4)
        >>> sigma, sigma_next = torch.tensor(0.8), torch.tensor(0.6)
        >>> mean, std = dance_sde(velocity, latents, sigma, sigma_next, noise_level=0.3)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.134)
    """
    dt = sigma_next - sigma
    clean = sample - sigma * prediction
    score = -(sample - (1 - sigma) * clean) / sigma**2
    mean = sample + prediction * dt - 0.5 * noise_level**2 * score * dt
    return mean, noise_level * torch.sqrt(-dt)


def cps(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """Take a step of Coefficients-Preserving Sampling (https://huggingface.co/papers/2509.05952).

    Fresh noise replaces predicted noise, so that each latent has exactly the noise of its sigma. Arguments as in
    [`flow_sde`], with `noise_level` in [0, 1].

    Examples:
        >>> latents, velocity = torch.zeros(1, 4), torch.ones(1, 4)
        >>> sigma, sigma_next = torch.tensor(0.8), torch.tensor(0.6)
        >>> mean, std = cps(velocity, latents, sigma, sigma_next, noise_level=0.8)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.571)
    """
    return _preserve_coefficients(
        prediction, sample, sigma, sigma_next, sigma_next * math.sin(noise_level * math.pi / 2)
    )


def precise(prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """Take a step of Precise's sampling (https://huggingface.co/papers/2605.23522); `noise_level` is its eta, above 0.

    It is [`cps`] with another std, which grows with the size of the step: at sigma 1, all of the noise is fresh; in
    small steps, only little of it. Arguments as in [`flow_sde`].

    Examples:
        >>> latents, velocity = torch.zeros(1, 4), torch.ones(1, 4)
        >>> sigma, sigma_next = torch.tensor(0.8), torch.tensor(0.6)
        >>> mean, std = precise(velocity, latents, sigma, sigma_next, noise_level=1.5)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.566)
    """
    kept = (sigma_next * (1 - sigma)) / (sigma * (1 - sigma_next))
    std = sigma_next * torch.sqrt((1 - kept ** (noise_level**2)).clamp(min=0))
    return _preserve_coefficients(prediction, sample, sigma, sigma_next, std)


def _preserve_coefficients(
    prediction: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, std: Tensor
) -> MeanStd:
    """Return the mean and `std` for which the next latent has exactly the noise of `sigma_next`."""
    clean = sample - sigma * prediction
    noise = sample + (1 - sigma) * prediction
    # clamped: if all of the noise is fresh, rounding may give a negative number
    return (1 - sigma_next) * clean + torch.sqrt((sigma_next**2 - std**2).clamp(min=0)) * noise, std


def ddim(
    prediction: Tensor,
    sample: Tensor,
    alpha_cumprod: Tensor,
    alpha_cumprod_next: Tensor,
    *,
    noise_level: float,
    prediction_type: str = "epsilon",
    clip: Callable[[Tensor], Tensor] | None = None,
) -> MeanStd:
    """Take a step of DDIM with eta = `noise_level` (https://huggingface.co/papers/2010.02502), as DDPO trains it
    (https://huggingface.co/papers/2305.13301).

    Args:
        prediction: noise, v or clean sample at the current step, (batch, ...).
        sample: latent at the current step, (batch, ...).
        alpha_cumprod, alpha_cumprod_next: cumulative alphas of this step and of the next, in (0, 1].
        noise_level: eta; 1 gives DDPM's variance.
        prediction_type: "epsilon", "v_prediction" or "sample".
        clip: function that bounds the predicted clean sample, if the scheduler's config asks for it.

    Returns:
        Mean (batch, ...) of the next latent, and its standard deviation.

    Examples:
        >>> noise, latents = torch.ones(1, 4), torch.zeros(1, 4)
        >>> mean, std = ddim(noise, latents, torch.tensor(0.5), torch.tensor(0.8), noise_level=1.0)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.387)
    """
    alpha, beta = alpha_cumprod, 1 - alpha_cumprod
    clean, noise = split_prediction(prediction, sample, alpha, prediction_type)
    if clip is not None:
        clean = clip(clean)
    beta_next = 1 - alpha_cumprod_next
    std = noise_level * torch.sqrt(beta_next / beta * (1 - alpha / alpha_cumprod_next))
    # clamped: with eta 1 from pure noise this is 0, and rounding may make it negative
    return alpha_cumprod_next.sqrt() * clean + torch.sqrt((beta_next - std**2).clamp(min=0)) * noise, std


def split_prediction(
    prediction: Tensor, sample: Tensor, alpha_cumprod: Tensor, prediction_type: str
) -> tuple[Tensor, Tensor]:
    """Return the clean sample and the noise that a prediction on a variance-preserving latent implies."""
    alpha, beta = alpha_cumprod, 1 - alpha_cumprod
    if prediction_type == "epsilon":
        return (sample - beta.sqrt() * prediction) / alpha.sqrt(), prediction
    if prediction_type == "v_prediction":
        return alpha.sqrt() * sample - beta.sqrt() * prediction, alpha.sqrt() * prediction + beta.sqrt() * sample
    if prediction_type == "sample":
        return prediction, (sample - alpha.sqrt() * prediction) / beta.sqrt()
    raise ValueError(f"prediction_type must be epsilon, v_prediction or sample, got {prediction_type!r}.")


def ancestral(clean: Tensor, sample: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float) -> MeanStd:
    """Take an ancestral step where latents are data + sigma * noise (EDM, https://huggingface.co/papers/2206.00364).

    It is DDIM's step (https://huggingface.co/papers/2010.02502) in these models' coordinates, x / sqrt(alpha).

    Args:
        clean: the denoised sample predicted at `sigma`, (batch, ...).
        sample: latent at `sigma`, (batch, ...).
        sigma, sigma_next: noise levels in [0, inf), `sigma_next < sigma`.
        noise_level: eta in [0, 1]; 0 is Euler's method.

    Returns:
        Mean (batch, ...) of the next latent, and its standard deviation.

    Examples:
        >>> clean, latents = torch.zeros(1, 4), torch.ones(1, 4)
        >>> mean, std = ancestral(clean, latents, torch.tensor(2.0), torch.tensor(1.0), noise_level=1.0)
        >>> mean.shape, round(float(std), 3)
        (torch.Size([1, 4]), 0.866)
    """
    std = noise_level * sigma_next * torch.sqrt(1 - (sigma_next / sigma) ** 2)
    # clamped: rounding may give a negative number
    return clean + torch.sqrt((sigma_next**2 - std**2).clamp(min=0)) * ((sample - clean) / sigma), std


def consistency(clean: Tensor, shared: Tensor, signal: Tensor, deviation: Tensor, *, noise_level: float) -> MeanStd:
    """Noise a predicted clean sample again, as consistency samplers do (https://huggingface.co/papers/2404.03673).

    `noise_level` is the share of the noise's deviation that each sample draws by itself; 1 is the sampler's own step.
    """
    kept = math.sqrt(1 - noise_level**2)
    return signal * clean + kept * deviation * shared, noise_level * deviation


def tcd(clean: Tensor, noise: Tensor, alpha_next: Tensor, alpha_between: Tensor, *, noise_level: float) -> MeanStd:
    """Jump to a lower noise level and add noise up to the next (https://huggingface.co/papers/2402.19159).

    `noise_level` is gamma: the jump goes to the level at (1 - gamma) of the next timestep; 1 is a consistency step.
    """
    between = alpha_between.sqrt() * clean + (1 - alpha_between).sqrt() * noise
    share = alpha_next / alpha_between
    return share.sqrt() * between, torch.sqrt((1 - share).clamp(min=0))


Coordinates = Literal["flow", "variance_preserving", "sigma", "consistency", "trajectory"]


@dataclasses.dataclass(frozen=True)
class SDE:
    """An entry of `SDES`.

    Attributes:
        name: value of the setting `sde_type` that selects it.
        function: takes tensors by position and `noise_level` by keyword. Schedulers of its coordinates offer further
            keywords; the function gets those that its signature names.
        coordinates: how latents are written in the schedulers that it fits.

            * "flow": (1 - sigma) * data + sigma * noise. Positional arguments are prediction, sample, sigma and
              sigma_next; keywords are `sigma_max` and `sigma_min`, the schedule's second and last sigma.
            * "variance_preserving": sqrt(alpha) * data + sqrt(1 - alpha) * noise. Positional arguments are prediction,
              sample, alpha_cumprod and alpha_cumprod_next; keywords are `prediction_type` and `clip`.
            * "sigma": data + sigma * noise. Positional arguments are the predicted clean sample, sample, sigma and
              sigma_next.
            * "consistency": of consistency samplers. Positional arguments are the predicted clean sample, noise that
              all samples of an initial latent share, and the factors of data and noise in the next latent.
            * "trajectory": the same for TCD. Positional arguments are the predicted clean sample and noise, and
              alpha_cumprod after the step and at the level jumped to.
        noise_level: the usual noise level, the default of the setting `noise_level`.
        max_noise_level: the largest that a user may set: 1 if it is a share of the latent's noise, or `math.inf`.

    Examples:
        >>> def fading(prediction, sample, sigma, sigma_next, *, noise_level):
        ...     std = noise_level * sigma_next
        ...     clean, noise = sample - sigma * prediction, sample + (1 - sigma) * prediction
        ...     return (1 - sigma_next) * clean + torch.sqrt(sigma_next**2 - std**2) * noise, std
        >>> sde = SDE("fading", fading, "flow", noise_level=0.5, max_noise_level=1)
        >>> sigmas = torch.tensor(0.8), torch.tensor(0.6)
        >>> mean, std = sde(torch.ones(1, 4), torch.zeros(1, 4), *sigmas, noise_level=0.5)
        >>> round(float(std), 1)
        0.3
    """

    name: str
    function: Callable[..., MeanStd]
    coordinates: Coordinates
    noise_level: float
    max_noise_level: float

    def __call__(self, *tensors: Tensor, noise_level: float, **offered: Any) -> MeanStd:
        """Return mean and standard deviation of the next latent."""
        named = inspect.signature(self.function).parameters
        taken = {name: value for name, value in offered.items() if name in named}
        return self.function(*tensors, noise_level=noise_level, **taken)


# the first entry for each kind of coordinates is the one that sde_type="auto" selects
SDES = {
    "flow_sde": SDE("flow_sde", flow_sde, "flow", 0.7, math.inf),
    "dance_sde": SDE("dance_sde", dance_sde, "flow", 0.3, math.inf),
    "wan_sde": SDE("wan_sde", wan_sde, "flow", 1.0, math.inf),
    "cps": SDE("cps", cps, "flow", 0.8, 1),
    "precise": SDE("precise", precise, "flow", 1.5, math.inf),
    "ddim": SDE("ddim", ddim, "variance_preserving", 1.0, 1),
    "ancestral": SDE("ancestral", ancestral, "sigma", 1.0, 1),
    "consistency": SDE("consistency", consistency, "consistency", 1.0, 1),
    "tcd": SDE("tcd", tcd, "trajectory", 0.3, 1),
}


def sdes_of(coordinates: Coordinates) -> list[SDE]:
    """Return the SDEs for schedulers that write latents in these coordinates; the first is the default.

    Args:
        coordinates: as in [`SDE`].

    Examples:
        >>> [sde.name for sde in sdes_of("flow")]
        ['flow_sde', 'dance_sde', 'wan_sde', 'cps', 'precise']
    """
    return [sde for sde in SDES.values() if sde.coordinates == coordinates]
