"""Call rewards with what they accept, and find everything that can be wrong with their answers."""

import asyncio
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from fresh import load_again
from PIL import Image
from plain_images import FOUR, FOUR_PROMPTS, THREE, THREE_PROMPTS, make_video

from diffusion_grpo.rewards import (
    REWARDS,
    RewardError,
    groupwise,
    load_rewards,
    score,
    takes_tensors,
)


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


@pytest.mark.parametrize(
    "values", [torch.tensor([0.0, 1.0, 2.0]), np.array([0, 1, 2]), [torch.tensor(0.0), np.float32(1), 2]]
)
def test_score_takes_arrays_and_scalars(values: object) -> None:
    assert score([lambda images: values], images=THREE, prompts=THREE_PROMPTS).tolist() == [[0.0], [1.0], [2.0]]


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


def test_async_functions_keep_their_event_loop() -> None:
    """So that a client or a semaphore at module level serves the whole run."""
    limit, loops = asyncio.Semaphore(1), []

    async def reward(images: list) -> list[float]:
        loops.append(asyncio.get_running_loop())
        async with limit:  # belongs to the loop in which somebody first waits for it
            await asyncio.sleep(0.01)
        return [1.0] * len(images)

    for _ in range(2):
        assert score([reward, reward], images=THREE, prompts=THREE_PROMPTS).tolist() == [[1.0, 1.0]] * 3
    assert len(loops) == 4 and len(set(loops)) == 1


def test_an_async_function_that_exits_ends_the_run_and_not_the_loop() -> None:
    async def leave(images: list) -> list[float]:
        raise SystemExit(3)

    async def reward(images: list) -> list[float]:
        return [1.0] * len(images)

    with pytest.raises(SystemExit):
        score([leave], images=THREE, prompts=THREE_PROMPTS)
    assert score([reward], images=THREE, prompts=THREE_PROMPTS).tolist() == [[1.0]] * 3


def test_async_functions_work_where_a_loop_runs() -> None:
    async def reward(images: list) -> list[float]:
        return [1.0] * len(images)

    async def notebook_cell() -> torch.Tensor:
        return score([reward], images=THREE, prompts=THREE_PROMPTS)

    assert asyncio.run(notebook_cell()).tolist() == [[1.0]] * 3


def test_a_sample_that_no_function_scores_warns_once() -> None:
    score = load_again("diffusion_grpo.rewards.calls").score  # warns once per process

    def partly(images: list) -> list:
        return [None, 1.0, None]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([partly, lambda images: [1.0, None, 1.0]], images=THREE, prompts=THREE_PROMPTS)
    with pytest.warns(UserWarning, match="None from every reward"):
        rewards = score([partly, partly], images=THREE, prompts=THREE_PROMPTS)
    assert rewards.isnan().all(dim=1).tolist() == [True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score([partly, partly], images=THREE, prompts=THREE_PROMPTS)


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


def test_async_groups_are_awaited_together_without_gradients() -> None:
    @groupwise
    async def first(images):
        assert not torch.is_grad_enabled()
        return [float(len(images))] * len(images)

    assert score([first], images=FOUR, prompts=FOUR_PROMPTS, groups=[0, 0, 0, 1]).tolist() == [[3], [3], [3], [1]]


def test_no_gradients() -> None:
    def grad(images):
        return [float(torch.is_grad_enabled())] * len(images)

    assert score([grad], images=FOUR, prompts=FOUR_PROMPTS).sum() == 0


def test_a_precision_that_was_set_by_its_newer_name_is_left_alone(monkeypatch) -> None:
    """`tf32: true` sets it so, and torch then refuses to read it by its older name."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    rewards = score([lambda images: [1.0] * len(images)], images=THREE, prompts=THREE_PROMPTS)
    assert rewards.tolist() == [[1.0]] * 3
    assert torch.backends.fp32_precision == "tf32"


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


def test_tensors_of_several_sizes_are_refused() -> None:
    @takes_tensors
    def any_reward(images):
        return [0.0] * len(images)

    with pytest.raises(RewardError, match=r"\(1, 8, 8\), \(1, 9, 8\); give height and width"):
        score([any_reward], images=[FOUR[0], Image.new("RGB", (9, 8))], prompts=["a", "b"])


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


def test_a_video_is_scored_alike_whatever_else_is_in_the_batch() -> None:
    short, long = make_video(0, 51), make_video(*range(0, 250, 10))
    (reward,) = load_rewards({"brightness": {"frames": 5}})
    alone = [score([reward], videos=[one], prompts=["a"]).item() for one in (short, long)]
    assert score([reward], videos=[short, long], prompts=["a", "b"])[:, 0].tolist() == alone


def test_arrays_become_images() -> None:
    seen = []

    def keep(videos):
        seen.append(videos)
        return [0.0] * len(videos)

    array = np.linspace(0, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    score([keep, partial(keep)], videos=[array, (255 * array).round().astype(np.uint8)], prompts=["a", "b"])
    assert all(isinstance(frame, Image.Image) for samples in seen for video in samples for frame in video)
    assert len({video[1].tobytes() for samples in seen for video in samples}) == 1


def test_a_reward_of_videos_refuses_images() -> None:
    with pytest.raises(RewardError, match="'flicker' asks for videos, but the samples are images"):
        score([REWARDS["flicker"]], images=FOUR, prompts=FOUR_PROMPTS)


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
