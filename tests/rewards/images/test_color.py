"""The reward `color` is high where the ink has the colour that the prompt names."""

import random

from PIL import Image, ImageFilter
from plain_images import draw_words

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS
from diffusion_grpo.rewards.images.color import find_color_name
from diffusion_grpo.tiny import COLORS, make_prompt


def test_color_is_high_for_the_named_color_alone() -> None:
    images, wanted, written, named = draw_words(36)
    right = REWARDS["color"](images=images, prompts=wanted)
    assert min(right) > 0.9
    for other in COLORS:
        scores = REWARDS["color"](images=images, prompts=[make_prompt(word, other) for word in written])
        assert all(value < 0.3 for value, color in zip(scores, named, strict=True) if color != other)


def test_color_survives_blur_and_counts_blank_as_nothing() -> None:
    blurred = draw_word("RAINS", "blue", random.Random(0)).filter(ImageFilter.GaussianBlur(1))
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    scores = REWARDS["color"](images=[blurred, blank, blank], prompts=["in blue", "in blue", "in mauve"])
    assert scores[0] > 0.3 and scores[1:] == [0.0, None]


def test_a_color_inside_the_quotes_is_not_the_wish() -> None:
    image = draw_word("GREEN", "red", random.Random(0))
    (value,) = REWARDS["color"](images=[image], prompts=['the word "GREEN" in red'])
    assert value > 0.9
    for quotes in ('""', "“”", "„“"):
        assert find_color_name(f"the word {quotes[0]}GREEN{quotes[1]} in blue") == "blue"
    assert find_color_name('the word "" and "GREEN" in red') == "red"
