"""What client and server send each other, and requests with limits."""

import json

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from diffusion_grpo.media.samples import VideoWithSound
from diffusion_grpo.rewards import RemoteReward, RewardError, load_rewards, score, takes_latents
from diffusion_grpo.rewards.contract import is_marked
from diffusion_grpo.rewards.server.wire import (
    FailedRequest,
    WireError,
    read_object,
    read_request,
    seconds_to_wait,
    write_request,
)

IMAGES = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in (0, 25)]


@pytest.mark.parametrize("body", ["png", "mp4", "mp4_lossy", "safetensors"])
def test_bodies_of_every_kind(body, serve) -> None:
    """The same pixels but for lossy videos; sizes may be odd."""
    seen = []

    def look(completions, prompts, goal, fps=None, sampling_rate=None):
        seen.append((completions, prompts, goal, fps))
        return [1.0] * len(completions)

    remote = RemoteReward(serve(look), columns=["goal"], body=body, batch_size=2)
    draw = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(15), np.arange(21))[..., None] * [3, 5, 7] % 250
    frames = [Image.fromarray((smooth + draw.integers(0, 5, smooth.shape)).astype(np.uint8)) for _ in range(5)]
    columns = {"goal": [frames[0], frames[1]]}
    score([remote], images=frames[:2], prompts=["a", "b"], columns=columns)
    images, prompts, goals, _ = seen.pop()
    assert prompts == ["a", "b"] and [one.tobytes() for one in images + goals] == 2 * [f.tobytes() for f in frames[:2]]
    sound = draw.uniform(-1, 1, (2, 100)).astype(np.float32)
    videos = [frames[:2], VideoWithSound(frames, sound, 16000)]
    score([remote], videos=videos, prompts=["a", "b"], columns=columns, fps=6)
    (short, long), _, _, fps = seen.pop()
    assert fps == 6 and len(short) == 2 and len(long) == 5
    errors = [np.abs(np.asarray(a, int) - np.asarray(b, int)) for a, b in zip(short + long, videos[0] + videos[1])]
    assert (np.max(errors) == 0) == (body != "mp4_lossy") and np.mean(errors) < 8
    assert np.array_equal(long.sound, sound) and long.sampling_rate == 16000 and not hasattr(short, "sound")


def test_sounds_and_tensors_go_as_safetensors(serve) -> None:
    def loudness(completions, sampling_rate):
        assert sampling_rate == 8000 and all(isinstance(one, torch.Tensor) for one in completions)
        return [one.float().abs().mean().item() for one in completions]

    url = serve(loudness)
    for sounds in (
        [np.full((2, 30), 0.25, np.float32), np.full((1, 9), -0.5)],
        [torch.full((2, 3), 0.25).bfloat16(), torch.full((7, 3), 0.5).T],
    ):
        options = {"images": sounds, "prompts": ["a", "b"], "sampling_rate": 8000}
        assert score([RemoteReward(url, body="safetensors")], **options)[:, 0].tolist() == [0.25, 0.5]
        with pytest.raises(RewardError, match="neither an image nor a video; send it as safetensors"):
            score([RemoteReward(url)], **options)


def test_latents_go_to_a_reward_that_takes_them(serve) -> None:
    @takes_latents
    def first(latents, prompts):
        assert latents.dtype == torch.float32 and latents.shape == (2, 4, 3, 3) and len(prompts) == 2
        return latents[:, 0, 0, 0].tolist()

    latents = list(torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    (reward,) = load_rewards(
        {"remote": {"url": serve(first), "body": "safetensors", "latents": True, "batch_size": 2}}
    )
    values = score([reward], latents=latents, prompts=list("abcdef"))
    assert values[:, 0].tolist() == [latent[0, 0, 0].item() for latent in latents]
    assert is_marked(reward.function, "takes_latents") and not is_marked(RemoteReward("http://a"), "takes_latents")
    with pytest.raises(ValueError, match="add `body: safetensors`"):
        RemoteReward("http://a", latents=True)


def test_frames_of_videos_for_a_reward_of_images(serve) -> None:
    url = serve({"brightness": {"frames": "all"}})
    video = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in (255, 102, 153, 51, 0)]
    for count, expected in ((1, 1.0), (3, (1 + 0.6 + 0) / 3), (None, 2.2 / 5)):
        remote = RemoteReward(url, num_frames=count)
        assert score([remote], videos=[video], prompts=["a"], fps=2).item() == pytest.approx(expected)


