"""The pipeline is the policy: rollouts that record, replays that score, clean samples from re-noised ones.

All take a diffusers pipeline and the keyword arguments of its `__call__`. `rollout` returns samples and a
`Trajectory`; `replay` returns the `StepDistribution` of one recorded step under the current network, with gradient;
`denoise` returns the clean samples that the network predicts. There is no code for single families: guidance, packing
and conditions are the pipeline's own in all of them, so they cannot drift apart.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from .base import Policy
from .denoising import DenoisingPolicy
from .token_process import TokenDistribution, TokenTrajectory
from .trajectory import CleanSamples, Denoised, Prefix, RolloutRequest, StepDistribution, Trajectory, sample_seed


def _as_policy(policy: Policy | DiffusionPipeline) -> Policy:
    return policy if isinstance(policy, Policy) else DenoisingPolicy(policy)


@torch.no_grad()
def rollout(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    *,
    seeds: Sequence[int],
    num_inference_steps: int,
    initial_seeds: Sequence[int] | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    noise_steps: Sequence[int] | Sequence[Sequence[int]] | None = None,
    noise_in_last_step: bool = False,
    noise_level: float | None = None,
    device: str | torch.device = "cpu",
    is_complete: bool = True,
    latents: list[Tensor] | None = None,
    is_decoded: bool = True,
    step_weight: str = "none",
    weighted_steps: Sequence[int] | None = None,
    keeps_means: bool = False,
    keeps_finished: bool = False,
    keeps_clean: bool = False,
    prefix: Prefix | None = None,
) -> tuple[Any, Trajectory | TokenTrajectory | CleanSamples | None]:
    """Call the pipeline as a user would, with noise in its steps, and record the trained ones.

    Args:
        policy: a [`Policy`], or a pipeline to make one from. The actions of a
            [`~diffusion_grpo.policy.token.TokenPolicy`] are tokens: `seeds` fix the tokens, `initial_seeds` fix their
            decoding, and `steps` and `noise_steps` have no effect.
        inputs: keyword arguments of the pipeline's `__call__` for one batch.
        seeds: one seed per sample. It fixes the noise of the sample's steps, whatever else is in the batch.
        num_inference_steps: length of the loop.
        initial_seeds: one seed per sample, for its initial latent; samples with equal seeds share the latent. By
            default `seeds`; the noise of the steps then comes from seeds derived from these, to be independent.
        steps: trained steps, one row of ascending indices per sample; by default all but the last. Rows may be empty.
        noise_steps: steps that draw noise, including all trained ones; by default all but the last. One sequence for
            all samples, or one per sample. The noise of other samples does not affect a sample without noise.
        noise_in_last_step: whether the loop's last step draws noise too, if it is among `noise_steps` or these are
            not given. It is never trained.
        noise_level: noise level of the SDE; by default its usual one. With 0, sampling is deterministic and
            nothing is recorded; tokens are still drawn.
        device: where the trajectory is kept.
        is_complete: False ends the call once the last trained step is recorded; there are no samples then.
        latents: a list to which each sample's denoised latent is added, as a call with `output_type="latent"`
            returns it.
        is_decoded: False decodes nothing; there are only latents then.
        step_weight: factor of the policy term of each denoising step, a key of
            [`~diffusion_grpo.policy.trajectory.STEP_WEIGHTS`].
        weighted_steps: the steps that may be trained, over which weights are normalised; by default all but the last.
        keeps_means: whether the means of the trained steps are recorded too.
        keeps_finished: whether the output of the last step is recorded too.
        keeps_clean: whether to sample without noise in the steps and keep the finished latents for [`denoise`]. The
            pipeline's own solver is used, or a deterministic one if that draws noise. `steps` are the steps at which
            the samples will be trained, 1 or later; by default all from 1. `noise_steps` and `noise_level` have no
            effect.
        prefix: result of [`run_prefix`], with one row per sample (rows may repeat, `prefix[[0, 0, 1]]`). The samples
            branch there, and the network runs neither for the steps before nor for the first step of their own.

    Returns:
        the samples, or None if nothing was decoded; and the trajectory, or None if nothing was recorded, or with
        `keeps_clean` the [`~diffusion_grpo.policy.trajectory.CleanSamples`]. Samples are what the pipeline returns
        first (PIL images, lists of frames, ...); each is a [`~diffusion_grpo.media.samples.VideoWithSound`] if it
        returns sound too.

    Raises:
        UnsupportedPipeline: the pipeline does not return latents when asked, or cannot branch.
        ValueError: `noise_steps` or `prefix` does not fit the samples or the trained steps.

    Examples:
        >>> images, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> images[0].size
        (96, 32)
        >>> trajectory.latents.shape  # samples, trained steps, channels, height, width
        torch.Size([2, 3, 6, 8, 24])
    """
    policy = _as_policy(policy)
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    if initial_seeds is None:  # two streams; with one, the first noise would equal the initial latent
        initial_seeds, seeds = seeds, torch.tensor([sample_seed(seed, "noise") for seed in seeds.tolist()])
    if latents is not None:
        policy.check_latents()
    if keeps_clean and steps is None:
        steps = [range(1, num_inference_steps)] * len(seeds)
    if not keeps_clean:
        policy.check_noise_level(noise_level)
    if noise_steps is not None and not any(isinstance(each, Collection) for each in noise_steps):
        noise_steps = [noise_steps] * len(seeds)
    if noise_steps is not None and len(noise_steps) != len(seeds):
        raise ValueError(
            f"noise_steps has {len(noise_steps)} sequences of steps for {len(seeds)} samples; give one per sample, or "
            "the steps of all."
        )
    initial_seeds = torch.as_tensor(initial_seeds, dtype=torch.int64)
    if prefix is not None and not torch.equal(prefix.initial_seeds.cpu(), initial_seeds):
        raise ValueError(
            f"The prefix has the initial seeds {prefix.initial_seeds.tolist()}, the samples {initial_seeds.tolist()}; "
            "give one row per sample, prefix[rows], and its initial seeds."
        )
    request = RolloutRequest(
        seeds=seeds,
        initial_seeds=initial_seeds,
        num_inference_steps=num_inference_steps,
        steps=steps,
        noise_steps=noise_steps,
        noise_in_last_step=noise_in_last_step,
        noise_level=noise_level,
        device=device,
        is_complete=is_complete,
        latents=latents,
        is_decoded=is_decoded,
        step_weight=step_weight,
        weighted_steps=weighted_steps,
        keeps_means=keeps_means,
        keeps_finished=keeps_finished,
        keeps="clean" if keeps_clean else "steps",
        prefix=prefix,
    )
    return policy.rollout(inputs, request)


@torch.no_grad()
def run_prefix(
    policy: DenoisingPolicy | DiffusionPipeline,
    inputs: dict[str, Any],
    length: int,
    *,
    num_inference_steps: int,
    initial_seeds: Sequence[int],
    device: str | torch.device = "cpu",
) -> Prefix:
    """Take the first steps of the loop without noise, for samples to branch from (TempFlow-GRPO).

    If samples with the same initial latent draw no noise before step `length`, these steps need to be taken only once.
    The network's prediction in step `length` is also needed only once, since it is made before the noise in which the
    samples first differ. `rollout` continues from there with `prefix`, and `replay` makes that call only once too
    (https://huggingface.co/papers/2508.04324).

    Args:
        policy: as in [`rollout`].
        inputs: keyword arguments of the pipeline's `__call__`, with one entry per initial latent.
        length: number of steps; the loop must have two more. With 0, the samples share only their first prediction.
        num_inference_steps: length of the loop.
        initial_seeds: one seed per initial latent.
        device: where latents and prediction are kept.

    Returns:
        The latents after these steps and the next prediction, for the argument `prefix` of [`rollout`].

    Raises:
        UnsupportedPipeline: the policy draws tokens, or the loop is too short.
        ValueError: `length` is negative.

    Examples:
        >>> one = inputs | {"prompt": inputs["prompt"][:1]}
        >>> prefix = run_prefix(pipe, one, 1, num_inference_steps=4, initial_seeds=[0])
        >>> two = inputs | {"prompt": one["prompt"] * 2}
        >>> _, trajectory = rollout(
        ...     pipe, two, seeds=[1, 2], initial_seeds=[0, 0], num_inference_steps=4,
        ...     steps=[[1], [1]], noise_steps=[1], prefix=prefix[[0, 0]],
        ... )
        >>> bool((trajectory.latents[0] == trajectory.latents[1]).all())  # both leave the same latent
        True
    """
    if length < 0:
        raise ValueError(f"length must be at least 0 steps, got {length}.")
    settings = {"num_inference_steps": num_inference_steps, "initial_seeds": initial_seeds, "device": device}
    return _as_policy(policy).run_prefix(inputs, length, **settings)


def replay(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    trajectory: Trajectory | TokenTrajectory,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
    sources: Sequence[int] | None = None,
) -> StepDistribution | TokenDistribution:
    """Score one recorded step under the current network. Gradients flow if torch's grad mode is on.

    Args:
        policy: as in [`rollout`].
        inputs: the keyword arguments of the rollout for the same samples; with `sources`, one entry per shared call.
        trajectory: trajectory of these samples, each with `step` among its trained steps.
        step: index of the step in the loop; always 0 for tokens.
        forward: function to use in place of the network's own forward, for example a reference model's; one per
            network.
        sources: for samples that branch at this step, the index in `inputs` that each one uses. The network runs once,
            forward and backward, for all samples of an initial latent. By default, each sample has its own entry.

    Returns:
        Mean, standard deviation and (batch,) log-probability of the step, float32.

    Raises:
        ValueError: the step was not recorded for all samples.

    Examples:
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> step = replay(pipe, inputs, trajectory, 2)
        >>> bool((step.log_prob == trajectory.log_probs[:, 2]).all())  # the ratio is exactly 1
        True
        >>> (-step.log_prob).sum().backward()  # with gradient
        >>> pipe.transformer.zero_grad()
    """
    policy, rows = _as_policy(policy), None if sources is None else torch.as_tensor(sources, dtype=torch.int64)
    return policy.replay(inputs, trajectory, step, [forward] if callable(forward) else forward, rows)


def denoise(
    policy: DenoisingPolicy | DiffusionPipeline,
    inputs: dict[str, Any],
    samples: CleanSamples,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
) -> Denoised:
    """Noise finished samples again, to the level of one step, and return the predicted clean samples.

    DiffusionNFT (https://huggingface.co/papers/2509.16117) and its relatives train on this.

    Classifier-free guidance is off, because the conditional prediction is trained. Guidance that the network takes as
    an input is left as it is. Gradients flow if torch's grad mode is on.

    Args:
        policy: as in [`rollout`].
        inputs: keyword arguments of the pipeline's `__call__` for these samples.
        samples: samples of a [`rollout`] with `keeps_clean`.
        step: index of the step in the loop, 1 or later.
        forward: function to use in place of the network's own forward; one per network.

    Raises:
        ValueError: `step` is 0.
        UnsupportedPipeline: no step of the pipeline can be handed a noised sample.

    Examples:
        >>> _, samples = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4, keeps_clean=True)
        >>> denoised = denoise(pipe, inputs, samples, step=2)
        >>> denoised.error().shape  # of each sample, with gradient
        torch.Size([2])
    """
    return _as_policy(policy).denoise(inputs, samples, step, [forward] if callable(forward) else forward)
