"""Call rewards with what they accept, and check what they return."""

import asyncio
import json
import math
import re
import signal
import threading
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh import load_again
from PIL import Image, ImageDraw
from plain_images import FOUR, FOUR_PROMPTS, THREE, THREE_PROMPTS, flat, make_video

from diffusion_grpo.media.samples import VideoWithSound
from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    RewardError,
    groupwise,
    load_rewards,
    score,
    takes_latents,
    takes_tensors,
)
from diffusion_grpo.rollout.score import embed_samples


def test_score_passes_what_a_function_accepts() -> None:
    seen = {}

    def narrow(images: list, mood: list) -> list[float]:
        seen["narrow"] = (images, mood)
        return [0.0, 0.5, 1.0]

    def wide(**keywords) -> tuple:
        seen["wide"] = keywords
        return (1, None, True)

    rewards = score(
        [narrow, wide], images=THREE, prompts=THREE_PROMPTS, columns={"mood": [1, 2, 3]}, trainer_state="state"
    )
    assert seen["narrow"] == (THREE, [1, 2, 3])
    assert set(seen["wide"]) == {
        "prompts", "completions", "images", "trainer_state", "log_metric", "log_extra", "mood",
    }  # fmt: skip
    assert seen["wide"]["completions"] is seen["wide"]["images"] and seen["wide"]["images"] == THREE
    assert seen["wide"]["trainer_state"] == "state"
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, torch.tensor([[0, 1], [0.5, math.nan], [1, 1]]), equal_nan=True)


def test_score_takes_videos() -> None:
    videos = [[image, image] for image in THREE]
    rewards = score([lambda videos: [len(video) for video in videos]], videos=videos, prompts=THREE_PROMPTS)
    assert rewards.tolist() == [[2.0]] * 3
    with pytest.raises(ValueError, match="exactly one"):
        score([], images=THREE, videos=videos, prompts=THREE_PROMPTS)
    with pytest.raises(ValueError, match="exactly one"):
        score([], prompts=THREE_PROMPTS)


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

    assert score([first, second], images=THREE, prompts=THREE_PROMPTS).tolist() == [[1.0, 2.0]] * 3


def test_an_async_function_that_exits_ends_the_run_and_not_the_loop() -> None:
    async def leave(images):
        raise SystemExit(3)

    async def reward(images):
        return [1.0] * len(images)

    async def notebook_cell():  # where a loop runs
        return score([reward], images=THREE, prompts=THREE_PROMPTS)

    with pytest.raises(SystemExit):
        score([leave], images=THREE, prompts=THREE_PROMPTS)
    assert asyncio.run(notebook_cell()).tolist() == [[1.0]] * 3


def test_ctrl_c_ends_the_wait_for_an_async_function_and_cancels_it() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    is_cancelled = threading.Event()

    async def hangs(images):
        await asyncio.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        score([hangs], images=THREE, prompts=THREE_PROMPTS)
    assert is_cancelled.wait(10)


def test_a_sample_that_no_function_scores_warns_once() -> None:
    score = load_again("diffusion_grpo.rewards.call").score  # warns once per process

    def partly(images: list) -> list:
        return [None, 1.0, None]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        score([partly, lambda images: [1.0, None, 1.0]], images=THREE, prompts=THREE_PROMPTS)
        assert not told
        for _ in range(2):
            rewards = score([partly, partly], images=THREE, prompts=THREE_PROMPTS)
    assert rewards.isnan().all(dim=1).tolist() == [True, False, True]
    assert len(told) == 1 and "None from every reward" in str(told[0].message)


def test_a_groupwise_reward_sees_one_group_at_a_time() -> None:
    seen = []

    @groupwise
    def rank(images, prompts, mood):
        seen.append((prompts, mood))
        shades = [image.getpixel((0, 0))[0] for image in images]
        return [sum(shade > other for other in shades) for shade in shades]

    table = score([rank], images=FOUR, prompts=FOUR_PROMPTS, columns={"mood": [1, 2, 3, 4]})
    assert seen == [(["a", "a"], [1, 3]), (["b", "b"], [2, 4])]
    assert table.tolist() == [[0], [0], [1], [1]]
    seen.clear()
    table = score([rank], images=FOUR, prompts=FOUR_PROMPTS, columns={"mood": [1, 2, 3, 4]}, groups=[7, 7, 7, 5])
    assert [len(prompts) for prompts, _ in seen] == [3, 1] and table[:, 0].tolist() == [0, 1, 2, 0]


def test_tensors_are_in_range() -> None:
    seen = []

    @takes_tensors
    def first(images, completions):
        assert images is completions
        seen.append(images)
        return images.mean((1, 2, 3, 4))

    @takes_tensors
    def second(videos):
        seen.append(videos)
        return videos[:, 0, 0, 0, 0]

    table = score([first, partial(second)], images=FOUR, prompts=FOUR_PROMPTS)
    torch.testing.assert_close(table, torch.tensor([[0, 0], [0.2, 0.2], [0.4, 0.4], [1, 1.0]]))
    assert torch.equal(seen[0], seen[1]) and seen[0].shape == (4, 1, 3, 8, 8) and seen[0].dtype == torch.float32
    videos = [[image] * 3 for image in FOUR]
    torch.testing.assert_close(score([first, second], videos=videos, prompts=FOUR_PROMPTS), table)
    assert seen[2].shape == (4, 3, 3, 8, 8)


