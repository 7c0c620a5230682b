"""The pipeline is the policy: rollouts that record, replays that score, predictions at any latent.

All three take a diffusers pipeline and the keyword arguments of its `__call__`. `rollout` returns samples and a
`Trajectory`; `replay` the `StepDistribution` of one recorded step under the network as it is now, with gradient;
`predict` what the pipeline hands to its scheduler at a given latent. No model family has code here: guidance, packing
and conditions are the pipeline's own in all three, so they cannot drift apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from .base import POLICY_COMPONENTS, Policy, policy_component
from .denoising import DenoisingPolicy
from .drivers import UnsupportedPipeline
from .token import TokenPolicy
from .token_process import TokenDistribution, TokenTrajectory
from .trajectory import (
    CleanSamples,
    Denoised,
    Prediction,
    Prefix,
    RolloutRequest,
    StepDistribution,
    Trajectory,
    choose_trained_steps,
    sample_seed,
)

BRANCHING_TOKENS = "{}'s policy draws tokens, which have no steps without noise to share; leave out branches."

__all__ = [
    "POLICY_COMPONENTS",
    "CleanSamples",
    "DenoisingPolicy",
    "Policy",
    "Prefix",
    "StepDistribution",
    "TokenPolicy",
    "Trajectory",
    "UnsupportedPipeline",
    "denoise",
    "policy_component",
    "predict",
    "replay",
    "rollout",
    "run_prefix",
    "sample_seed",
    "choose_trained_steps",
]


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
    keeps_clean: bool = False,
    prefix: Prefix | None = None,
) -> tuple[Any, Trajectory | TokenTrajectory | CleanSamples | None]:
    """Call the pipeline as a user would, with noise in its steps, and record the trained ones.

    Args:
        policy: a [`Policy`], or a pipeline to make one of. The actions of a [`TokenPolicy`] are tokens: `seeds` fix
            the tokens, `initial_seeds` what decodes them, and `steps` and `noise_steps` mean nothing.
        inputs: keyword arguments of the pipeline's `__call__` for one batch.
        seeds: one per sample. Each fixes the noise of its sample's steps, whatever else is in the batch.
        num_inference_steps: length of the loop.
        initial_seeds: one per sample, for its initial latent. Samples with equal ones share it. By default `seeds`;
            the noise of the steps then comes from seeds derived from them, so that the two are independent.
        steps: trained steps, one row of ascending indices per sample; all but the last by default. Empty: none.
        noise_steps: steps that draw noise, at least the trained ones; all but the last by default. One sequence for
            all samples, or one per sample: in a step without noise a sample is what it would be if none drew any.
        noise_in_last_step: whether the loop's last step draws noise too, if it is among `noise_steps` or these are
            not given. It is never trained.
        noise_level: of the process; its usual one by default. 0 samples deterministically and records nothing; tokens
            are still drawn.
        device: where the trajectory is kept.
        is_complete: False ends the call once the last trained step is recorded; there are no samples then.
        latents: a list to which each sample's denoised latent is added, as a call with `output_type="latent"`
            returns it.
        is_decoded: False decodes nothing; there are only latents then.
        step_weight: what the policy term of each step is multiplied by, a key of
            [`~diffusion_grpo.policy.step_weights.STEP_WEIGHTS`]; of denoising steps.
        weighted_steps: the steps that may be trained, over which weights are normalised; all but the last by default.
        keeps_means: whether the means of the trained steps are recorded too.
        keeps_clean: True samples without noise in the steps, by the pipeline's own solver (by a deterministic one in
            place of one that draws noise), and keeps the finished latents for [`denoise`]. `steps` are those at which
            the samples will be trained, 1 or later; by default all from 1. `noise_steps` and `noise_level` mean
            nothing then.
        prefix: from [`run_prefix`], one row per sample (rows may repeat, `prefix[[0, 0, 1]]`): the samples branch
            there, and the network runs neither for the steps before nor for the first step of the samples' own.

    Returns:
        the samples (what the pipeline returns first: PIL images, lists of frames, ..., or each a
        [`~media.VideoWithSound`] where it returns sound too), or None where nothing was decoded; and the trajectory,
        or None where nothing is recorded; with `keeps_clean` the
        [`~diffusion_grpo.policy.trajectory.CleanSamples`].

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
    if initial_seeds is None:  # two streams: with a single one the first noise would equal the initial latent
        initial_seeds, seeds = seeds, torch.tensor([sample_seed(seed, "noise") for seed in seeds.tolist()])
    if latents is not None:
        policy.check_latents()
    if keeps_clean and steps is None:
        steps = [range(1, num_inference_steps)] * len(seeds)
    if prefix is not None:
        _check_prefix(policy, prefix, torch.as_tensor(initial_seeds, dtype=torch.int64))
    request = RolloutRequest(
        seeds=seeds,
        initial_seeds=torch.as_tensor(initial_seeds, dtype=torch.int64),
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
        keeps_clean=keeps_clean,
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

    Samples with one initial latent that draw no noise before step `length` need these steps once. They also need the
    network's prediction in step `length` once: it is made before the noise in which they first differ. `rollout` goes
    on from there with `prefix`, and `replay` makes that call once too (https://huggingface.co/papers/2508.04324).

    Args:
        policy: as in [`rollout`].
        inputs: keyword arguments of the pipeline's `__call__`, with one entry per initial latent.
        length: number of steps; the loop must have two more. With 0 the samples share their first prediction alone.
        num_inference_steps: length of the loop.
        initial_seeds: one per initial latent.
        device: where latents and prediction are kept.

    Returns:
        The latents after these steps and the next prediction, for the argument `prefix` of [`rollout`].

    Raises:
        UnsupportedPipeline: the policy draws tokens, or the loop is shorter.
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
    policy = _as_policy(policy)
    if policy.draws_tokens:
        raise UnsupportedPipeline(BRANCHING_TOKENS.format(type(policy.pipe).__name__))
    if length < 0:
        raise ValueError(f"length must be at least 0 steps, got {length}.")
    settings = {"num_inference_steps": num_inference_steps, "initial_seeds": initial_seeds, "device": device}
    return policy.run_prefix(inputs, length, **settings)


def _check_prefix(policy: Policy, prefix: Prefix, initial_seeds: Tensor) -> None:
    """Refuse a prefix of other samples, and a policy that cannot begin in the middle."""
    if policy.draws_tokens:
        raise UnsupportedPipeline(BRANCHING_TOKENS.format(type(policy.pipe).__name__))
    if not torch.equal(prefix.initial_seeds.cpu(), initial_seeds):
        raise ValueError(
            f"The prefix has the initial seeds {prefix.initial_seeds.tolist()}, the samples {initial_seeds.tolist()}; "
            "give one row per sample, prefix[rows], and its initial seeds."
        )


def replay(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    trajectory: Trajectory | TokenTrajectory,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
    sources: Sequence[int] | None = None,
) -> StepDistribution | TokenDistribution:
    """Score one recorded step under the network as it is now. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: the same keyword arguments for the same samples; with `sources` one entry per call that they share.
        trajectory: of these samples, each with `step` among its trained steps.
        step: index of the step in the loop; of tokens the only one, 0.
        forward: used in place of the network's own forward, for example a reference model's; one per network.
        sources: for samples that branch at this step, which of `inputs` each takes, one per sample: the network runs
            once for all samples of an initial latent, forward and backward. By default each sample has its own.

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


def predict(
    policy: DenoisingPolicy | DiffusionPipeline,
    inputs: dict[str, Any],
    latents: Tensor,
    step: int,
    *,
    num_inference_steps: int,
    initial_seeds: Tensor | Sequence[int],
    tokens: Tensor | None = None,
    forward: Callable | Sequence[Callable] | None = None,
) -> Prediction:
    """Return what the pipeline hands to `scheduler.step` for a given latent at a given step.

    Losses on re-noised samples (DiffusionNFT, https://huggingface.co/papers/2509.16117) are built on it.

    The pipeline runs its whole loop up to `step`, so that everything that depends on the index of a step is as in a
    rollout; the network runs for this step alone. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: keyword arguments of the pipeline's `__call__` for one batch.
        latents: (batch, ...) float32, what step `step` is handed, in the scheduler's own coordinates. Where a step
            moves several latents, all of them, flattened one after the other. At step 0, which has no step before it,
            they must equal the initial latents of `initial_seeds`.
        step: index of the step in the loop.
        num_inference_steps: length of the loop.
        initial_seeds: (batch,) seeds of the initial latents.
        tokens: (batch, tokens) int64, what a language model in the pipeline's call wrote, if there is one.
        forward: used in place of the network's own forward; one per network.

    Raises:
        ValueError: the step lies outside the loop, or is 0 and the latents are not the initial ones.

    Examples:
        >>> _, trajectory = rollout(pipe, inputs, seeds=[0, 1], num_inference_steps=4)
        >>> found = predict(pipe, inputs, trajectory.latents[:, 1], 1, num_inference_steps=4, initial_seeds=[0, 1])
        >>> found.prediction.shape
        torch.Size([2, 6, 8, 24])
    """
    return _as_policy(policy).predict(
        inputs,
        latents,
        step,
        num_inference_steps=num_inference_steps,
        initial_seeds=initial_seeds,
        tokens=tokens,
        forwards=[forward] if callable(forward) else forward,
    )


def denoise(
    policy: DenoisingPolicy | DiffusionPipeline,
    inputs: dict[str, Any],
    samples: CleanSamples,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
) -> Denoised:
    """Noise finished samples again, to the level of one step, and return the clean samples that are predicted.

    DiffusionNFT (https://huggingface.co/papers/2509.16117) and its relatives train on this.

    Classifier-free guidance is off: the conditional prediction is what is trained. Guidance that the network takes as
    an input stays as it is. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: keyword arguments of the pipeline's `__call__` for these samples.
        samples: from [`rollout`] with `keeps_clean`.
        step: index of the step in the loop, 1 or later.
        forward: used in place of the network's own forward; one per network.

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
