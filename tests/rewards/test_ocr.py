"""The rewards that read text."""

import importlib.machinery
import importlib.metadata
import random
import sys
import types

import pytest
import torch
import transformers as tf
from PIL import Image, ImageDraw, ImageFont
from plain_images import draw_words
from tiny_scorers import IMAGES, got_ocr, trocr

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS, check_needs, load_rewards, score
from diffusion_grpo.rewards.ocr import (
    find_quoted,
    load_paddle,
    score_spelling,
    similarity,
)


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_renderings_are_read(name) -> None:
    images, wanted, _, _ = draw_words(40)
    assert sum(value == 1 for value in REWARDS[name](images=images, prompts=wanted)) >= 38
    images = [draw_word("RUINS", "black", random.Random(0)), Image.new("RGB", (96, 32), (250, 250, 250))]
    assert REWARDS[name](images=images, prompts=['the word "RAINS"'] * 2) == [pytest.approx(0.8), 0]
    assert REWARDS[name](images=images, prompts=["rain", ""]) == [None, None]


def test_an_image_reads_the_same_alone_and_in_a_batch_of_many_sizes() -> None:
    images, wanted, _, _ = draw_words(6)
    mixed = [image.resize((96 * (1 + row % 2), 32)) for row, image in enumerate(images)]
    together = REWARDS["text"](images=mixed, prompts=wanted)
    alone = [REWARDS["text"](images=[image], prompts=[prompt])[0] for image, prompt in zip(mixed, wanted)]
    assert together == alone


def test_similarity_is_a_normalised_edit_distance() -> None:
    assert score_spelling(["rains "], ["RAINS"]) == [1]
    assert similarity("", "RAINS") == 0
    assert similarity("RAIN", "RAINS") == pytest.approx(0.8)
    assert similarity("XRAINS", "RAINS") == pytest.approx(5 / 6)
    assert similarity("ABCD", "WXYZ") == 0
    assert similarity("KITTEN", "SITTING") == similarity("SITTING", "KITTEN") == pytest.approx(4 / 7)


def test_quoted_takes_the_first_quote() -> None:
    assert find_quoted('"A B" and "C"') == "A B"
    assert find_quoted("none") is None
    assert find_quoted("a sign “北京” and “C”") == "北京" and find_quoted("ein Schild „Halt“") == "Halt"


@pytest.mark.parametrize(
    ("reading", "wanted", "options", "score"),
    [
        ("Open", "OPEN", {}, 1),
        ("Open", "OPEN", {"ignore_case": False}, 0.25),
        ("OPEN NOW", "OPENNOW", {"ignore_spaces": True}, 1),
        (" open ", "OPEN", {"match": "exact"}, 1),
        (" open ", "OPEN", {"match": "exact", "ignore_case": False}, 0),
        ("we are OPEN today", "OPEN", {"match": "contains"}, 1),
        ("OPEM", "OPEN", {"match": "contains"}, 0.75),
        ("OPEN", "", {}, None),
        ("OPEN", None, {}, None),
    ],
)
def test_spelling_options(reading: str, wanted: str | None, options: dict, score: float | None) -> None:
    assert score_spelling([reading], [wanted], **options) == [score]


@pytest.mark.parametrize("match", ["edit", "exact", "contains"])
def test_white_space_is_no_wanted_text_and_whole_numbers_are_text(match):
    assert score_spelling(["", "a", "12", "12"], [" ", "\t", 12, "12"], match) == [None, None, 1, 1]


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_the_wanted_text_may_stand_in_a_column(name) -> None:
    reward = REWARDS[name]
    images = [draw_word("RAINS", "blue", random.Random(0)), draw_word("RUINS", "black", random.Random(0))]
    columns = {"word": ["Rains", "Rains"], "target_column": "word"}
    assert reward(images=images, prompts=["a", 'b "X"'], **columns) == [1, pytest.approx(0.8)]
    assert reward(images=images, prompts=["a", "b"], match="exact", **columns) == [1, 0]
    assert reward(images=images, prompts=["a", "b"], match="exact", ignore_case=False, **columns) == [0, 0]


@pytest.mark.slow
def test_text_in_a_scene_is_found_and_read_from_top_to_bottom() -> None:
    scene = Image.new("RGB", (480, 320), (205, 214, 190))
    font = ImageFont.load_default(size=44)
    pen = ImageDraw.Draw(scene)
    pen.rectangle((40, 30, 300, 120), fill=(250, 250, 240))
    pen.text((60, 50), "COFFEE", fill=(20, 20, 20), font=font)
    pen.text((180, 210), "HOUSE", fill=(120, 10, 10), font=font)
    blank = Image.new("RGB", (480, 320), (205, 214, 190))
    prompts = ['a sign "coffee house"', 'a sign "coffee house"', "no text"]
    assert REWARDS["text"](images=[scene, blank, scene], prompts=prompts, scene=True) == [1, 0, None]
    (beside,) = REWARDS["text"](images=[scene], prompts=['a sign "HOUSE"'], scene=True, match="contains")
    assert beside == 1


def test_frames_of_a_video_are_read() -> None:
    rains, ruins = (draw_word(word, "black", random.Random(0)) for word in ("RAINS", "RUINS"))
    videos = [[rains] * 4, [rains, ruins, ruins, ruins], [ruins] * 4]
    (reward,) = load_rewards({"text": {"frames": 2}})
    scores = score([reward], videos=videos, prompts=['"RAINS"'] * 3)
    assert scores[:, 0].tolist() == pytest.approx([1, 0.9, 0.8])


