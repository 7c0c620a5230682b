"""A pipeline without weights is measured as the real one runs."""

import json

import diffusers
import pytest
import torch
from planned_runs import write_run
from real_sizes import write_model
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.planning.weightless import KeptStorages, identify_storage


@pytest.mark.parametrize(("name", "evaluations"), [("sd3", 2), ("wan", 2)])
def test_evaluations_and_activations_are_those_of_the_real_network(name, evaluations, tmp_path):
    config = write_run(tmp_path, name)
    made = plan(config, [])
    assert made.evaluations["in one step"] == evaluations  # in one call or in two
    script, lora, args = parse_train_arguments(config, [])
    trainer = build_trainer(script, lora, args)
    network, kept = trainer.policy.network, []
    real = network.forward

    def watched(*positional, **named):
        if not torch.is_grad_enabled():
            return real(*positional, **named)
        if not kept:
            kept.append(KeptStorages({identify_storage(x) for x in [*network.parameters(), *network.buffers()]}))
        with kept[0]:
            return real(*positional, **named)

    network.forward = watched
    inputs = trainer.inputs([{"prompt": "a photo of a cat"}] * 2)
    from diffusion_grpo.policy.rollout import replay, rollout

    _, trajectory = rollout(trainer.policy, inputs, seeds=[1, 2], num_inference_steps=4, steps=[[0]] * 2)
    replay(trainer.policy, inputs, trajectory, 0)
    planned = next(item.accelerator for item in made.memory if item.name == "activations")
    assert planned == pytest.approx(kept[0].bytes, rel=0.01)


def test_checkpointing_keeps_less(tmp_path):
    config = write_run(tmp_path, "sd3")
    network = tmp_path / "model" / "transformer" / "config.json"
    network.write_text(json.dumps(json.loads(network.read_text()) | {"num_layers": 6}))  # there are no weights to fit

    def activations(*words):
        return next(item.accelerator for item in plan(config, list(words)).memory if item.name == "activations")

    every = activations("--gradient_checkpointing", "true")
    half = activations("--gradient_checkpointing", "true", "--selective_checkpointing", "0.5")
    assert every < half < activations()


def test_no_weights_are_needed(tmp_path, capsys):
    config = write_run(tmp_path, "sd3")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    assert [item.name for item in plan(config, []).memory][:3] == ["parameters", "gradients", "optimizer"]


@pytest.mark.parametrize(
    ("name", "network", "weights"),
    [
        ("FLUX.1-dev", "transformer", 11_901_408_320),
        ("SD3.5-M", "transformer", 2_243_171_520),
        ("SD3.5-L", "transformer", 8_056_627_520),
        ("SDXL", "unet", 2_567_463_684),
        ("Qwen-Image", "transformer", 20_430_401_088),
        ("Wan2.1-1.3B", "transformer", 1_418_996_800),
        ("Wan2.2-TI2V-5B", "transformer", 4_999_787_712),
    ],
)
def test_folders_of_real_sizes_have_the_published_numbers_of_weights(name, network, weights, tmp_path):
    folder = write_model(name, tmp_path)
    cls = getattr(diffusers, json.loads((folder / "model_index.json").read_text())[network][1])
    with torch.device("meta"):
        made = cls.from_config(cls.load_config(folder / network))
    assert sum(p.numel() for p in made.parameters()) == weights
    assert not list(folder.rglob("*.safetensors"))
