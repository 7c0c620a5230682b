"""What the denoising policy records and replays."""

import tiny_pipelines
import torch

from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.sde import log_density

SEEDS = [1, 2]


def test_what_is_scored_is_the_latent_as_it_was_rounded():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.to(dtype=torch.bfloat16)
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    assert torch.equal(trajectory.next_latents, trajectory.next_latents.bfloat16().float())
    for column, step in enumerate((0, 1, 2)):
        with torch.no_grad():
            now = replay(policy, inputs, trajectory, step)
        scored = log_density(trajectory.next_latents[:, column], now.mean, now.std)
        torch.testing.assert_close(trajectory.log_probs[:, column], scored, rtol=0, atol=1e-6)


def test_a_negative_prompt_counts_in_the_replay():
    pipe, inputs = tiny_pipelines.build("sd3")
    inputs |= {"guidance_scale": 4.0, "negative_prompt": ["a grey blur", "text"]}
    policy = DenoisingPolicy(pipe)
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=4)
    for column, step in enumerate((0, 1, 2)):
        with torch.no_grad():
            now, without = (
                replay(policy, given, trajectory, step) for given in (inputs, {**inputs, "negative_prompt": None})
            )
        assert torch.equal(now.log_prob, trajectory.log_probs[:, column])
        assert not torch.equal(without.log_prob, now.log_prob)
