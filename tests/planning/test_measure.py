"""What is measured on a pipeline without weights is what the real one takes."""

import json

import pytest
import torch
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.planning.live_bytes import LiveBytes
from diffusion_grpo.planning.measure import DECODING, DENOISING, PhaseWatch, list_weights
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.policy.rollout import replay, rollout


def real_peaks(config):
    """The most bytes of each phase of a real rollout, and of a real forward and backward pass."""
    script, lora, args = parse_train_arguments(config, [])
    trainer = build_trainer(script, lora, args)
    policy, trained = trainer.policy, [p for p in trainer.model.parameters() if p.requires_grad]
    inputs = trainer.inputs([{"prompt": "a red cat"}] * args.per_device_train_batch_size)
    watch, seeds = PhaseWatch(policy), range(args.per_device_train_batch_size)
    with watch.watching():
        _, trajectory = rollout(policy, inputs, seeds=seeds, num_inference_steps=4, steps=[[0]] * len(seeds))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    known = [*list_weights(policy.pipe), *(p.grad for p in trained), *trajectory.tensors().values()]
    with LiveBytes(known) as live:
        replay(policy, inputs, trajectory, 0).log_prob.mean().backward()
    return watch, live.peak


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sd3", {}),
        ("sd3", {"gradient_checkpointing": True}),
        ("sd3", {"bf16": True}),
        ("flux", {"bf16": True, "gradient_checkpointing": True}),
        ("sdxl", {}),
        ("wan", {"gradient_checkpointing": True}),
        ("qwen_image", {}),
    ],
)
def test_the_most_bytes_of_each_phase_are_those_of_a_real_run(name, settings, tmp_path):
    config = write_run(tmp_path, name, **settings)
    made = plan(config, [])
    planned = {item.name: item.accelerator for item in made.memory if item.phase}
    watch, update = real_peaks(config)
    assert made.evaluations["in one step"] == sum(watch.rows) / 2
    assert planned["activations"] == pytest.approx(update, rel=0.01)
    assert planned["denoising"] == pytest.approx(watch.live.peaks[DENOISING], rel=0.01)
    assert planned["decoding"] == pytest.approx(watch.live.peaks[DECODING], rel=0.01)


def test_checkpointing_keeps_less(tmp_path):
    config = write_run(tmp_path, "sd3")
    network = tmp_path / "model" / "transformer" / "config.json"
    network.write_text(json.dumps(json.loads(network.read_text()) | {"num_layers": 6}))  # there are no weights to fit

    def activations(*words):
        return next(item.accelerator for item in plan(config, list(words)).memory if item.name == "activations")

    every = activations("--gradient_checkpointing", "true")
    half = activations("--gradient_checkpointing", "true", "--selective_checkpointing", "0.5")
    assert every < half < activations()
