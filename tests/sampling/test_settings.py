"""Options of `diffusion-grpo sample`, beside a model or a YAML file."""

import argparse
import json
from pathlib import Path

import pytest
from command_line import write_config

from diffusion_grpo.sampling.settings import SampleSettings, add_sample_options, read_settings


def read(*words: str) -> SampleSettings:
    parser = argparse.ArgumentParser()
    add_sample_options(parser)
    arguments, overrides = parser.parse_known_args(words)
    return read_settings(arguments, overrides)


def test_a_model_with_options():
    settings = read("owner/name", "--prompts", "x.txt", "--height", "64", "--reward_funcs", "text", "color")
    assert (settings.model, settings.prompts, settings.height, settings.width) == ("owner/name", "x.txt", 64, None)
    assert (settings.split, settings.max_prompts, settings.noise_level, settings.dtype) == ("test", 16, 0.0, None)
    assert settings.reward_funcs == ["text", "color"] and settings.output_dir == Path("samples")


def test_a_file_of_a_run_gives_what_the_options_do_not(tmp_path):
    config = write_config(tmp_path, seed=7, pipeline_kwargs={"a": 1, "b": 2}, reward_weights=[2.0])
    settings = read(config, "--pipeline_kwargs", '{"b": 3}', "--num_inference_steps", "5", "--beta", "0.5")
    assert (settings.model, settings.seed, settings.num_generations) == ("nobody/nothing", 7, 2)
    assert settings.pipeline_kwargs == {"a": 1, "b": 3} and settings.reward_weights == [2.0]
    assert settings.train.num_inference_steps == 5 == settings.num_inference_steps and settings.train.beta == 0.5
    assert settings.split == "train" and settings.max_prompts is None and settings.batch_size == 2
    other = read(config, "--reward_funcs", "text")
    assert other.reward_weights is None  # the weights were those of other rewards


def test_jobs_whose_samples_differ_have_other_identities(tmp_path):
    words = ("owner/name", "--prompts", "x.txt")
    first = read(*words)
    assert first.identity == read(*words, "--batch_size", "3", "--output_dir", "elsewhere").identity
    others = (("--seed", "1"), ("--height", "8"), ("--reward_funcs", "text"), ("--pipeline_kwargs", '{"a": 1}'))
    for option in (*others, ("--fps", "8")):
        assert first.identity != read(*words, *option).identity
    # a slash at the end of a folder makes no other job
    words += ("--lora",)
    assert read(*words, f"{tmp_path}/").identity == read(*words, str(tmp_path)).identity


def test_settings_of_a_run_that_change_its_samples_make_another_job(tmp_path):
    config = write_config(tmp_path, noisy_steps="all", sde_type="flow_sde")
    options = {"temperature": "0.5", "top_p": "0.5", "noisy_steps": "all_and_last", "bf16": "true"}
    assert all(read(config).identity != read(config, f"--{name}", value).identity for name, value in options.items())


def test_samples_of_a_run_have_its_spacing_of_steps_and_begin_with_the_lora_that_it_trains_further(tmp_path):
    (tmp_path / "lora").mkdir()
    steps = {"num_inference_steps": 3, "eval_num_inference_steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    config = write_config(tmp_path, **steps, lora_path=str(tmp_path / "lora"))
    assert read(config).sigmas == [1.0, 0.6, 0.3] and read(config).lora == str(tmp_path / "lora")
    assert read(config, "--sigmas", "null").sigmas is None
    assert read(config, "--lora", "owner/name").lora == "owner/name"
    assert read(config).identity != read(config, "--sigmas", "1.0", "0.7", "0.3").identity


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["owner/name"], "--prompts is missing"),
        (["owner/name", "--prompts", "x.txt", "--max_prompts", "0"], "max_prompts must be at least 1"),
        (["owner/name", "--prompts", "x.txt", "--beta", "1"], "unknown option --beta"),
        (["owner/name", "--prompts", "x.txt", "--noise_level", "0.5"], "needs --num_inference_steps"),
        (["owner/name", "--prompts", "x.txt", "--noise_level", "-1"], "noise_level must be at least 0"),
        (["owner/name", "--prompts", "x.txt", "--pipeline_kwargs", "[1]"], "write a JSON object"),
        (["owner/name", "--prompts", "x.txt", "--output_dir", __file__], "--output_dir: .* is a file; give the path"),
    ],
)
def test_what_cannot_be_used_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        read(*words)


def test_the_embedded_model_and_a_runs_lora_are_sampled_as_they_were_trained(tmp_path):
    call = {"num_inference_steps": 7, "guidance_scale": 3.5, "height": 24, "max_sequence_length": 9}
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"evaluation_call": {"inputs": ["prompt"], "arguments": call}}))
    for model in ("tiny", "owner/name"):
        settings = read(model, "--prompt", "a cat", "a dog", "--lora", str(tmp_path / "checkpoint-2"), "--height", "8")
        assert (settings.num_inference_steps, settings.guidance_scale, settings.height) == (7, 3.5, 8)
        assert settings.pipeline_kwargs == {"max_sequence_length": 9} and settings.prompts == ["a cat", "a dog"]
    tiny = read("tiny", "--prompts", "x.txt", "--width", "32")
    assert (tiny.num_inference_steps, tiny.guidance_scale, tiny.height, tiny.width) == (6, 1.0, 32, 32)
    assert tiny.pipeline_kwargs == {"max_sequence_length": 1}


def test_what_a_pipeline_is_loaded_with(tmp_path):
    words = ("--model_init_kwargs", '{"revision": "v2"}')
    assert read("a/b", "--prompt", "x", *words).model_init_kwargs["revision"] == "v2"
    config = write_config(tmp_path, model_init_kwargs={"revision": "v1"})
    assert read(config, *words).train.model_init_kwargs == {"revision": "v2"}


@pytest.mark.parametrize("lora", ["run/checkpoint-9", "./nowhere", "nowhere"])
def test_a_lora_that_is_not_there_is_refused(lora, tmp_path, monkeypatch):
    """Before it is looked for on the Hub, where a missing checkpoint would be `owner/name`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=f"--lora: there is no folder or file {lora}, and a Hub id is"):
        read("tiny", "--prompts", "x.txt", "--lora", lora)
    assert read("tiny", "--prompts", "x.txt", "--lora", "owner/name").lora == "owner/name"