VIDEO = json.loads(write_request([IMAGES], ["a"], {}, None, 1))["samples"][0]
MP4 = json.loads(write_request([IMAGES], ["a"], {}, None, 1, "mp4"))["samples"][0]["mp4"]


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": []},
        {"samples": ["AAAA", "AAAA"]},
        {"samples": [VIDEO, VIDEO[0]]},
        {"samples": [[], []]},
        {"samples": [{"mp4": f"*{MP4}"}, {"mp4": MP4}]},
        {"prompts": ["a"]},
        {"prompts": "ab"},
        {"columns": {"a": [1]}},
        {"columns": {"a": [{"png": "AAAA"}, 1]}},
        {"groups": [0]},
        {"are_latents": True},
        {"samples": [VIDEO] * 2, "sounds": [{"channels": 1, "rate": float("inf"), "float32": "AAAAAA=="}, None]},
        {"samples": [VIDEO] * 2, "sounds": [{"channels": 1, "rate": 1, "float32": "A*AAAAA=="}, None]},
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_that_are_not_of_the_form(changes) -> None:
    content = json.loads(write_request(IMAGES[:2], ["a", "b"], {}, None, None))
    read_request(json.dumps(content).encode())
    with pytest.raises(WireError):
        read_request(json.dumps({**content, **changes}).encode())
    with pytest.raises(WireError):
        read_request(b"\x80\x04K\x01.")  # a pickle


def test_many_pixels_in_few_bytes_are_refused_before_they_are_decoded() -> None:
    body = write_request([Image.new("RGB", (3000, 3000))], ["a"], {}, None, None)
    assert len(body) < 500_000
    with pytest.raises(WireError, match="more pixels than this server accepts") as caught:
        read_request(body, max_pixels=8_999_999)
    assert caught.value.is_too_large
    assert read_request(body, max_pixels=9_000_000)["samples"][0].size == (3000, 3000)


def test_many_frames_in_few_bytes_are_refused() -> None:
    """H.264 of a still and plain video is next to nothing; so is one huge frame."""
    video = [Image.new("RGB", (64, 64))] * 300
    for kind in ("mp4", "mp4_lossy", "safetensors"):
        body = write_request([video], ["a"], {}, None, 8, kind)
        options = {"is_safetensors": kind == "safetensors"}
        assert kind == "safetensors" or len(body) < 30_000
        with pytest.raises(WireError, match="more pixels than this server accepts") as caught:
            read_request(body, max_pixels=64 * 64 * 299, **options)
        assert caught.value.is_too_large
        assert len(read_request(body, max_pixels=64 * 64 * 300, **options)["samples"][0]) == 300
    body = write_request([[Image.new("RGB", (3000, 3000))]], ["a"], {}, None, 8, "mp4")
    assert len(body) < 100_000
    with pytest.raises(WireError):  # by the decoder, before it has made the image
        read_request(body, max_pixels=8_999_999)


def test_safetensors_that_are_not_of_the_form() -> None:
    def body(samples, **tensors):
        text = json.dumps({"samples": samples, "prompts": ["a"] * len(samples)}).encode()
        return save({"request": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors})

    image = torch.zeros(4, 4, 3, dtype=torch.uint8)
    for wrong in (
        b"\x80\x04K\x01.",  # a pickle
        b'{"samples": []}',
        save({"x": image}),
        body([{"picture": "x"}]),
        body([{"picture": "x"}], x=image.float()),
        body([{"picture": "x"}], x=image[None]),
        body([{"picture": "x"}], x=image[:0]),
        body([{"video": "x"}], x=image),
        body([{"video": "x"}], x=image[None][:0]),
        body([{"tensor": "x"}, {"picture": "x"}], x=image),
        body([{"picture": "x"}] * 1000, x=image),
    ):
        with pytest.raises(WireError):
            read_request(wrong, is_safetensors=True)
    assert read_request(body([{"picture": "x"}], x=image), is_safetensors=True)["samples"][0].size == (4, 4)


@pytest.mark.parametrize("text", ["oops", "[" * 100_000, "[1]"])
def test_an_answer_that_is_no_json_object(text):
    with pytest.raises(FailedRequest):
        read_object(httpx2.Response(200, text=text))


@pytest.mark.parametrize(
    ("header", "expected"),
    [("3", 3), ("0.5", 0.5), ("0", 0.1), ("-2", 0.1), ("nan", 0.1), ("inf", 10), ("soon", 7), (None, 7)],
)
def test_seconds_to_wait(header, expected):
    answer = httpx2.Response(503, headers={} if header is None else {"Retry-After": header})
    assert seconds_to_wait(answer, default=7) == expected
    assert seconds_to_wait(httpx2.Response(503), default=0) == 0.1  # a busy server is not asked all the time
