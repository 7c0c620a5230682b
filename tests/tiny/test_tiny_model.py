"""How the embedded model was made: its tokenizer, and that no held-out word is among its images."""

import random

from transformers import CLIPTokenizer

from benchmarks.tiny_model.render import random_word
from benchmarks.tiny_model.train import character_tokenizer
from diffusion_grpo.tiny import PATH, words


def test_the_saved_tokenizer_is_the_one_of_the_training_script_with_a_token_per_letter():
    written = ['the word "RAINS" in red', 'the word "RUINS" in red', 'the word "ABCDEF" in orange', ""]
    expected = character_tokenizer()(written).input_ids
    saved = [CLIPTokenizer.from_pretrained(PATH, subfolder=part) for part in ("tokenizer", "tokenizer_2")]
    assert all(tokenizer(written).input_ids == expected for tokenizer in saved)
    assert len(expected[2]) == saved[0].model_max_length
    assert sum(a != b for a, b in zip(*expected[:2], strict=True)) == 1


def test_no_training_image_shows_a_held_out_word():
    held_out, generator = set(words("test")), random.Random(1)
    drawn = {random_word(generator, words("train"), held_out) for _ in range(20_000)}
    assert len(drawn) > 10_000 and not drawn & held_out
    by_chance = {random_word(random.Random(seed), ["ONLY"], set()) for seed in range(500)} - {"ONLY"}
    assert by_chance and not {random_word(random.Random(seed), ["ONLY"], by_chance) for seed in range(500)} & by_chance
