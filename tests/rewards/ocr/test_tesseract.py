"""The reward `tesseract` reads like `text`, with a reader that the policy was not trained on."""

import random
import sys

import pytest
from PIL import Image
from plain_images import THREE, draw_words

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS
from diffusion_grpo.rewards.ocr.tesseract import load_reader, read


def test_clean_renderings_are_read() -> None:
    images, wanted, _, _ = draw_words(60)
    scores = REWARDS["tesseract"](images=images, prompts=wanted)
    assert sum(value == 1 for value in scores) >= 57


def test_one_wrong_letter_costs_its_share() -> None:
    images = [draw_word("RUINS", "black", random.Random(0))]
    assert read(images) == ["RUINS"]
    assert REWARDS["tesseract"](images=images, prompts=['the word "RAINS" in black']) == [pytest.approx(0.8)]


def test_nothing_written_scores_nothing() -> None:
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    assert REWARDS["tesseract"](images=[blank], prompts=['the word "RAINS" in red']) == [0.0]
    assert REWARDS["tesseract"](images=[blank], prompts=["rain"]) == [None]


def test_the_wanted_text_may_stand_in_a_column() -> None:
    images = [draw_word("RAINS", "blue", random.Random(0)), draw_word("RUINS", "black", random.Random(0))]
    columns = {"word": ["Rains", "Rains"], "target_column": "word"}
    assert REWARDS["tesseract"](images=images, prompts=["a", 'b "X"'], **columns) == [1, pytest.approx(0.8)]
    assert REWARDS["tesseract"](images=images, prompts=["a", "b"], match="exact", **columns) == [1, 0]
    case = {"match": "exact", "ignore_case": False}
    assert REWARDS["tesseract"](images=images, prompts=["a", "b"], **case, **columns) == [0, 0]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_reader.cache_clear()
    monkeypatch.setitem(sys.modules, "tesserocr", None)
    with pytest.raises(ImportError, match=r'pip install "diffusion-grpo\[ocr\]"'):
        REWARDS["tesseract"](images=THREE[:1], prompts=['"A"'])
