"""The rewards read real pictures; `score` finds everything that can be wrong with a reward function's answer."""

import asyncio
import io
import json
import math
import random
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from benchmarks.tiny_model.render import draw_word
from diffusion_grpo.rewards import REWARDS, RewardError, get_reward, load_rewards, reward_name, score
from diffusion_grpo.rewards.calls import _warn_unscored
from diffusion_grpo.rewards.ocr.text import find_quoted, score_spelling, similarity
from diffusion_grpo.tiny import COLORS, make_prompt, words

PICTURES = [Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in (0, 100, 255)]
PROMPTS = ["a", "b", "c"]


def clean(count: int, seed: int = 0) -> tuple[list, list, list, list]:
    """Clean renderings of held-out words: pictures, prompts, words, colours."""
    generator = random.Random(seed)
    written = generator.sample(words("test"), count)
    named = [generator.choice(list(COLORS)) for _ in written]
    pictures = [draw_word(word, color, generator) for word, color in zip(written, named, strict=True)]
    return pictures, [make_prompt(*pair) for pair in zip(written, named, strict=True)], written, named


# the five rewards


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_clean_renderings_are_read(name: str) -> None:
    pictures, wanted, _, _ = clean(60)
    scores = REWARDS[name](images=pictures, prompts=wanted)
    assert sum(value == 1 for value in scores) >= 57


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_one_wrong_letter_costs_its_share(name: str) -> None:
    pictures = [draw_word("RUINS", "black", random.Random(0))]
    assert REWARDS[name](images=pictures, prompts=['the word "RAINS" in black']) == [pytest.approx(0.8)]


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_nothing_written_scores_nothing(name: str) -> None:
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    assert REWARDS[name](images=[blank], prompts=['the word "RAINS" in red']) == [0.0]
    assert REWARDS[name](images=[blank], prompts=["rain"]) == [None]


def test_a_picture_reads_the_same_alone_and_in_a_batch_of_many_sizes() -> None:
    pictures, wanted, _, _ = clean(6)
    mixed = [picture.resize((96 * (1 + row % 2), 32)) for row, picture in enumerate(pictures)]
    together = REWARDS["text"](images=mixed, prompts=wanted)
    alone = [REWARDS["text"](images=[picture], prompts=[prompt])[0] for picture, prompt in zip(mixed, wanted)]
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


@pytest.mark.parametrize("name", ["text", "tesseract"])
def test_the_wanted_text_may_stand_in_a_column(name: str) -> None:
    pictures = [draw_word("RAINS", "blue", random.Random(0)), draw_word("RUINS", "black", random.Random(0))]
    columns = {"word": ["Rains", "Rains"], "target_column": "word"}
    assert REWARDS[name](images=pictures, prompts=["a", 'b "X"'], **columns) == [1, pytest.approx(0.8)]
    assert REWARDS[name](images=pictures, prompts=["a", "b"], match="exact", **columns) == [1, 0]
    assert REWARDS[name](images=pictures, prompts=["a", "b"], match="exact", ignore_case=False, **columns) == [0, 0]


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


def test_color_is_high_for_the_named_color_alone() -> None:
    pictures, wanted, written, named = clean(36)
    right = REWARDS["color"](images=pictures, prompts=wanted)
    assert min(right) > 0.9
    for other in COLORS:
        scores = REWARDS["color"](images=pictures, prompts=[make_prompt(word, other) for word in written])
        assert all(value < 0.3 for value, color in zip(scores, named, strict=True) if color != other)


def test_color_survives_blur_and_counts_blank_as_nothing() -> None:
    blurred = draw_word("RAINS", "blue", random.Random(0)).filter(ImageFilter.GaussianBlur(1))
    blank = Image.new("RGB", (96, 32), (250, 250, 250))
    scores = REWARDS["color"](images=[blurred, blank, blank], prompts=["in blue", "in blue", "in mauve"])
    assert scores[0] > 0.3 and scores[1:] == [0.0, None]


def test_a_color_inside_the_quotes_is_not_the_wish() -> None:
    picture = draw_word("GREEN", "red", random.Random(0))
    (value,) = REWARDS["color"](images=[picture], prompts=['the word "GREEN" in red'])
    assert value > 0.9


