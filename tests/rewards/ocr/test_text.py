"""The reward `text`: reading, comparing and its options."""

import importlib.machinery
import importlib.metadata
import random
import sys
import types

import pytest
from huggingface_hub import constants
from PIL import Image, ImageDraw, ImageFont
from plain_images import THREE, draw_words

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS, check_needs, load_rewards, score
from diffusion_grpo.rewards.ocr.text import find_quoted, load_paddle, load_recogniser, score_spelling, similarity


def test_clean_renderings_are_read() -> None:
    images, wanted, _, _ = draw_words(60)
    scores = REWARDS["text"](images=images, prompts=wanted)
    assert sum(value == 1 for value in scores) >= 57


def test_one_wrong_letter_costs_its_share() -> None:
    images = [draw_word("RUINS", "black", random.Random(0))]
    assert REWARDS["text"](images=images, prompts=['the word "RAINS" in black']) == [pytest.approx(0.8)]


def test_nothing_written_scores_nothing() -> None:
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    assert REWARDS["text"](images=[blank], prompts=['the word "RAINS" in red']) == [0.0]
    assert REWARDS["text"](images=[blank], prompts=["rain"]) == [None]


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
        ("OPEN NOW", "OPENNOW", {}, 7 / 8),
        ("OPEN NOW", "OPENNOW", {"ignore_spaces": True}, 1),
        ("OPEM", "OPEN", {"match": "exact"}, 0),
        (" open ", "OPEN", {"match": "exact"}, 1),
        (" open ", "OPEN", {"match": "exact", "ignore_case": False}, 0),
        ("we are OPEN today", "OPEN", {"match": "contains"}, 1),
        ("OPEM", "OPEN", {"match": "contains"}, 0.75),
        ("something else entirely", "OPEN", {"match": "contains"}, 0),
        ("OPEN", "", {}, None),
        ("OPEN", None, {}, None),
    ],
)
def test_spelling_options(reading: str, wanted: str | None, options: dict, score: float | None) -> None:
    assert score_spelling([reading], [wanted], **options) == [score]


@pytest.mark.parametrize("match", ["edit", "exact", "contains"])
def test_white_space_is_no_wanted_text_and_whole_numbers_are_text(match):
    assert score_spelling(["", "a", "12", "12"], [" ", "\t", 12, "12"], match) == [None, None, 1, 1]


def test_the_wanted_text_may_stand_in_a_column() -> None:
    images = [draw_word("RAINS", "blue", random.Random(0)), draw_word("RUINS", "black", random.Random(0))]
    columns = {"word": ["Rains", "Rains"], "target_column": "word"}
    assert REWARDS["text"](images=images, prompts=["a", 'b "X"'], **columns) == [1, pytest.approx(0.8)]
    assert REWARDS["text"](images=images, prompts=["a", "b"], match="exact", **columns) == [1, 0]
    assert REWARDS["text"](images=images, prompts=["a", "b"], match="exact", ignore_case=False, **columns) == [0, 0]


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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_recogniser.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "diffusion-grpo\[ocr\]"'):
        REWARDS["text"](images=THREE[:1], prompts=['"A"'])


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
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
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
    with pytest.raises(ValueError, match="engine_kwargs are arguments of PaddleOCR, but the engine is rapidocr"):
        REWARDS["text"](images=[], prompts=[], engine_kwargs={"lang": "ch"})


def test_what_paddleocr_lacks_is_reported_at_the_start(paddle, monkeypatch, tmp_path) -> None:
    rewards = load_rewards({"text": {"engine": "paddleocr"}})
    check_needs(rewards)
    monkeypatch.setenv("PADDLE_PDX_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"models are not at {tmp_path}.*text_detection_model_dir"):
        check_needs(rewards)
    (tmp_path / "official_models").mkdir()
    check_needs(rewards)
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(ValueError, match="package paddle is not installed"):
        check_needs(rewards)
    check_needs(load_rewards({"text": {"engine": "paddleocr", "engine_kwargs": {"engine": "transformers"}}}))
    installed(monkeypatch, "2.10.0")
    with pytest.raises(ValueError, match="PaddleOCR 2.10.0 is installed, but 3 or later is needed"):
        check_needs(load_rewards({"text": {"engine": "paddleocr", "engine_kwargs": {"engine": "transformers"}}}))


def test_a_missing_paddleocr_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "paddleocr", None)
    load_paddle.cache_clear()
    image = draw_word("WORD", "red", random.Random(0))
    with pytest.raises(ImportError, match="pip install paddleocr paddlepaddle"):
        REWARDS["text"](images=[image], prompts=['"WORD"'], engine="paddleocr")
    with pytest.raises(ValueError, match="has engine='easyocr'; expected"):
        load_rewards({"text": {"engine": "easyocr"}})
