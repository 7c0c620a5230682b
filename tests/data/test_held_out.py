"""Whether evaluation prompts are trained on, and what they are called."""

import logging

import pytest
from datasets import Dataset
from PIL import Image
from tiny_runs import PROMPTS, trainer_for

from diffusion_grpo.data.held_out import count_prompts, describe_prompts, name_prompts, warn_of_trained_prompts


def dataset(*prompts):
    return Dataset.from_dict({"prompt": list(prompts)})


@pytest.mark.parametrize(
    ("evaluation", "shared", "name", "words"),
    [
        (dataset("c", "d"), 0, "held-out", "2 held-out prompts, none of which is trained on"),
        (dataset("a ", "d"), 1, "evaluation", "2 evaluation prompts, 1 of which are trained on too"),
        ({"x": dataset("a"), "y": dataset("b", "b")}, 3, "evaluation", "all of which are trained on too"),
        (Dataset.from_dict({"embeds": [[1.0]]}), None, "evaluation", "1 evaluation prompt"),
    ],
)
def test_prompts_are_compared(evaluation, shared, name, words, caplog):
    counts = count_prompts(dataset("a", "b"), evaluation)
    assert counts["eval_in_train"] == shared and counts["train"] == 2
    assert name_prompts(counts) == name and words in describe_prompts(counts)
    with caplog.at_level(logging.WARNING):
        warn_of_trained_prompts(counts)
    assert bool(caplog.records) == bool(shared)


def test_formats_and_orders_do_not_matter():
    train = dataset("a", "b ", "c").shuffle(seed=0).with_format("arrow")
    counts = count_prompts(train, dataset("b", "c", "d").select([2, 0, 0]).with_format("numpy"))
    assert counts == {"train": 3, "eval": 3, "eval_in_train": 2}


def test_a_trainer_says_so_at_the_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(trainer_for.__globals__, "PROMPTS", [*PROMPTS, "held out"])
    trainer = trainer_for(tmp_path)
    assert trainer.run["prompts"] == {"train": 5, "eval": 2, "eval_in_train": 1}
    assert "1 of the 2 prompts of eval_dataset are in train_dataset too" in caplog.text


def test_a_trainer_does_not_compare_instructions_for_images(tmp_path):
    images = {"image": [Image.new("RGB", (16, 16), "red")] * 4}
    held_out = Dataset.from_dict({"prompt": PROMPTS} | images)
    strength = {"pipeline_kwargs": {"strength": 0.8}}
    trainer = trainer_for(tmp_path, "sd15_img2img", columns=images, eval_dataset=held_out, **strength)
    assert trainer.run["prompts"] == {"train": 4, "eval": 4, "eval_in_train": None}


def test_the_same_instruction_for_another_image_is_not_compared():
    train, evaluation = (Dataset.from_dict({"prompt": ["brighter"], "image": [name]}) for name in ("a.png", "b.png"))
    assert count_prompts(train, evaluation)["eval_in_train"] == 1
    assert count_prompts(train, evaluation, {"prompt", "image"})["eval_in_train"] is None
    assert count_prompts(train, evaluation, {"prompt", "guidance_scale"})["eval_in_train"] == 1
