"""`check_pipeline` tells the truth, and leaves no trace."""

import pytest
import tiny_pipelines
import torch
from diffusers import LCMScheduler

from diffusion_grpo import check_pipeline


@pytest.mark.parametrize("name", list(tiny_pipelines.PIPELINES))
def test_every_tiny_pipeline_trains(name):
    pipe, inputs = tiny_pipelines.build(name)
    report = check_pipeline(pipe, inputs, num_inference_steps=3)
    assert report.trains and report.reason is None, report
    assert report.max_ratio_error == report.max_log_prob_error == 0.0 and report.grad_norm > 1e-3
    assert report.steps == 2 and report.pipeline == type(pipe).__name__


def test_it_leaves_the_pipeline_as_it_was():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.transformer.train().requires_grad_(False)
    attributes = dict(pipe.__dict__)
    before = {id(module): dict(module.__dict__) for module in pipe.transformer.modules()}
    check_pipeline(pipe, inputs, num_inference_steps=2)
    assert pipe.__dict__ == attributes
    assert {id(module): dict(module.__dict__) for module in pipe.transformer.modules()} == before
    assert not any(p.requires_grad or p.grad is not None for p in pipe.transformer.parameters())


def test_it_leaves_no_trace_after_an_error_either():
    pipe, inputs = tiny_pipelines.build("sd3")
    scheduler = pipe.scheduler
    report = check_pipeline(pipe, {**inputs, "height": 13})
    assert not report.trains and "ValueError" in report.reason and "divisible" in report.reason
    assert pipe.scheduler is scheduler and "forward" not in pipe.transformer.__dict__


@pytest.mark.parametrize(("setting", "value"), [("num_inference_steps", 1), ("noise_level", 0.0)])
def test_what_leaves_no_step_to_replay_is_refused(setting, value):
    pipe, inputs = tiny_pipelines.build("sd3")
    with pytest.raises(ValueError, match=f"{setting} must be"):
        check_pipeline(pipe, inputs, **{setting: value})


def test_a_network_that_is_random_does_not_train():
    pipe, inputs = tiny_pipelines.build("sd3")
    pipe.transformer.register_forward_hook(
        lambda module, args, output: (output[0] + 0.1 * torch.randn_like(output[0]),)
    )
    block = pipe.transformer.transformer_blocks[0].ff
    block.register_forward_hook(lambda module, args, output: output + 0.1 * torch.randn_like(output))
    report = check_pipeline(pipe, inputs)
    assert not report.trains and "ratio is off" in report.reason


def test_a_scheduler_without_gaussian_steps_is_named():
    pipe, inputs = tiny_pipelines.build("sd15")
    pipe.scheduler = LCMScheduler()
    report = check_pipeline(pipe, inputs)
    assert not report.trains and "LCMScheduler" in report.reason and report.policy is None
