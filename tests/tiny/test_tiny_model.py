"""How the embedded model was made: its tokenizer, its images, and that no held-out word is among them."""

import random

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from benchmarks.tiny_model.render import corrupt, draw_word, random_word
from benchmarks.tiny_model.train import character_tokenizer, make_images
from diffusion_grpo.tiny import COLORS, PATH, words
from diffusion_grpo.tiny import prompts as tiny_prompts


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(PATH)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_saved_tokenizer_is_the_one_of_the_training_script(pipe: StableDiffusion3Pipeline) -> None:
    written = ['the word "RAINS" in red', 'the word "ABCDEF" in orange', ""]
    expected = character_tokenizer()(written).input_ids
    assert pipe.tokenizer(written).input_ids == pipe.tokenizer_2(written).input_ids == expected
    assert len(expected[1]) == pipe.tokenizer.model_max_length


def test_the_last_of_the_pipelines_steps_changes_next_to_nothing(pipe: StableDiffusion3Pipeline) -> None:
    """As docs/algorithms/noise.md says: five of its six steps give the same images."""
    size = {"height": 32, "width": 96, "max_sequence_length": 1, "guidance_scale": 1.0, "output_type": "np"}
    prompts = list(tiny_prompts("test", n=64)["prompt"])
    images = []
    for steps in ({"num_inference_steps": 6}, {"sigmas": [1.0, 0.8, 0.6, 0.4, 0.2]}):
        generators = [torch.Generator().manual_seed(seed) for seed in range(64)]
        images.append(torch.from_numpy(pipe(prompts, generator=generators, **size, **steps).images))
    difference = 255 * (images[0] - images[1]).abs()
    assert 0 < difference.mean() < 0.1 and difference.max() < 4


def test_one_token_per_letter() -> None:
    tokenizer = character_tokenizer()
    one, other = (tokenizer(f'the word "{word}" in red').input_ids for word in ("RAINS", "RUINS"))
    assert sum(a != b for a, b in zip(one, other, strict=True)) == 1


def test_no_training_image_shows_a_held_out_word() -> None:
    held_out = set(words("test"))
    assert random_word(random.Random(0), ["ONLY"], held_out) not in held_out
    generator = random.Random(1)
    drawn = {random_word(generator, words("train"), held_out) for _ in range(20_000)}
    assert len(drawn) > 10_000
    assert not drawn & held_out


def test_a_held_out_word_that_comes_up_by_chance_is_drawn_again() -> None:
    generator = random.Random(0)
    by_chance = {random_word(generator, ["ONLY"], set()) for _ in range(5000)}
    generator = random.Random(0)
    assert not {random_word(generator, ["ONLY"], by_chance - {"ONLY"}) for _ in range(500)} & (by_chance - {"ONLY"})


def test_images_depend_on_the_seed_alone() -> None:
    first, again, other = (make_images(6, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and first[1] == again[1]
    assert first[1] != other[1]
    assert first[0].shape == (6, 3, 32, 96) and first[0].dtype == torch.uint8


def test_every_word_fits_the_image() -> None:
    generator = random.Random(0)
    for color in COLORS:
        image = draw_word("WWWWWW", color, generator).convert("L")
        edge = [image.getpixel((x, y)) for x in (0, 95) for y in range(32)]
        assert min(edge) > 200


def test_captions_are_wrong_as_often_as_asked() -> None:
    generator = random.Random(0)
    pairs = [corrupt("ABCDEF", "red", 0.25, 0.5, generator) for _ in range(4000)]
    letters = sum(a != b for word, _ in pairs for a, b in zip(word, "ABCDEF", strict=True)) / 24_000
    assert letters == pytest.approx(0.25 * 25 / 26, abs=0.015)
    assert sum(color != "red" for _, color in pairs) / 4000 == pytest.approx(0.5, abs=0.03)
    assert corrupt("ABCDEF", "red", 0.0, 0.0, generator) == ("ABCDEF", "red")
