"""The embedded model: loads plainly, is small, reads as its card says, and its held-out words are held out."""

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from benchmarks.tiny_model.evaluate import draw, measure
from diffusion_grpo import DiffusionGRPOConfig, tiny
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.tiny import COLORS, PATH, prompts, words
from diffusion_grpo.training.preflight import prepare_args


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusion3Pipeline.from_pretrained(PATH)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_folder_is_at_most_15_megabytes():
    assert sum(file.stat().st_size for file in PATH.rglob("*") if file.is_file()) <= 15_000_000
    assert not list(PATH.rglob("*.bin"))


def test_every_part_of_the_pipeline_is_real_and_in_float32(pipe):
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float32}
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def test_the_third_text_encoder_is_the_same_as_none(pipe):
    without = StableDiffusion3Pipeline.from_pretrained(PATH, text_encoder_3=None, tokenizer_3=None)
    without.set_progress_bar_config(disable=True)
    wanted = prompts("test", 2)["prompt"][:]
    for ours, theirs in zip(pipe.encode_prompt(*[wanted] * 3), without.encode_prompt(*[wanted] * 3), strict=True):
        assert torch.equal(ours, theirs)
    images = [[image.tobytes() for image in draw(one, wanted, 2.0)] for one in (pipe, without)]
    assert images[0] == images[1]


def test_a_thousand_words_are_held_out():
    train, test = words("train"), words("test")
    assert len(test) == len(set(test)) == 1000
    assert not set(train) & set(test)
    assert all(word.isascii() and word.isupper() and 3 <= len(word) <= 6 for word in train + test)


def test_prompts_are_seeded_and_distinct():
    first = prompts("test", 1500, seed=3)["prompt"][:]
    assert first == prompts("test", 1500, seed=3)["prompt"][:]
    assert first != prompts("test", 1500, seed=4)["prompt"][:]
    assert len(set(first)) == 1500
    assert prompts("test", 100, seed=3)["prompt"][:] == first[:100]
    held_out = set(words("test"))
    assert all(prompt.split('"')[1] in held_out for prompt in first)


def test_prompts_use_all_colors_evenly():
    named = [prompt.split()[-1] for prompt in prompts("train")["prompt"]]
    assert all(60 <= named.count(color) <= 150 for color in COLORS)


@pytest.mark.parametrize("arguments", [("validation",), ("test", 0), ("test", 6001)])
def test_prompts_refuse_what_they_cannot_give(arguments):
    with pytest.raises(ValueError, match="must be"):
        prompts(*arguments)


@pytest.mark.slow
def test_guidance_helps_and_leaves_room_to_learn(pipe):
    """The card's table in little: 36 held-out prompts, margins of four standard errors."""
    wanted = prompts("test", 36)["prompt"][:]
    plain, guided = (measure(draw(pipe, wanted, guidance), wanted) for guidance in (1.0, 4.0))
    assert 0.05 <= plain["text exact"] <= 0.65
    assert guided["text exact"] >= plain["text exact"] + 0.2
    assert guided["tesseract exact"] >= plain["tesseract exact"] + 0.2
    assert guided["color right"] > plain["color right"]


def test_images_of_the_model_repeat(pipe):
    wanted = prompts("test", 2)["prompt"][:]
    first, again = (draw(pipe, wanted, 1.0) for _ in range(2))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert first[0].size == (96, 32)


def test_the_embedded_model_has_settings_of_its_own(tmp_path):
    """Its size and a batch of seconds by default; what the user gives stays, and what belongs to it is left alone."""
    args = DiffusionGRPOConfig(str(tmp_path), num_generations=4, use_cpu=True)
    args.fill(tiny.default_settings({"num_generations": 4}))
    assert (args.height, args.width, args.pipeline_kwargs) == (32, 96, {"max_sequence_length": 1})
    args = DiffusionGRPOConfig(str(tmp_path), height=64, trained_steps=[0, 8], use_cpu=True)
    args.fill(tiny.default_settings({"height": 64, "trained_steps": [0, 8]}))
    assert args.height == 64 and args.width is None and args.num_inference_steps == 10
    assert (
        args.batch_sizes.samples_per_update == 32
        and args.micro_batches_per_rollout == args.gradient_accumulation_steps == 2
    )


@pytest.mark.parametrize(
    ("given", "trained", "made"),
    [
        ({}, 32, 32),
        ({"per_device_train_batch_size": 8}, 32, 32),
        ({"per_device_train_batch_size": 2}, 32, 32),
        ({"num_generations": 4}, 32, 32),
        ({"num_generations": 64}, 64, 64),
        ({"best_of_n": 2}, 32, 128),
        ({"num_iterations": 2}, 32, 32),
        ({"gradient_accumulation_steps": 4}, 64, 64),
        ({"loss_type": "dpo"}, 32, 32),
        ({"loss_type": "dgpo"}, 32, 32),
    ],
    ids=str,
)
def test_each_size_of_its_batches_is_filled_in_by_itself(tmp_path, given, trained, made):
    args = prepare_args("tiny", DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given))
    assert (args.batch_sizes.samples_per_update, args.batch_sizes.samples_per_rollout) == (trained, made)


def test_the_command_line_takes_them_too(tmp_path):
    words = ["--model", "tiny", "--dataset", "tiny", "--reward_funcs", "color", "--output_dir", str(tmp_path)]
    words += ["--use_cpu", "true"]
    _, _, args = parse_train_arguments(None, words)
    assert (args.height, args.width, args.batch_sizes.samples_per_update, args.num_inference_steps) == (32, 96, 32, 6)
    _, _, args = parse_train_arguments(None, [*words, "--width", "64", "--num_inference_steps", "9"])
    assert (args.height, args.width, args.num_inference_steps) == (None, 64, 9)
    words[1] = "someone/some-model"
    assert parse_train_arguments(None, words)[2].height is None
