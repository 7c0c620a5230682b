"""Networks: gates that keep processes with sharded weights in step, attention kernels, and quantised weights."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline
from tiny_runs import brightness, trainer_for
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainerCallback

from diffusion_grpo import check_pipeline, tiny
from diffusion_grpo.distributed.collectives import DONE, GRAPH, PLAIN, EqualCalls
from diffusion_grpo.policy.denoising import DenoisingPolicy
from diffusion_grpo.policy.drivers import Driver
from diffusion_grpo.policy.networks import NetworkAccess, avoid_cudnn_attention, find_quantization, is_quantized_weight
from diffusion_grpo.policy.rollout import replay, rollout, run_prefix


def in_step(ask_all):
    """A policy that asks others before each call of its network, and the grad modes of the calls."""
    pipe, inputs = tiny_pipelines.build("sd3")
    calls = []
    policy = DenoisingPolicy(pipe, access=NetworkAccess(hook=EqualCalls(ask_all), skips_hooks=True))
    pipe.transformer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return pipe, inputs, policy, calls


def test_networks_are_called_as_on_the_process_that_calls_them_most():
    """In the same order, and neither score nor gradient know of it."""

    def ask_all(own):
        other = others[0] if others else own
        if others and other == min(filter(None, (own, other)), default=DONE):  # it is the other one's turn too
            others.pop(0)
        return [own, other]

    pipe, inputs, policy, calls = in_step(ask_all)
    others = []
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
    others = []
    _, inputs, policy, calls = in_step(lambda own: [own, others.pop(0) if others else own])
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


# Attention kernels: training uses none of cuDNN unless the user chose them


is_enabled = torch.backends.cuda.cudnn_sdp_enabled
CHOICES = {  # how the user chose kernels, and whether cuDNN's are used then
    "nothing": (contextlib.nullcontext, False),
    "cuDNN": (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION), True),
    "cuDNN or math": (lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]), True),
    "flash": (lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), False),
}


def read_choice():
    """Return what torch may use."""
    cuda = torch.backends.cuda
    return is_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


@pytest.mark.parametrize("choice", CHOICES)
def test_only_the_default_is_changed_and_it_comes_back_after_an_error_too(choice):
    choose, expected = CHOICES[choice]
    with choose():
        before = read_choice()
        with avoid_cudnn_attention():
            assert is_enabled() == expected
            assert read_choice()[1:] == before[1:]
        assert read_choice() == before
        with pytest.raises(ValueError), avoid_cudnn_attention():
            raise ValueError
        assert read_choice() == before


def test_rollouts_updates_and_evaluations(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(is_enabled())

    def watched_brightness(images, **columns):
        seen.append(is_enabled())
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=watched_brightness, callbacks=[Watch()], max_steps=1)
    trainer.policy.network.register_forward_pre_hook(lambda *args: seen.append(is_enabled()))
    trainer.train()
    assert len(seen) > 4 and not any(seen)
    seen.clear()
    trainer.evaluate(trainer.train_dataset)
    assert len(seen) > 1 and not any(seen) and is_enabled()


def test_the_check_of_a_pipeline_uses_what_training_uses():
    pipe = DiffusionPipeline.from_pretrained(tiny.PATH)
    seen = []
    pipe.transformer.register_forward_pre_hook(lambda *args: seen.append(is_enabled()))
    report = check_pipeline(pipe, {"prompt": ["a red circle"], "height": 32, "width": 32}, num_inference_steps=2)
    assert report.trains, report.reason
    assert len(seen) > 1 and not any(seen)
    assert is_enabled()


# Quantised weights


def quantizer(**config):
    return SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=SimpleNamespace(**config)))


def test_methods_have_the_names_of_backends():
    assert find_quantization(nn.Linear(2, 2)) is None
    assert find_quantization(quantizer(quant_method="torchao")) == "torchao"
    assert find_quantization(quantizer(quant_method="bitsandbytes", load_in_4bit=True)) == "bitsandbytes_4bit"
    assert find_quantization(quantizer(quant_method="bitsandbytes", load_in_4bit=False)) == "bitsandbytes_8bit"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_bytes_are_no_plain_numbers(dtype):
    weight = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    assert is_quantized_weight(weight) == (dtype == torch.uint8)
