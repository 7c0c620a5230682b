"""The gates in front of a policy's networks: processes that share sharded weights make the same calls."""

import threading

import tiny_pipelines
import torch

from diffusion_grpo.distributed.collectives import DONE, GRAPH, PLAIN, EqualCalls
from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.drivers import Driver
from diffusion_grpo.policy.networks import NetworkAccess
from diffusion_grpo.policy.rollout import replay, rollout, run_prefix


def test_networks_are_called_as_on_the_process_that_calls_them_most():
    """In the same order, and neither score nor gradient know of it."""
    pipe, inputs = tiny_pipelines.build("sd3")
    calls, others = [], []

    def ask_all(own):
        other = others[0] if others else own
        if others and other == min(filter(None, (own, other)), default=DONE):  # it is the other one's turn too
            others.pop(0)
        return [own, other]

    policy = DenoisingPolicy(pipe, access=NetworkAccess(hook=EqualCalls(ask_all), skips_hooks=True))
    pipe.transformer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    _, trajectory = rollout(policy, inputs, seeds=[1, 2], num_inference_steps=3)

    def gradient():
        calls.clear()
        pipe.transformer.zero_grad()
        scored = replay(policy, inputs, trajectory, 1)
        (scored.log_prob.sum() + policy.access.hook.take_spare()).backward()
        return scored.log_prob.detach(), pipe.transformer.proj_out.weight.grad.clone()

    expected = gradient()
    assert calls == [True]
    others += [PLAIN, GRAPH, GRAPH, PLAIN, DONE]
    found = gradient()
    assert calls == [False, True, True, False] and not others
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_a_process_without_a_call_of_its_own_repeats_one_from_before():
    """As where a prefix has made an expert's only call, and another process still has one to make."""
    pipe, inputs = tiny_pipelines.build("sd3")
    calls, others = [], []

    def ask_all(own):
        return [own, others.pop(0) if others else own]

    policy = DenoisingPolicy(pipe, access=NetworkAccess(hook=EqualCalls(ask_all), skips_hooks=True))
    pipe.transformer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    run_prefix(policy, inputs, 0, num_inference_steps=3, initial_seeds=[1, 2])
    calls.clear()
    others += [PLAIN, DONE]
    with policy.gates.put_up(Driver(torch.tensor([1, 2]))):
        policy.access.hook.finish()
    assert calls == [False] and not others


def test_of_two_experts_each_keeps_in_step():
    """One process calls them twice a step, for guidance, and the other once: never one expert here and one there."""
    barrier, slots, called = threading.Barrier(2, timeout=60), [0, 0], ([], [])

    def run(own, guidance):
        torch.set_num_threads(1)
        pipe, inputs = tiny_pipelines.build("wan_experts", 0)
        for name in ("transformer", "transformer_2"):
            getattr(pipe, name).register_forward_hook(lambda *_, name=name: called[own].append(name))

        def ask_all(number):
            slots[own] = number
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

        policy = DenoisingPolicy(pipe, access=NetworkAccess(hook=EqualCalls(ask_all), skips_hooks=True))
        inputs = {**inputs, "prompt": ["a"], "guidance_scale": guidance, "guidance_scale_2": guidance}
        rollout(policy, inputs, seeds=[1], num_inference_steps=6)

    threads = [threading.Thread(target=run, args=(own, scale)) for own, scale in enumerate((5.0, 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert called[0] == called[1] and len(called[0]) >= 12 and set(called[0]) == {"transformer", "transformer_2"}
