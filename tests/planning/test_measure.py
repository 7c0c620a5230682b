"""What is measured on a pipeline without weights is what the real one takes."""

import json

import pytest
import torch
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.planning.measure import DECODING, DENOISING, LiveBytes, PhaseWatch, list_pipeline_weights
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.policy.rollout import replay, rollout
from diffusion_grpo.policy.trajectory import RolloutRequest


def real_peaks(config):
    """The most bytes of each phase of a real rollout, and of a real forward and backward pass."""
    script, lora, args = parse_train_arguments(config, [])
    trainer = build_trainer(script, lora, args)
    policy, trained = trainer.policy, [p for p in trainer.model.parameters() if p.requires_grad]
    inputs = lambda count: trainer.inputs([{"prompt": "a red cat"}] * count)  # noqa: E731
    count, together = args.per_device_train_batch_size, args.rollout_batch_size or args.per_device_train_batch_size
    watch, settings = PhaseWatch(policy), {"num_inference_steps": 4, "steps": [[0]] * together}
    with watch.watching():
        rollout(policy, inputs(together), seeds=range(together), **settings)
    settings |= {"steps": [[0]] * count, "is_complete": False}
    _, trajectory = rollout(policy, inputs(count), seeds=range(count), initial_seeds=[7] * count, **settings)
    calls = {"inputs": inputs(count)}
    if args.shares_calls:
        calls = {"inputs": inputs(1), "sources": [0] * count}
        rollout(policy, inputs(1), seeds=[0], num_inference_steps=4, is_complete=False)  # the prompt is kept
    if args.takes_gradients:
        request = RolloutRequest(*[torch.arange(count)] * 2, 4, [[2]] * count, keeps="entered")
        samples = policy.rollout(calls["inputs"], request)[1]
        trajectory = samples
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    known = [*list_pipeline_weights(policy.pipe), *(p.grad for p in trained), *trajectory.tensors().values()]
    with LiveBytes(known) as live:
        if args.takes_gradients:
            policy.finish(calls["inputs"], samples).pixels.mean().backward()
        else:
            replay(policy, trajectory=trajectory, step=0, **calls).log_prob.mean().backward()
    return watch, max(live.peaks.values())


ALONE = {"samples_per_latent": 1}
DRAFT = {"loss_type": "draft", "reward_funcs": ["brightness"], "trained_steps": None, "num_trained_steps": 2}
RUNS = [
    ("sd3", {"per_device_train_batch_size": 4, "num_generations": 4, "rollout_batch_size": 2}),
    ("flux", ALONE | {"bf16": True, "gradient_checkpointing": True, "use_peft": False}),
    ("sd3", DRAFT),
]
MORE = [
    ("sd3", {"bf16": True}),
    ("sd3", {"rollout_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4}),
    ("flux", ALONE | {"bf16": True, "gradient_checkpointing": True}),
    ("sdxl", {}),
    ("wan", ALONE | {"gradient_checkpointing": True}),
    ("qwen_image", ALONE),
    ("flux", DRAFT | {"gradient_checkpointing": True}),
]


@pytest.mark.parametrize(("name", "settings"), RUNS + [pytest.param(*run, marks=pytest.mark.slow) for run in MORE])
def test_the_most_bytes_of_each_phase_are_those_of_a_real_run(name, settings, tmp_path):
    config = write_run(tmp_path, name, **settings)
    made = plan(config, [])
    planned = {item.name: item.accelerator for item in made.memory if item.phase}
    watch, update = real_peaks(config)
    assert made.evaluations["in one step"] == sum(watch.rows) / settings.get("rollout_batch_size", 2)
    assert planned["activations"] == pytest.approx(update, rel=0.01)
    assert planned["denoising"] == pytest.approx(watch.live.peaks[DENOISING], rel=0.01)
    assert planned["decoding"] == pytest.approx(watch.live.peaks[DECODING], rel=0.01)


@pytest.mark.slow
def test_pixels_without_a_decoder_are_measured(tmp_path):
    made = plan(write_run(tmp_path, "deepfloyd", **DRAFT), [])
    assert next(item.accelerator for item in made.memory if item.name == "activations") > 0


@pytest.mark.slow
def test_checkpointing_keeps_less(tmp_path):
    config = write_run(tmp_path, "sd3")
    network = tmp_path / "model" / "transformer" / "config.json"
    network.write_text(json.dumps(json.loads(network.read_text()) | {"num_layers": 4}))  # there are no weights to fit

    def activations(*words):
        return next(item.accelerator for item in plan(config, list(words)).memory if item.name == "activations")

    every = activations("--gradient_checkpointing", "true")
    half = activations("--gradient_checkpointing", "true", "--selective_checkpointing", "0.5")
    assert every < half < activations()


def test_storages_count_once_and_as_long_as_something_holds_them():
    weight = torch.zeros(1000)
    with LiveBytes([weight]) as live:
        made = weight + 1
        view = made.view(10, 100)
        doubled = view * 2
        assert live.now == 8000
        del made
        assert live.now == 8000  # its view holds it
        del view
        assert live.now == 4000
        weight.mul_(2)  # in place, where it was before
        del doubled
    assert live.now == 0 and dict(live.peaks) == {"": 8000}


def test_what_autograd_keeps_counts_until_the_backward_pass():
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes([weight]) as live:
        loss = (weight * 2).exp().sum()
        assert live.now == 4000 + 4  # the result of exp, and the sum
        loss.backward()
        assert live.now == 4000 + 4  # the gradient instead
        assert dict(live.peaks) == {"": 2 * 4000 + 8}


def test_phases_have_a_peak_each_and_tensors_need_no_values():
    with FakeTensorMode():
        large = torch.empty(1_000_000)
    with LiveBytes([large]) as live:
        live.begin("first")
        kept = large + 1
        (kept + 1).sum()
        live.begin("second")
        del kept
        (large[:10] * 1)
    assert dict(live.peaks) == {"first": 8_000_004, "second": 4_000_000}
