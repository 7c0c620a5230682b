"""`predict` gives what a rollout's scheduler was handed, bit for bit, whatever kind of scheduler there is."""

import pytest
import tiny_pipelines
import torch
from torch import nn

from diffusion_grpo.policy.rollout import DenoisingPolicy, predict, rollout
from diffusion_grpo.policy.schedulers import step_kind
from diffusion_grpo.policy.stochastic_steps import StochasticScheduler

# flow matching by Euler, Heun, UniPC and DPM-Solver, also with several networks or latents
KINDS = ["sd3", "flux", "sd3_heun", "wan", "wan_experts", "sana", "ltx2"]
# variance-preserving: epsilon-, v- and sample-prediction, a learned variance, cosine
KINDS += ["sd15", "sd15_heun", "sd2", "sdxl", "pixart", "cogvideox", "kandinsky_prior", "deepfloyd", "cascade_prior"]
# latents written as data + sigma * noise: EDM, flows with sigmas above 1, Euler with continuous timesteps
KINDS += ["cosmos", "cosmos2", "stable_audio", "svd"]
STEPS, MIXINS = 4, "diffusion_grpo.policy.stochastic_steps"


def test_there_is_a_pipeline_of_every_kind_of_scheduler():
    covered = {step_kind(tiny_pipelines.build(name)[0].scheduler) for name in ("sd3", "sd15", "cascade_prior", "svd")}
    assert covered == {kind for kind in StochasticScheduler.__subclasses__() if kind.__module__ == MIXINS}


def recorded_predictions(policy, inputs):
    """A rollout, and by step what each of its schedulers was handed: predictions, flattened side by side."""
    seen = {}

    def note(scheduler, prediction, *args):
        seen.setdefault(scheduler.index, []).append(prediction.detach().clone())
        return distribution(scheduler, prediction, *args)

    kind = type(policy.scheduler)
    distribution = kind.distribution
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "distribution", note)
        _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=STEPS)
    return trajectory, {step: torch.cat([part.flatten(1) for part in parts], 1) for step, parts in seen.items()}


@pytest.mark.parametrize("name", KINDS)
def test_at_a_recorded_latent_it_is_what_the_rollout_saw(name):
    pipe, inputs = tiny_pipelines.build(name)
    policy = DenoisingPolicy(pipe)
    trajectory, seen = recorded_predictions(policy, inputs)
    again = {"num_inference_steps": STEPS, "initial_seeds": trajectory.initial_seeds}
    for column, step in enumerate(trajectory.steps[0].tolist()):
        with torch.no_grad():
            found = predict(policy, inputs, trajectory.latents[:, column], step, **again)
        count = len(found.prediction)
        expected = seen[step] if len(seen[step]) == count else seen[step][:count]
        assert torch.equal(found.prediction.flatten(1), expected)


def test_it_takes_any_latent_and_has_a_gradient():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=STEPS)
    other = torch.randn_like(trajectory.latents[:, 1])
    found = policy.predict(inputs, other, 2, num_inference_steps=STEPS, initial_seeds=trajectory.initial_seeds)
    assert torch.equal(found.sample, other) and found.prediction.requires_grad
    gradients = torch.autograd.grad(found.prediction.sum(), [*policy.network.parameters()], allow_unused=True)
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_only_the_asked_step_runs_the_network():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=STEPS)
    again = {"num_inference_steps": STEPS, "initial_seeds": trajectory.initial_seeds}
    policy.predict(inputs, trajectory.latents[:, 2], 2, **again)  # shapes are known from here on
    calls, block = [], next(module for module in policy.network.modules() if isinstance(module, nn.Linear))
    block.register_forward_hook(lambda *_: calls.append(1))
    policy.predict(inputs, trajectory.latents[:, 2], 2, **again)
    once = len(calls)
    policy.predict(inputs, trajectory.latents[:, 1], 1, **again)
    assert once > 0 and len(calls) == 2 * once


def test_step_0_starts_from_the_initial_latent_and_from_no_other():
    pipe, inputs = tiny_pipelines.build("sd3")
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=STEPS)
    with pytest.raises(ValueError, match="step 0 are not the pipeline's initial latents.*predict at step 1 or later"):
        predict(policy, inputs, trajectory.latents[:, 1], 0, num_inference_steps=STEPS, initial_seeds=[1, 2])
    with pytest.raises(ValueError, match="takes 4 steps, so there is no step 7"):
        predict(policy, inputs, trajectory.latents[:, 1], 7, num_inference_steps=STEPS, initial_seeds=[1, 2])