def test_brightness_is_mean_luma() -> None:
    assert REWARDS["brightness"](images=PICTURES) == pytest.approx([0, 100 / 255, 1])


def test_jpeg_compressibility_prefers_flat_pictures() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    flat = Image.new("RGB", (64, 64), (90, 90, 90))
    rough, smooth = REWARDS["jpeg_compressibility"](images=[noise, flat])
    buffer = io.BytesIO()
    flat.save(buffer, format="JPEG", quality=95)
    assert smooth == pytest.approx(1 - len(buffer.getvalue()) / (3 * 64 * 64))
    assert 0 <= rough < smooth < 1


@pytest.mark.parametrize(
    ("name", "package", "forget"), [("text", "onnxruntime", "_recogniser"), ("tesseract", "tesserocr", "_reader")]
)
def test_a_missing_extra_is_named(name: str, package: str, forget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[f"diffusion_grpo.rewards.ocr.{name}"]
    monkeypatch.setattr(module, forget, getattr(module, forget).__wrapped__)  # without the cache
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "diffusion-grpo\[ocr\]"'):
        REWARDS[name](images=PICTURES[:1], prompts=['"A"'])


# names


def test_get_reward_takes_names_paths_and_callables() -> None:
    assert get_reward("text") is REWARDS["text"]
    assert get_reward("math.sqrt") is math.sqrt
    assert get_reward(len) is len


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("tesseracct", "Did you mean 'tesseract'"),
        ("zzz", "use one of text, .*color, tesseract, brightness, jpeg_compressibility"),
        ("no_such_package.reward", "no_such_package"),
        ("math.no_such_function", "no_such_function"),
        ("math.pi", "cannot be called"),
    ],
)
def test_get_reward_refuses_what_it_does_not_know(wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        get_reward(wrong)


def test_reward_names() -> None:
    class Judge:
        def __call__(self, images: list) -> list:
            return [0.0] * len(images)

    assert reward_name(REWARDS["jpeg_compressibility"]) == "jpeg_compressibility"
    assert reward_name(partial(REWARDS["color"], scale=1)) == "color"
    assert reward_name(Judge()) == "Judge"


# score


def test_score_passes_what_a_function_accepts() -> None:
    seen = {}

    def narrow(images: list, mood: list) -> list[float]:
        seen["narrow"] = (images, mood)
        return [0.0, 0.5, 1.0]

    def wide(**keywords) -> tuple:
        seen["wide"] = keywords
        return (1, None, True)

    rewards = score(
        [narrow, wide], images=PICTURES, prompts=PROMPTS, columns={"mood": [1, 2, 3]}, trainer_state="state"
    )
    assert seen["narrow"] == (PICTURES, [1, 2, 3])
    assert set(seen["wide"]) == {
        "prompts", "completions", "images", "trainer_state", "log_metric", "log_extra", "mood",
    }  # fmt: skip
    assert seen["wide"]["completions"] is seen["wide"]["images"] and seen["wide"]["images"] == PICTURES
    assert seen["wide"]["trainer_state"] == "state"
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, torch.tensor([[0, 1], [0.5, math.nan], [1, 1]]), equal_nan=True)


@pytest.mark.parametrize(
    "values", [torch.tensor([0.0, 1.0, 2.0]), np.array([0, 1, 2]), [torch.tensor(0.0), np.float32(1), 2]]
)
def test_score_takes_arrays_and_scalars(values: object) -> None:
    assert score([lambda images: values], images=PICTURES, prompts=PROMPTS).tolist() == [[0.0], [1.0], [2.0]]


def test_score_takes_videos() -> None:
    videos = [[picture, picture] for picture in PICTURES]
    rewards = score([lambda videos: [len(video) for video in videos]], videos=videos, prompts=PROMPTS)
    assert rewards.tolist() == [[2.0]] * 3
    with pytest.raises(ValueError, match="exactly one"):
        score([], images=PICTURES, videos=videos, prompts=PROMPTS)
    with pytest.raises(ValueError, match="exactly one"):
        score([], prompts=PROMPTS)


