"""Pipelines without weights are built from configuration files alone."""

import json

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from transformers import CLIPConfig, CLIPImageProcessor

from benchmarks.real_sizes import write_model
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.planning.weightless import find_class


def test_no_weights_are_needed(tmp_path):
    config = write_run(tmp_path, "sd3")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    assert [item.name for item in plan(config, []).memory][:3] == ["parameters", "gradients", "optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "network", "weights"),
    [
        ("FLUX.1-dev", "transformer", 11_901_408_320),
        ("SD3.5-M", "transformer", 2_243_171_520),
        ("SDXL", "unet", 2_567_463_684),
        ("Qwen-Image", "transformer", 20_430_401_088),
        ("Wan2.1-1.3B", "transformer", 1_418_996_800),
        ("Wan2.2-TI2V-5B", "transformer", 4_999_787_712),
        ("HunyuanVideo", "transformer", 12_821_012_544),
        ("Stable Audio Open 1.0", "text_encoder", 109_628_544),
    ],
)
def test_folders_of_real_sizes_have_the_published_numbers_of_weights(name, network, weights, tmp_path):
    folder = write_model(name, tmp_path)
    assert count_weights(make_without_weights(folder, network)) == weights
    assert not list(folder.rglob("*.safetensors"))


def make_without_weights(folder, part):
    name = json.loads((folder / "model_index.json").read_text())[part][1]
    with torch.device("meta"):
        if hasattr(diffusers, name):
            cls = getattr(diffusers, name)
            return cls.from_config(cls.load_config(folder / part))
        cls = getattr(transformers, name)
        return cls(cls.config_class.from_pretrained(folder / part))


def count_weights(module):
    return sum(p.numel() for p in module.parameters())


def test_classes_are_found_in_diffusers_in_transformers_and_beside_the_pipeline():
    found = [
        find_class("part", *where)
        for where in (
            ("diffusers", "AutoencoderKL"),
            ("transformers", "CLIPConfig"),
            ("stable_diffusion", "StableDiffusionSafetyChecker"),
        )
    ]
    assert found == [diffusers.AutoencoderKL, CLIPConfig, StableDiffusionSafetyChecker]
    with pytest.raises(ValueError, match="part is a Mine of elsewhere"):
        find_class("part", "elsewhere", "Mine")


@pytest.mark.slow
def test_a_safety_checker_is_planned_unless_it_is_left_out(tmp_path):
    config = write_run(tmp_path, "sd15")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = CLIPConfig(text_config=small, vision_config=small | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    checker.save_pretrained(tmp_path / "model" / "safety_checker")
    index = tmp_path / "model" / "model_index.json"
    CLIPImageProcessor().save_pretrained(tmp_path / "model" / "feature_extractor")
    own = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    own |= {"feature_extractor": ["transformers", "CLIPImageProcessor"]}
    index.write_text(json.dumps(json.loads(index.read_text()) | own))

    def frozen(*words):
        return next(item.accelerator for item in plan(config, list(words)).memory if item.name == "frozen parts")

    expected = sum(p.nbytes for p in StableDiffusionSafetyChecker(checker).parameters())
    assert frozen() - frozen("--model_init_kwargs", '{"safety_checker": null}') == pytest.approx(expected, rel=0.01)