def installed(monkeypatch, version: str) -> None:
    plain = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "paddleocr" else plain(name))


@pytest.fixture
def paddle(monkeypatch):
    """PaddleOCR 3 as its interface is: an array of blue, green, red goes in, one result with `rec_texts` comes out."""
    made = []

    class PaddleOCR:
        def __init__(self, **options):
            made.append(options)

        def predict(self, input):
            assert input.shape == (32, 96, 3) and input[0, 0].tolist() == [30, 20, 10]
            return [{"rec_texts": ["NEW", "York"], "rec_scores": [0.9, 0.8]}]

    for name in ("paddleocr", "paddle"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.PaddleOCR = PaddleOCR
        monkeypatch.setitem(sys.modules, name, module)
    installed(monkeypatch, "3.7.0")
    load_paddle.cache_clear()
    yield made
    load_paddle.cache_clear()


def test_paddleocr_reads(paddle) -> None:
    images = [Image.new("RGB", (96, 32), (10, 20, 30))] * 2
    rewards = load_rewards({"text": {"engine": "paddleocr"}})
    for _ in range(2):
        values = score(rewards, images=images, prompts=['"new york"', '"NEW YORT"'])
        assert values[:, 0].tolist() == pytest.approx([1.0, 7 / 8])
    off = ("use_doc_orientation_classify", "use_doc_unwarping", "use_textline_orientation")
    assert paddle == [{"lang": "en", **dict.fromkeys(off, False)}]


def test_paddleocr_gets_its_own_arguments_and_the_names_of_models_in_folders(paddle, tmp_path) -> None:
    folders = {}
    for kind in ("detection", "recognition"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "inference.yml").write_text(f"Global:\n  model_name: my_{kind}\n")
        folders[f"text_{kind}_model_dir"] = str(tmp_path / kind)
    for kwargs in ({"lang": "ch"}, {**folders, "enable_mkldnn": False}):
        rewards = load_rewards({"text": {"engine": "paddleocr", "engine_kwargs": kwargs}})
        check_needs(rewards)
        score(rewards, images=[Image.new("RGB", (96, 32), (10, 20, 30))], prompts=['"new york"'])
    assert paddle[0]["lang"] == "ch" and "lang" not in paddle[1] and paddle[1]["enable_mkldnn"] is False
    assert paddle[1]["text_recognition_model_name"] == "my_recognition" and folders.items() <= paddle[1].items()
    (tmp_path / "detection" / "inference.yml").unlink()
    with pytest.raises(ValueError, match="detection holds no inference.yml; name a folder of PaddleOCR 3"):
        check_needs(rewards)


def test_what_paddleocr_lacks_is_reported_at_the_start(paddle, monkeypatch) -> None:
    rewards = load_rewards({"text": {"engine": "paddleocr"}})
    check_needs(rewards)
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(ValueError, match="package paddle is not installed"):
        check_needs(rewards)
    check_needs(load_rewards({"text": {"engine": "paddleocr", "engine_kwargs": {"engine": "transformers"}}}))
    installed(monkeypatch, "2.10.0")
    with pytest.raises(ValueError, match="PaddleOCR 2.10.0 is installed, but 3 or later is needed"):
        check_needs(load_rewards({"text": {"engine": "paddleocr", "engine_kwargs": {"engine": "transformers"}}}))


@torch.no_grad()
@pytest.mark.parametrize("make", [trocr, got_ocr], ids=lambda make: make.__name__)
def test_a_model_reads(make, tmp_path) -> None:
    """What it reads is what generate gives for the image alone."""
    make(tmp_path)
    model = tf.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    processor = tf.AutoProcessor.from_pretrained(tmp_path)
    images, expected = IMAGES[: 4 if make is trocr else 2], []
    for image in images:
        inputs = processor(images=image, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        tokens = tokens if make is trocr else tokens[inputs["input_ids"].shape[1] :]
        turn = (tokens == 2).nonzero()[:1] if make is got_ocr else torch.empty(0)
        tokens = tokens[: int(turn[0])] if len(turn) else tokens
        expected.append(" ".join(processor.tokenizer.decode(tokens, skip_special_tokens=True).split()))
    reward = REWARDS["text_by_model"](str(tmp_path), device="cpu", batch_size=3, max_new_tokens=12)
    assert reward.in_batches(reward.read, images) == expected and all(expected)
    assert len(set(expected)) > 1 or make is got_ocr
    with reward.network() as network:  # GOT-OCR's configuration does not say that a turn ends with <|im_end|>
        assert reward.find_ends(network) == (2 if make is trocr else [2, 0])
    columns = {"word": [expected[0].swapcase(), *["other"] * (len(images) - 2), None]}
    options = {"model": str(tmp_path), "max_new_tokens": 12, "target_column": "word", "device": "cpu"}
    values = score(
        load_rewards({"text_by_model": options}), images=images, prompts=[""] * len(images), columns=columns
    )
    assert values[0] == 1 and values[-1].isnan()
    if len(images) > 2:
        assert values[1].item() == pytest.approx(similarity(expected[1].upper(), "OTHER"))