def test_async_functions_run_together() -> None:
    """Each waits for the other: one after the other they would never end."""
    events: dict[str, asyncio.Event] = {}

    async def first(images: list) -> list[float]:
        events["first"], events["second"] = asyncio.Event(), asyncio.Event()
        await asyncio.wait_for(events["first"].wait(), 10)
        events["second"].set()
        return [1.0] * len(images)

    async def second(images: list) -> list[float]:
        events["first"].set()
        await asyncio.wait_for(events["second"].wait(), 10)
        return [2.0] * len(images)

    assert score([first, second], images=PICTURES, prompts=PROMPTS).tolist() == [[1.0, 2.0]] * 3


def test_async_functions_work_where_a_loop_runs() -> None:
    async def reward(images: list) -> list[float]:
        return [1.0] * len(images)

    async def notebook_cell() -> torch.Tensor:
        return score([reward], images=PICTURES, prompts=PROMPTS)

    assert asyncio.run(notebook_cell()).tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("answer", "said", "index"),
    [
        ([1.0, 2.0], "returned 2 values, expected 3", 0),
        (1.0, "returned a float, expected a list of 3 numbers", 0),
        (None, "returned a NoneType", 0),
        ([0.0, math.nan, 0.0], "returned nan", 1),
        ([0.0, 0.0, -math.inf], "returned -inf", 2),
        (torch.tensor([0.0, math.inf, 0.0]), "returned inf", 1),
        ([0.0, "good", 0.0], "returned 'good', expected a number", 1),
        ([0.0, [1.0], 0.0], r"returned \[1.0\]", 1),
        ([0.0, 1j, 0.0], "returned 1j", 1),
    ],
)
def test_a_wrong_answer_names_function_prompt_and_sample(
    answer: object, said: str, index: int, tmp_path: Path
) -> None:
    def broken(images: list) -> object:
        return answer

    with pytest.raises(RewardError, match=said) as caught:
        score([REWARDS["brightness"], broken], images=PICTURES, prompts=PROMPTS, failure_dir=tmp_path / "failed")
    saved = tmp_path / "failed" / f"broken-{index}.png"
    assert "'broken'" in str(caught.value)
    assert f"prompt '{PROMPTS[index]}'" in str(caught.value)
    assert str(saved) in str(caught.value)
    assert Image.open(saved).tobytes() == PICTURES[index].tobytes()
    record = json.loads(saved.with_suffix(".json").read_text())
    assert record["reward"] == "broken" and record["prompt"] == PROMPTS[index] and record["index"] == index


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_is_chained(is_async: bool, tmp_path: Path) -> None:
    def failing(images: list) -> list[float]:
        raise KeyError("no such column")

    async def failing_async(images: list) -> list[float]:
        raise KeyError("no such column")

    function = failing_async if is_async else failing
    with pytest.raises(RewardError, match=f"'{function.__name__}' raised KeyError.*no such column") as caught:
        score([function], images=PICTURES, prompts=PROMPTS, failure_dir=tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (tmp_path / f"{function.__name__}-0.png").exists()


def test_a_failed_video_is_saved_as_an_array(tmp_path: Path) -> None:
    videos = [[picture, picture] for picture in PICTURES]
    with pytest.raises(RewardError, match="broken-1.npy"):
        score([partial(_broken)], videos=videos, prompts=PROMPTS, failure_dir=tmp_path)
    assert np.load(tmp_path / "broken-1.npy").shape == (2, 8, 8, 3)


def _broken(videos: list) -> list[float]:
    return [0.0, math.nan, 0.0]


_broken.__name__ = "broken"


def test_nothing_is_saved_without_a_folder() -> None:
    with pytest.raises(RewardError) as caught:
        score([lambda images: [math.nan] * 3], images=PICTURES, prompts=PROMPTS)
    assert "saved" not in str(caught.value)


def test_a_sample_that_no_function_scores_warns_once() -> None:
    _warn_unscored.cache_clear()

    def partly(images: list) -> list:
        return [None, 1.0, None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([partly, lambda images: [1.0, None, 1.0]], images=PICTURES, prompts=PROMPTS)
    with pytest.warns(UserWarning, match="None from every reward"):
        rewards = score([partly, partly], images=PICTURES, prompts=PROMPTS)
    assert rewards.isnan().all(dim=1).tolist() == [True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([partly, partly], images=PICTURES, prompts=PROMPTS)
