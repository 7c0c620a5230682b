"""`check_pipeline` tells the truth, and leaves no trace."""

import copy
import functools

import pytest
import tiny_pipelines
import torch
from datasets import Dataset
from tiny_runs import PROMPTS, SETTINGS, brightness

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, check_pipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout, sample_seed


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
    pipe, inputs = tiny_pipelines.build("sd15_controlnet")
    pipe.controlnet.requires_grad_(True)
    assert check_pipeline(pipe, inputs, num_inference_steps=2).trains
    assert all(weight.grad is None for weight in pipe.controlnet.parameters())


def test_it_measures_the_gradient_of_all_weights_and_keeps_those_that_are_there():
    pipe, inputs = tiny_pipelines.build("sd3")
    weights = list(pipe.transformer.parameters())
    kept = [torch.full_like(weight, 2.0) for weight in weights]
    for weight, gradient in zip(weights, kept, strict=True):
        weight.grad = gradient
    report = check_pipeline(pipe, inputs, num_inference_steps=3)
    assert all(weight.grad is gradient for weight, gradient in zip(weights, kept, strict=True))
    assert all((gradient == 2.0).all() for gradient in kept)

    policy = DenoisingPolicy(pipe)
    seeds = [sample_seed(0, row) for row in range(len(inputs["prompt"]))]
    _, trajectory = rollout(policy, inputs, seeds=seeds, num_inference_steps=3)
    squares = torch.zeros((), dtype=torch.float64)
    for step in (0, 1):
        value = replay(policy, inputs, trajectory, step).log_prob.sum()
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
        squares += sum(gradient.double().square().sum() for gradient in gradients if gradient is not None)
    assert report.grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-5)


def test_a_safety_checker_is_left_out_of_rollouts_and_stays_in_the_pipeline():
    pipe, inputs = tiny_pipelines.build("sd15")
    expected, _ = rollout(DenoisingPolicy(pipe), inputs, seeds=[1, 2], num_inference_steps=2)

    class Blackener(torch.nn.Module):
        def forward(self, **kwargs):
            raise AssertionError("the safety checker ran")

    pipe.safety_checker = pipe.watermark = checker = Blackener()
    samples, _ = rollout(DenoisingPolicy(pipe), inputs, seeds=[1, 2], num_inference_steps=2)
    assert [one.tobytes() for one in samples] == [one.tobytes() for one in expected]
    assert check_pipeline(pipe, inputs, num_inference_steps=2).trains and pipe.safety_checker is checker


def test_rows_and_images_of_a_prompt_are_samples_of_their_own(monkeypatch):
    counts, two = [], {"num_images_per_prompt": 2}
    count = lambda *args, **given: counts.append(len(given["seeds"])) or rollout(*args, **given)  # noqa: E731
    monkeypatch.setattr("diffusion_grpo.policy.check.rollout", count)
    calls = [("sd3", {"prompt": "a cat", **two}), ("sd3", {"prompt": ["a", "b"], **two}), ("kandinsky_decoder", {})]
    for name, given in calls:
        pipe, inputs = tiny_pipelines.build(name)
        assert check_pipeline(pipe, inputs | given).trains
    assert counts == [2, 4, 2]


def test_memory_that_does_not_suffice_says_nothing_about_the_pipeline(monkeypatch):
    pipe, inputs = tiny_pipelines.build("sd3")

    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(pipe.transformer, "forward", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        check_pipeline(pipe, inputs, num_inference_steps=2)


def test_half_precision_is_named_where_a_replay_differs():
    for dtype, is_named in ((torch.float32, False), (torch.bfloat16, True)):
        pipe, inputs = tiny_pipelines.build("sd3")
        block = pipe.transformer.transformer_blocks[0].ff
        block.register_forward_hook(lambda module, args, output: output + 0.1 * torch.randn_like(output))
        report = check_pipeline(pipe.to(dtype), inputs)
        assert not report.trains and "ratio is off" in report.reason
        assert ("check it in float32" in report.reason) == is_named


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


@pytest.mark.parametrize("reason", ["EditingPipeline starts from what its method invert", "has no scheduler"])
def test_what_cannot_train_is_refused_by_check_and_trainer_in_the_same_words(reason, tmp_path):
    pipe, inputs = tiny_pipelines.build("sd15")
    if "Editing" in reason:
        methods = {"invert": lambda self, image: None, "__call__": lambda self, editing_prompt=None: None}
        pipe.__class__ = type("EditingPipeline", (type(pipe),), methods)
    else:
        pipe.scheduler = None
    report = check_pipeline(pipe, inputs)
    assert not report.trains and report.steps == 0 and reason in report.reason
    with pytest.raises(ValueError) as refusal:
        DiffusionGRPOTrainer(
            pipe, brightness, DiffusionGRPOConfig(str(tmp_path), **SETTINGS), Dataset.from_dict({"prompt": PROMPTS})
        )
    assert str(refusal.value) == report.reason
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize("has_own_scheduler", [False, True], ids=["one scheduler", "one a chunk"])
def test_a_loop_that_runs_twice_is_refused(has_own_scheduler):
    pipe, inputs = tiny_pipelines.build("sd15")

    def twice(self, *args, **kwargs):
        super(kind, self).__call__(*args, **kwargs)
        if has_own_scheduler:
            self.__dict__["scheduler"] = copy.deepcopy(self.scheduler)
        return super(kind, self).__call__(*args, **kwargs)

    kind = type("ChunkPipeline", (type(pipe),), {"__call__": functools.wraps(type(pipe).__call__)(twice)})
    pipe.__class__ = kind
    report = check_pipeline(pipe, inputs)
    assert not report.trains and report.reason.startswith("The pipeline runs its denoising loop several times")


def test_a_pipeline_whose_call_is_given_the_inverted_latents_trains():
    pipe, inputs = tiny_pipelines.build("sd15")
    pipe.__class__ = type("EditingPipeline", (type(pipe),), {"invert": lambda self, image: None})
    assert check_pipeline(pipe, inputs).trains


def test_weights_that_are_not_numbers_are_named():
    pipe, inputs = tiny_pipelines.build("sd15")
    torch.nn.init.constant_(next(pipe.text_encoder.parameters()), float("nan"))
    report = check_pipeline(pipe, inputs)
    assert not report.trains and report.reason.startswith("The log-probabilities are not finite")
