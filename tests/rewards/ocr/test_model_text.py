"""The reward `text_by_model`, with tiny models of transformers, random or taught."""

import pytest
import torch
import transformers as tf
from PIL import Image, ImageDraw, ImageFont
from tiny_scorers import IMAGES, got_ocr, trocr

from diffusion_grpo.rewards import REWARDS, load_rewards, score
from diffusion_grpo.rewards.ocr.text import similarity


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