def test_tensors_keep_pixels_and_channels_in_place() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)

    @takes_tensors
    def compare(images):
        np.testing.assert_allclose(images[0, 0].permute(1, 2, 0).numpy(), pixels / 255, atol=1e-7)
        return [1.0]

    assert score([compare], images=[Image.fromarray(pixels)], prompts=["a"]).item() == 1


def test_a_reward_of_images_gets_the_mean_over_frames() -> None:
    videos = [make_video(0, 51, 102), make_video(255, 255, 255)]
    for name, wanted in (("all", 0.2), (8, 0.2), (1, 0.0), (2, 0.2)):
        table = score(load_rewards({"brightness": {"frames": name}}), videos=videos, prompts=["a", "b"])
        assert table[:, 0].tolist() == pytest.approx([wanted, 1])


def test_frames_are_evenly_spaced_and_columns_go_with_them() -> None:
    seen = []

    def look(images, prompts, mood, fps):
        seen.append(([image.getpixel((0, 0))[0] for image in images], prompts, mood, fps))
        return [None if shade == 0 else float(shade) for shade in seen[-1][0]]

    videos = [make_video(*range(9)), make_video(*range(10, 19))]
    (reward,) = load_rewards({look: {"frames": 3}})
    table = score([reward], videos=videos, prompts=["a", "b"], columns={"mood": [1, 2]}, fps=8)
    assert seen == [([0, 4, 8, 10, 14, 18], ["a"] * 3 + ["b"] * 3, [1, 1, 1, 2, 2, 2], 8)]
    assert table[:, 0].tolist() == [6, 14]  # the frame without a value has no say


def test_what_is_not_an_image_reaches_the_reward_unchanged() -> None:
    """Sound, and a prior's embeddings."""
    seen = []

    def spy(completions):
        seen.append(completions)
        return [0.0] * len(completions)

    for samples in ([np.zeros((2, 480))] * 2, [torch.zeros(16, 24)] * 2, [torch.zeros(4, 8, 24)] * 2):
        score([spy], images=samples, prompts=["a", "b"])
        for own, sample in zip(seen[-1], samples, strict=True):
            assert type(own) is type(sample) and own.dtype == sample.dtype and (own == sample).all()
    grey = np.full((8, 8, 1), 0.5, dtype=np.float32)
    score([spy], images=[grey, grey], prompts=["a", "b"])
    assert seen[-1][0].size == (8, 8) and seen[-1][0].mode == "L"


def test_a_groupwise_reward_of_images_compares_frame_with_frame() -> None:
    @groupwise
    def best(images):
        shades = [image.getpixel((0, 0))[0] for image in images]
        return [float(shade == max(shades)) for shade in shades]

    videos = [make_video(0, 200), make_video(100, 100), make_video(50, 250)]
    (reward,) = load_rewards({best: {"frames": "all"}})
    assert score([reward], videos=videos, prompts=["a"] * 3)[:, 0].tolist() == [0, 0.5, 0.5]


def test_a_reward_without_memory_says_what_to_set():
    def hungry(images):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB")

    with pytest.raises(RewardError, match="'hungry' ran out of memory .*15.00 GiB.*overlap_rewards"):
        score([hungry], images=[Image.new("RGB", (4, 4))], prompts=["a"])


@pytest.mark.parametrize(
    ("answer", "message", "index"),
    [
        ([1.0, 2.0], "returned 2 values, expected 3", 0),
        (1.0, "returned a float, expected a list of 3 numbers", 0),
        ([0.0, math.nan, 0.0], "returned nan", 1),
        (torch.tensor([0.0, math.inf, 0.0]), "returned inf", 1),
        ([0.0, "good", 0.0], "returned 'good', expected a number", 1),
        ([0.0, 1j, 0.0], "returned 1j", 1),
        ([0.0, 10**400, 0.0], "returned 10+, expected a finite float32 number", 1),
    ],
)
def test_a_wrong_answer_names_function_prompt_and_sample(answer, message, index, tmp_path) -> None:
    def broken(images):
        return answer

    with pytest.raises(RewardError, match=message) as caught:
        score([REWARDS["brightness"], broken], images=THREE, prompts=THREE_PROMPTS, failure_dir=tmp_path / "failed")
    saved = tmp_path / "failed" / f"broken-{index}.png"
    assert all(part in str(caught.value) for part in ("'broken'", f"prompt '{THREE_PROMPTS[index]}'", str(saved)))
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
    def failing(images):
        raise KeyError("no such column")

    async def failing_async(images):
        failing(images)

    function = failing_async if is_async else failing
    with pytest.raises(RewardError, match=f"'{function.__name__}' raised KeyError.*no such column") as caught:
        score([function], images=THREE, prompts=THREE_PROMPTS, failure_dir=tmp_path)
    assert isinstance(caught.value.__cause__, KeyError) and (tmp_path / f"{function.__name__}-0.png").exists()


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


