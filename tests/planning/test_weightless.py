"""Pipelines without weights are built from configuration files alone."""

import json

import diffusers
import pytest
import torch
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from benchmarks.real_sizes import write_model
from diffusion_grpo.planning.plan import plan


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
