"""Find everything that can be wrong with a reward's answer, and save its sample."""

import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plain_images import FOUR, FOUR_PROMPTS, THREE, THREE_PROMPTS

from diffusion_grpo.media.files import read_video
from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    RewardError,
    groupwise,
    score,
)


@pytest.mark.parametrize(
    ("answer", "message", "index"),
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
        ([0.0, 10**400, 0.0], "returned 10+, expected a finite float32 number", 1),
    ],
)
def test_a_wrong_answer_names_function_prompt_and_sample(
    answer: object, message: str, index: int, tmp_path: Path
) -> None:
    def broken(images: list) -> object:
        return answer

    with pytest.raises(RewardError, match=message) as caught:
        score([REWARDS["brightness"], broken], images=THREE, prompts=THREE_PROMPTS, failure_dir=tmp_path / "failed")
    saved = tmp_path / "failed" / f"broken-{index}.png"
    assert "'broken'" in str(caught.value)
    assert f"prompt '{THREE_PROMPTS[index]}'" in str(caught.value)
    assert str(saved) in str(caught.value)
    assert Image.open(saved).tobytes() == THREE[index].tobytes()
    record = json.loads(saved.with_suffix(".json").read_text())
    assert record["reward"] == "broken" and record["prompt"] == THREE_PROMPTS[index] and record["index"] == index


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[False, True, True], np.array([0.5, 1.0, 2.0], np.float16), np.arange(3)])
def test_numbers_of_numpy_are_numbers(values: object) -> None:
    found = score([lambda images: list(np.array(values))], images=THREE, prompts=THREE_PROMPTS)
    assert found[:, 0].tolist() == np.array(values).tolist()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_is_chained(is_async: bool, tmp_path: Path) -> None:
    def failing(images: list) -> list[float]:
        raise KeyError("no such column")

    async def failing_async(images: list) -> list[float]:
        raise KeyError("no such column")

    function = failing_async if is_async else failing
    with pytest.raises(RewardError, match=f"'{function.__name__}' raised KeyError.*no such column") as caught:
        score([function], images=THREE, prompts=THREE_PROMPTS, failure_dir=tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
    assert (tmp_path / f"{function.__name__}-0.png").exists()


def test_a_failed_video_is_saved_to_be_watched(tmp_path: Path) -> None:
    videos = [[image.resize((16, 16))] * 2 for image in THREE]
    with pytest.raises(RewardError, match="broken-1.mp4"):
        score([partial(_broken)], videos=videos, prompts=THREE_PROMPTS, failure_dir=tmp_path)
    assert [frame.size for frame in read_video(tmp_path / "broken-1.mp4")] == [(16, 16)] * 2


def _broken(videos: list) -> list[float]:
    return [0.0, math.nan, 0.0]


_broken.__name__ = "broken"


def test_nothing_is_saved_without_a_folder() -> None:
    with pytest.raises(RewardError) as caught:
        score([lambda images: [math.nan] * 3], images=THREE, prompts=THREE_PROMPTS)
    assert "saved" not in str(caught.value)


def test_a_groupwise_answer_is_checked_by_group(tmp_path) -> None:
    @groupwise
    def broken(images, prompts):
        return [math.nan if prompt == "b" else 0.0 for prompt in prompts]

    with pytest.raises(RewardError, match="returned nan.*prompt 'b'.*broken-1.png"):
        score([broken], images=FOUR, prompts=FOUR_PROMPTS, failure_dir=tmp_path)


def test_extra_columns_are_put_in_place() -> None:
    @groupwise
    def grouped(images, prompts, log_extra):
        log_extra("heard", [prompt.upper() for prompt in prompts])
        return [0.0] * len(images)

    def partly(images, log_extra):
        log_extra("place", list(range(len(images))))
        return [0.0] * len(images)

    extras = {}
    score([grouped, partly], images=FOUR, prompts=FOUR_PROMPTS, log_extra=extras.__setitem__)
    assert extras == {"heard": ["A", "B", "A", "B"], "place": [0, 1, 2, 3]}

    def tensors(images, log_extra):
        log_extra("sharp", torch.tensor([0.5, 1.0, 2.0, 4.0]))
        log_extra("dark", [torch.tensor(1.5), np.float32(0.5)] * 2)
        return [0.0] * len(images)

    score([tensors], images=FOUR, prompts=FOUR_PROMPTS, log_extra=extras.__setitem__)
    assert extras["sharp"] == [0.5, 1.0, 2.0, 4.0] and extras["dark"] == [1.5, 0.5] * 2
    assert {type(value) for value in extras["dark"]} == {float}

    def unfit(images, log_extra):
        log_extra("objects", [object()] * len(images))
        return [0.0] * len(images)

    with pytest.raises(RewardError, match="'unfit'.*log_extra.'objects'. got values that a table cannot hold"):
        score([unfit], images=FOUR, prompts=FOUR_PROMPTS, log_extra=extras.__setitem__)

    for name in ("seed", "dataset", "advantage/tensors", "second"):

        def replaces(images, log_extra, name=name):
            log_extra(name, [0] * len(images))
            return [0.0] * len(images)

        second = Reward(REWARDS["brightness"], "second")
        with pytest.raises(RewardError, match=f"'replaces'.*log_extra.'{name}'. has the name of another column"):
            score([replaces, second], images=FOUR, prompts=FOUR_PROMPTS, log_extra=extras.__setitem__)

    def wrong(images, log_extra):
        log_extra("short", [1])
        return [0.0] * len(images)

    with pytest.raises(RewardError, match="1 values for 4 samples"):
        score([wrong], images=FOUR, prompts=FOUR_PROMPTS, log_extra=extras.__setitem__)


def test_a_logged_number_may_not_have_the_name_of_a_metric_of_the_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## What is shown")[0]
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    names = {name for name in re.findall("`([^`]+)`", cells) if not name.startswith(("_", "/", "train_"))}
    names -= {"vlm_judge/unread", "hpsv3/sigma"}  # which rewards log
    assert {"reward", "loss", "kl", "ratio/max", "eval_reward"} < names
    for name in [name.format(name="mine", dataset="mine") for name in sorted(names)]:

        def logs(images, log_metric, name=name):
            log_metric(name, 1.0)
            return [0.0] * len(images)

        with pytest.raises(RewardError, match=re.escape(f"log_metric({name!r}) has the name of a metric of the run")):
            score([logs], images=FOUR, prompts=FOUR_PROMPTS)
