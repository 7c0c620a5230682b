"""`predict` gives what a rollout's scheduler was handed, bit for bit, whatever kind of scheduler there is."""

import pytest
import tiny_pipelines
import torch
from torch import nn

from diffusion_grpo.policy.rollout import DenoisingPolicy, predict, rollout

# flow matching, several networks and latents among it; DDIM for epsilon- and v-prediction; Heun; cosine; EDM
KINDS = ["sd3", "flux", "wan", "wan_experts", "ltx2", "sdxl", "sd15", "sd2", "sd3_heun", "cascade_prior"]
KINDS += ["cosmos", "cosmos2", "stable_audio", "pixart", "cogvideox"]
STEPS = 4


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