@pytest.mark.parametrize(
    ("name", "values"),
    [("objects", [object()] * 4), ("short", [1])]
    + [(name, [0] * 4) for name in ("seed", "dataset", "advantage/tensors", "second")],
)
def test_extra_columns_that_no_table_could_hold_are_refused(name, values) -> None:
    def unfit(images, log_extra):
        log_extra(name, values)
        return [0.0] * len(images)

    second = Reward(REWARDS["brightness"], "second")
    with pytest.raises(RewardError, match=f"'unfit'.*log_extra.'{name}'"):
        score([unfit, second], images=FOUR, prompts=FOUR_PROMPTS, log_extra=print)


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


SOUND = np.full((2, 6), 0.25, dtype=np.float32)
SAMPLES = {
    "images": lambda: [flat(10), flat(20)],
    "videos": lambda: [VideoWithSound([flat(10), flat(30)], SOUND.copy(), 24) for _ in range(2)],
    "sounds": lambda: [SOUND.copy(), SOUND.copy()],
    "tensors": lambda: [torch.full((4, 6), 0.5), torch.full((4, 6), 0.25)],
}


def seen(value) -> object:
    """What a sample or column comes to, to compare."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, list):
        return [seen(item) for item in [*value, *(vars(value).values() if hasattr(value, "sound") else ())]]
    if isinstance(value, dict):
        return {name: seen(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def spoil(value) -> None:
    """Write to all that can be written to."""
    if isinstance(value, Image.Image):
        ImageDraw.Draw(value).rectangle((0, 0, *value.size), fill="white")
        value.info["spoilt"] = True
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = True
    elif isinstance(value, list):
        for item in [*value, *vars(value).values()] if hasattr(value, "sound") else value:
            spoil(item)
        value.reverse()
        value.append("spoilt")
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        value[:] = 9


def vandal(completions, prompts, **columns):
    count = len(prompts)
    for value in (completions, prompts, *(value for value in columns.values() if isinstance(value, list))):
        spoil(value)
    return [0.0] * count


async def slow_vandal(completions, prompts, **columns):
    await asyncio.sleep(0)
    return vandal(completions, prompts, **columns)


@pytest.mark.parametrize("first", [vandal, slow_vandal])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_reward_that_writes_to_what_it_gets_changes_it_for_nobody_else(kind, first) -> None:
    prompts, handed = ["a", "b"], SAMPLES[kind]()
    columns = {"meta": [{"count": 1, "more": [1]}, {"count": 2}], "target": [flat(1)] * 2}
    before, found = (seen(SAMPLES[kind]()), seen(columns), list(prompts)), []

    async def look(completions, prompts, meta, target):
        await asyncio.sleep(0.01)
        found.append((seen(completions), seen({"meta": meta, "target": target}), list(prompts)))
        return [0.0] * len(prompts)

    named = "videos" if kind == "videos" else "images"
    score([first, look, vandal], **{named: handed}, prompts=prompts, columns=columns)
    assert found == [before] and (seen(handed), seen(columns), prompts) == before
    assert all("spoilt" not in image.info for image in columns["target"])


def test_frames_tensors_and_latents_are_a_reward_s_own() -> None:
    found = []

    def draw(images):
        spoil(images)
        return [0.0] * (len(images) - 1)

    def shades(images):
        return [image.getpixel((0, 0))[0] for image in images]

    @takes_tensors
    def write(videos):
        found.append(videos.mean().item())
        videos.zero_()
        return [0.0] * len(videos)

    @takes_latents
    def overwrite(latents):
        found.append(latents.mean().item())
        latents.zero_()
        return [0.0] * len(latents)

    videos, latents = [[flat(51)] * 3, [flat(102)] * 3], [torch.ones(2, 2), torch.ones(2, 2)]
    given = {"videos": videos, "latents": latents, "prompts": ["a", "b"]}
    table = score([draw, shades, write, write, overwrite, overwrite], **given)
    assert table[:, 1].tolist() == [51, 102] and found == pytest.approx([0.3, 0.3, 1, 1])
    assert all((latent == 1).all() for latent in latents)


def test_what_embeds_for_the_diversity_gets_copies() -> None:
    class Embedder:
        def embed(self, images):
            for image in images:
                spoil(image)
            return torch.zeros(len(images), 2)

    samples = [flat(3)]
    embed_samples(type("Reward", (), {"function": Embedder()}), samples)
    assert samples[0].getpixel((0, 0)) == (3, 3, 3)


def test_half_precision_that_a_scorer_sets_ends_with_its_call() -> None:
    def in_half(images):
        torch.set_default_dtype(torch.float16)
        return [0.0] * len(images)

    score([in_half], prompts=["a"], images=[flat(3)])
    assert torch.get_default_dtype() == torch.float32
