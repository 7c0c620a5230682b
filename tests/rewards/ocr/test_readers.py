"""Readers beside rapidocr: models of transformers (tiny, random or taught) and PaddleOCR (a stand-in)."""

import importlib.machinery
import importlib.metadata
import random
import sys
import types

import pytest
import torch
import transformers as tf
from huggingface_hub import constants
from PIL import Image, ImageDraw, ImageFont
from tiny_scorers import IMAGES, got_ocr, trocr

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS, check_needs, load_rewards, score
from diffusion_grpo.rewards.ocr.text import _paddle_reader, similarity


@torch.no_grad()
@pytest.mark.parametrize("make", [trocr, got_ocr], ids=lambda make: make.__name__)
def test_a_model_reads(make, tmp_path) -> None:
    """What it reads is what generate gives for the picture alone."""
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
        assert reward._ends(network) == (2 if make is trocr else [2, 0])
    columns = {"word": [expected[0].swapcase(), *["other"] * (len(images) - 2), None]}
    options = {"model": str(tmp_path), "max_new_tokens": 12, "target_column": "word", "device": "cpu"}
    values = score(
        load_rewards({"text_by_model": options}), images=images, prompts=[""] * len(images), columns=columns
    )
    assert values[0] == 1 and values[-1].isnan()
    if len(images) > 2:
        assert values[1].item() == pytest.approx(similarity(expected[1].upper(), "OTHER"))


def written(word: str, ink: str) -> Image.Image:
    """A word on one line, in black, red or another ink."""
    image = Image.new("RGB", (96, 32), "white")
    ImageDraw.Draw(image).text((6, 6), word, fill=ink, font=ImageFont.load_default(18))
    return image


def test_a_model_that_learned_to_read_reads_rendered_words(tmp_path) -> None:
    """A tiny TrOCR is taught six words in some inks; the reward reads them in an ink that it has not seen."""
    words, inks = ["CAT", "HOUSE", "Tree 7", "river", "MOON", "blue"], ["black", "darkred", "navy"]
    model = trocr(tmp_path, size=(96, 32), width=32)
    processor = tf.AutoProcessor.from_pretrained(tmp_path, backend="pil")
    tokens = [processor.tokenizer(word)["input_ids"] + [2] for word in words]
    longest = max(map(len, tokens))
    labels = torch.tensor([own + [-100] * (longest - len(own)) for own in tokens])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        images = [written(word, inks[step % 3]) for word in words]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        model(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path)

    images = [written(word, "darkgreen") for word in words]
    reward = REWARDS["text_by_model"](str(tmp_path), device="cpu", batch_size=4)
    assert reward.in_batches(reward.read, images) == words
    rewards = load_rewards({"text_by_model": {"model": str(tmp_path), "device": "cpu", "ignore_case": False}})
    right = score(rewards, images=images, prompts=[f'the word "{word}"' for word in words])
    wrong = score(rewards, images=images, prompts=[f'the word "{word}"' for word in [*words[1:], words[0]]])
    assert right.tolist() == [[1.0]] * 6 and wrong.max() <= 0.4


def test_what_counts_as_a_match_is_as_of_text(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(REWARDS["text_by_model"], "load", lambda self: torch.nn.Module())
    monkeypatch.setattr(REWARDS["text_by_model"], "read", lambda self, network, images: ["Old town"] * len(images))

    def value(wanted, **options):
        rewards = load_rewards({"text_by_model": {"device": "cpu", **options}})
        return score(rewards, images=IMAGES[:1], prompts=[f'the words "{wanted}"']).item()

    assert value("OLD TOWN") == 1 and value("OLD TOWNS") == pytest.approx(8 / 9)
    assert value("old", match="contains") == 1 and value("old", match="exact") == 0
    assert value("OldTown", match="exact", ignore_spaces=True) == 1 and value("OldTown", match="exact") == 0
    assert value("old town", match="exact", ignore_case=False) == 0


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
    _paddle_reader.cache_clear()
    yield made
    _paddle_reader.cache_clear()


def test_paddleocr_reads(paddle) -> None:
    pictures = [Image.new("RGB", (96, 32), (10, 20, 30))] * 2
    rewards = load_rewards({"text": {"engine": "paddleocr"}})
    for _ in range(2):
        values = score(rewards, images=pictures, prompts=['"new york"', '"NEW YORT"'])
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


def test_what_paddleocr_lacks_is_said_at_the_start(paddle, monkeypatch, tmp_path) -> None:
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
    _paddle_reader.cache_clear()
    picture = draw_word("WORD", "red", random.Random(0))
    with pytest.raises(ImportError, match="pip install paddleocr paddlepaddle"):
        REWARDS["text"](images=[picture], prompts=['"WORD"'], engine="paddleocr")
    with pytest.raises(ValueError, match="has engine='easyocr'; expected"):
        load_rewards({"text": {"engine": "easyocr"}})
