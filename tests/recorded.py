"""Policies of tiny pipelines, and short rollouts of them."""

import tiny_pipelines

from diffusion_grpo.policy.rollout import DenoisingPolicy, rollout

SEEDS = [1, 2]


def make_policy(name="sd3", **settings):
    """A policy of a tiny pipeline, and the inputs of two samples."""
    pipe, inputs = tiny_pipelines.build(name)
    return DenoisingPolicy(pipe, **settings), inputs


def record(policy, inputs, **settings):
    """The trajectory of two samples, of four steps by default."""
    return rollout(policy, inputs, **{"seeds": SEEDS, "num_inference_steps": 4, **settings})[1]
