"""The pipeline is the policy: rollouts that record, replays that score.

In: a diffusers pipeline and the keyword arguments of its `__call__`. Out of `rollout`: its samples and a `Trajectory`.
Out of `replay`: the `StepDistribution` of one recorded step under the network as it is now, with gradient. No model
family has code here: guidance, packing and conditions are the pipeline's own in both, so that they cannot drift apart.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from ..media.files import samples_of
from ..pipelines import family_of
from .denoising import POLICY_COMPONENTS, Policy, policy_component
from .drivers import Finisher, Recorder, StepScored, Teacher, UnsupportedPipeline
from .token import TokenPolicy
from .token_process import TokenDistribution, TokenTrajectory
from .trajectory import StepDistribution, Trajectory, generators, sample_seed, trained_steps

__all__ = [
    "POLICY_COMPONENTS",
    "Policy",
    "StepDistribution",
    "TokenPolicy",
    "Trajectory",
    "UnsupportedPipeline",
    "policy_component",
    "replay",
    "rollout",
    "sample_seed",
    "trained_steps",
]


def call_arguments(
    pipe: DiffusionPipeline, inputs: dict[str, Any], num_inference_steps: int | None, initial_seeds: Tensor
) -> dict[str, Any]:
    """Keyword arguments of a pipeline's call; the same in rollout and replay.

    Args:
        pipe: the pipeline.
        inputs: those for one batch.
        num_inference_steps: length of the loop; None leaves it to the pipeline.
        initial_seeds: (batch,) one a sample.
    """
    drawn = generators(initial_seeds)
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    arguments = dict(family_of(pipe).arguments(pipe, inputs))
    if num_inference_steps is not None and "num_inference_steps" in parameters:  # who only writes tokens has no loop
        arguments["num_inference_steps"] = num_inference_steps
    if "generator" in parameters:  # not every pipeline takes a list
        arguments["generator"] = drawn if len(drawn) > 1 else drawn[0]
    is_picture = {"height", "num_frames"} & set(parameters)  # sound and depth maps are left in their own form
    if "output_type" in parameters and (is_picture or parameters["output_type"].default == "pil"):
        arguments.setdefault("output_type", "pil")
    return arguments


@torch.no_grad()
def rollout(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    *,
    seeds: Sequence[int],
    num_inference_steps: int,
    initial_seeds: Sequence[int] | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    noise_steps: Sequence[int] | None = None,
    noise_in_last_step: bool = False,
    noise_level: float | None = None,
    device: str | torch.device = "cpu",
    is_complete: bool = True,
    latents: list[Tensor] | None = None,
    is_decoded: bool = True,
) -> tuple[Any, Trajectory | TokenTrajectory | None]:
    """Calls the pipeline as a user would, with noise in its steps, and records the trained ones.

    Args:
        policy: a [`Policy`], or a pipeline to make one of. Of a [`TokenPolicy`] the tokens are the actions: `seeds`
            fix those, `initial_seeds` what decodes them, and `steps` and `noise_steps` mean nothing.
        inputs: keyword arguments of the pipeline's `__call__` for one batch.
        seeds: one a sample. They fix the noise of its steps whatever else is in the batch.
        num_inference_steps: length of the loop.
        initial_seeds: one a sample, for its initial latent. Equal ones share the initial latent. By default `seeds`,
            and the noise of the steps comes from seeds derived from them, so that the two are independent.
        steps: trained steps, one row of ascending indices a sample; all but the last by default. Empty: none.
        noise_steps: steps that draw noise, at least the trained ones; all but the last by default.
        noise_in_last_step: the loop's last step draws noise too, if it is among `noise_steps` or these are not given.
            It is never trained.
        noise_level: of the process; its usual one by default. 0 samples deterministically and records nothing; tokens
            are drawn at 0 as at any other.
        device: where the trajectory is kept.
        is_complete: False ends the call when the last trained step is recorded; there are no samples then.
        latents: a list to which the samples' denoised latents are added, one each: those that a call with
            `output_type="latent"` returns.
        is_decoded: False decodes nothing; latents are all there is then.

    Returns:
        the samples (what the pipeline returns first: PIL images, lists of frames, ..., or each a
        [`~media.VideoWithSound`] where it returns sound too), or None where nothing was decoded; and the trajectory,
        or None where nothing is recorded.

    Raises:
        UnsupportedPipeline: the pipeline does not return latents when asked.
    """
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    if initial_seeds is None:  # two streams: the same one twice would make the first noise the initial latent
        initial_seeds, seeds = seeds, torch.tensor([sample_seed(seed, "noise") for seed in seeds.tolist()])
    initial_seeds = torch.as_tensor(initial_seeds, dtype=torch.int64)
    if latents is not None:
        check_latents(policy)
    if isinstance(policy, TokenPolicy):
        arguments = call_arguments(policy.pipe, inputs, num_inference_steps, initial_seeds)
        made = policy.rollout(arguments, seeds, initial_seeds, num_inference_steps, is_recorded=noise_level is None)
        return made[0], made[1] and made[1].to(device)
    noise_level = policy.default_noise_level if noise_level is None else noise_level
    rows = None
    if steps is not None:
        rows = torch.tensor([list(row) for row in steps], dtype=torch.int64).reshape(len(steps), -1)
    if noise_level <= 0 or (rows is not None and not rows.numel()):
        noise_steps, rows = noise_steps if noise_level > 0 else (), torch.empty(len(seeds), 0, dtype=torch.int64)
    noises = None if noise_steps is None else set(noise_steps)
    recorder = Recorder(seeds, initial_seeds, noises, rows, noise_level, device, is_complete, noise_in_last_step)
    shown = inputs if is_decoded else inputs | {"output_type": "latent"}
    arguments = call_arguments(policy.pipe, shown, num_inference_steps, initial_seeds)
    samples = None
    with policy.acting(recorder), contextlib.suppress(StepScored):
        samples = samples_of(policy.pipe, policy.pipe(**arguments))
    if latents is not None:
        found = samples if not is_decoded else _latents_again(policy, inputs, num_inference_steps, recorder)
        latents += _checked_latents(policy, found, recorder)
        samples = samples if is_decoded else None
    settings = dict(num_inference_steps=num_inference_steps, noise_level=noise_level)
    record = noise_level > 0 and (rows is None or rows.numel() > 0)
    return samples, recorder.trajectory(seeds=seeds, initial_seeds=initial_seeds, **settings) if record else None


def _latents_again(policy: Policy, inputs: dict[str, Any], num_inference_steps: int, recorder: Recorder) -> Any:
    """What the same call returns when asked for latents; neither the network nor the decoder runs for it."""
    inputs = inputs | {"output_type": "latent"}
    arguments = call_arguments(policy.pipe, inputs, num_inference_steps, recorder.initial_seeds)
    with policy.acting(Finisher(recorder)):
        return policy.pipe(**arguments)[0]


def check_latents(policy: Policy) -> None:
    """Refuses a pipeline that has no denoised latents to give.

    Raises:
        UnsupportedPipeline: its call has no `output_type`, or its tokens are what is trained.
    """
    has_type = "output_type" in inspect.signature(policy.undecorated).parameters
    if isinstance(policy, TokenPolicy) or not has_type:
        why = "its policy writes tokens" if has_type else "its call has no output_type"
        raise UnsupportedPipeline(
            f"A reward takes latents, but {type(policy.pipe).__name__} gives none: {why}; use rewards that take what "
            "it makes."
        )


def _checked_latents(policy: Policy, found: Any, recorder: Recorder) -> list[Tensor]:
    """One float32 tensor a sample; refuses what is no latents, or more of them than the steps moved."""
    left = Finisher(recorder).left
    is_tensor = torch.is_tensor(found) and found.ndim > 1 and len(found) == recorder.count
    if not is_tensor or found[0].numel() > left[0].numel():
        shape = tuple(found.shape) if torch.is_tensor(found) else type(found).__name__
        raise UnsupportedPipeline(
            f'{type(policy.pipe).__name__} returned {shape} for output_type="latent" where its last step left '
            f"{tuple(left.shape)}; use rewards that take what it makes."
        )
    return list(found.float().unbind())


def replay(
    policy: Policy | DiffusionPipeline,
    inputs: dict[str, Any],
    trajectory: Trajectory | TokenTrajectory,
    step: int,
    forward: Callable | Sequence[Callable] | None = None,
) -> StepDistribution | TokenDistribution:
    """Scores one recorded step under the network as it is now. Gradients flow where torch's grad mode lets them.

    Args:
        policy: as in [`rollout`].
        inputs: the same keyword arguments for the same samples.
        trajectory: of these samples, each with `step` among its trained steps.
        step: index of the step in the loop; of tokens the only one, 0.
        forward: in place of the network's own forward, e.g. a reference model's; one a network.
    """
    forwards = [forward] if callable(forward) else forward
    policy = policy if isinstance(policy, Policy) else Policy(policy)
    arguments = call_arguments(policy.pipe, inputs, trajectory.num_inference_steps, trajectory.initial_seeds)
    if isinstance(policy, TokenPolicy):
        return policy.replay(arguments, trajectory, forwards)
    rows, columns = (trajectory.steps == step).nonzero(as_tuple=True)
    if len(rows) != len(trajectory):
        raise ValueError(f"step {step} was recorded for {len(rows)} of {len(trajectory)} samples; select those first.")
    teacher = Teacher(
        step,
        trajectory.latents[rows, columns],
        trajectory.next_latents[rows, columns],
        trajectory.noise_level,
        trajectory.initial_seeds,
        trajectory.tokens,
    )
    with policy.acting(teacher, forwards), contextlib.suppress(StepScored):
        policy.undecorated(policy.pipe, **arguments)
    if teacher.scored is None:
        raise RuntimeError(f"{type(policy.pipe).__name__} ended before step {step}; it was not replayed.")
    return teacher.scored
