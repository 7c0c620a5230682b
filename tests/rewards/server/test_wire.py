"""What client and server send each other, and requests with limits."""

import asyncio
import json

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from diffusion_grpo.media.files import VideoWithSound
from diffusion_grpo.rewards import RemoteReward, RewardError, load_rewards, score, takes_latents
from diffusion_grpo.rewards.contract import is_marked
from diffusion_grpo.rewards.server import wire
from diffusion_grpo.rewards.server.wire import (
    Answer,
    FailedRequest,
    WireError,
    ask,
    check_url,
    is_loopback,
    read_error,
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
    with pytest.raises(WireError, match="are_latents must be false"):
        content = json.loads(write_request(IMAGES, ["a", "b"], {}, None, None))
        read_request(json.dumps({**content, "are_latents": True}).encode())


def test_videos_arrive_with_their_rate(serve) -> None:
    def length(videos, fps):
        return [len(video) / fps for video in videos]

    videos = [[Image.new("RGB", (8, 8), (shade,) * 3) for shade in range(0, 25 * count, 25)] for count in (2, 4)]
    url = serve([length, "brightness"])
    table = score([RemoteReward(url, "length")], videos=videos, prompts=["a", "b"], fps=2)
    assert table[:, 0].tolist() == [1, 2]
    table = score([RemoteReward(url, "brightness")], videos=videos, prompts=["a", "b"], fps=2)
    assert table[:, 0].tolist() == pytest.approx([12.5 / 255, 37.5 / 255])


def test_frames_of_videos_for_a_reward_of_images(serve) -> None:
    url = serve({"brightness": {"frames": "all"}})
    video = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in (255, 102, 153, 51, 0)]
    for count, expected in ((1, 1.0), (3, (1 + 0.6 + 0) / 3), (None, 2.2 / 5)):
        remote = RemoteReward(url, num_frames=count)
        assert score([remote], videos=[video], prompts=["a"], fps=2).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": []}, "not empty"),
        ({"samples": ["AAAA", "AAAA"]}, "not a PNG"),
        ({"samples": ["*", "*"]}, "not a PNG"),
        ({"samples": [["AAAA"], "AAAA"]}, "of one kind"),
        ({"samples": [[], []]}, "of one kind"),
        ({"prompts": ["a"]}, "list of 2 strings"),
        ({"columns": {"a": [1]}}, "2 values"),
        ({"columns": {"a": [{"png": "AAAA"}, 1]}}, "not a PNG"),
        ({"groups": ["a", "b"]}, "whole numbers"),
        ({"fps": -1}, "above 0"),
        ({"sampling_rate": "1"}, "above 0"),
        ({"samples": [{"mp4": "AAAA"}, {"mp4": "AAAA"}]}, "not an MP4"),
        ({"samples": [{"tensor": "x"}, {"tensor": "x"}]}, "names the tensor 'x'"),
        ({"samples": [7, 7]}, "of one kind"),
        ({"sounds": [None, None]}, "one object or null per video"),
        (
            {
                "samples": [json.loads(write_request([IMAGES], ["a"], {}, None, 1))["samples"][0]] * 2,
                "sounds": [{"channels": 1, "rate": float("inf"), "float32": "AAAAAA=="}, None],
            },
            "OverflowError",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_that_are_not_of_the_form(changes, message) -> None:
    content = json.loads(write_request(IMAGES[:2], ["a", "b"], {}, None, None))
    with pytest.raises(WireError, match=message):
        read_request(json.dumps({**content, **changes}).encode())
    with pytest.raises(WireError, match="not JSON"):
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
    with pytest.raises(
        WireError, match="not an MP4|frames larger than"
    ):  # by the decoder, before it has made the image
        read_request(body, max_pixels=8_999_999)


def test_safetensors_that_are_not_of_the_form() -> None:
    def body(samples, **tensors):
        text = json.dumps({"samples": samples, "prompts": ["a"] * len(samples)}).encode()
        return save({"request": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors})

    image = torch.zeros(4, 4, 3, dtype=torch.uint8)
    for wrong, message in (
        (b"\x80\x04K\x01.", "not a safetensors file"),  # a pickle
        (b'{"samples": []}', "not a safetensors file"),
        (save({"x": image}), "not JSON"),
        (body([{"picture": "x"}]), "names the tensor 'x', which the body does not hold"),
        (body([{"picture": "x"}], x=image.float()), "expected uint8"),
        (body([{"picture": "x"}], x=image[None]), "expected uint8"),
        (body([{"video": "x"}], x=image), "expected uint8"),
        (body([{"video": "x"}], x=image[None][:0]), "expected uint8"),
        (body([{"tensor": "x"}, {"picture": "x"}], x=image), "of one kind: .* or tensors"),
        (body([{"pickle": "x"}], x=image), "of one kind"),
        (body([{"tensor": "x"}] * 1000, x=image), "names the tensor 'x'.* or is already used"),
        (body([{"picture": "x"}] * 1000, x=image), "names the tensor 'x'.* or is already used"),
    ):
        with pytest.raises(WireError, match=message):
            read_request(wrong, is_safetensors=True)
    assert read_request(body([{"picture": "x"}], x=image), is_safetensors=True)["samples"][0].size == (4, 4)


def send(handler, timeout: float = 5.0) -> Answer:
    """Ask a server that is a function."""

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as client:
            return await ask(client, "POST", "http://there/score", timeout, content=b"body")

    return asyncio.run(run())


def test_an_answer_without_end_and_one_too_long_are_refused(monkeypatch):
    async def never(request):
        await asyncio.sleep(60)

    with pytest.raises(FailedRequest, match="no answer within 0.05 seconds"):
        send(never, timeout=0.05)
    monkeypatch.setattr(wire, "MAX_ANSWER", 10)
    assert send(lambda request: httpx2.Response(200, content=b"x" * 10)).text == "x" * 10
    with pytest.raises(FailedRequest, match="more than 10 bytes"):
        send(lambda request: httpx2.Response(200, content=b"x" * 11))


def test_a_url_holds_no_key():
    check_url("https://host:8000/v1", "mine", "http://host:port", "key_env")
    with pytest.raises(ValueError, match="mine: url is 'host'; give http://host:port."):
        check_url("host", "mine", "http://host:port", "key_env")
    for url in ("http://me:secret@host", "me:secret@host"):
        with pytest.raises(ValueError, match="mine: url holds a name or key;.*key_env") as error:
            check_url(url, "mine", "http://host:port", "key_env")
        assert "secret" not in str(error.value)
    for url in ("http://host:80000", "http://host:port", "http://[host"):
        with pytest.raises(ValueError, match="mine: url is .*, which cannot be used .*; give http://host:port"):
            check_url(url, "mine", "http://host:port", "key_env")


@pytest.mark.parametrize("url", ["http://127.0.0.1:80", "http://[::1]:9", "http://localhost", "http://a.localhost/x"])
def test_this_machine(url):
    assert is_loopback(url)


@pytest.mark.parametrize("url", ["http://10.0.0.1", "https://example.org", "http://localhost.org", "nonsense"])
def test_other_machines(url):
    assert not is_loopback(url)


def test_an_answer_is_a_json_object():
    assert read_object(Answer(200, {}, '{"scores": [1]}')) == {"scores": [1]}
    with pytest.raises(FailedRequest, match="its answer is not JSON: 'oops'"):
        read_object(Answer(200, {}, "oops"))
    with pytest.raises(FailedRequest, match="is not JSON"):
        read_object(Answer(200, {}, "[" * 100_000))
    with pytest.raises(FailedRequest, match="expected an object"):
        read_object(Answer(200, {}, "[1]"))


def test_the_reason_of_a_refusal():
    assert read_error(Answer(400, {}, '{"error": "too large"}')) == "too large"
    assert read_error(Answer(400, {}, '{"error": {"message": "no such model", "code": 3}}')) == "no such model"
    assert read_error(Answer(502, {}, "<html>" + "x" * 500)) == "<html>" + "x" * 194


@pytest.mark.parametrize(
    ("header", "expected"),
    [("3", 3), ("0.5", 0.5), ("0", 0.1), ("-2", 0.1), ("nan", 0.1), ("999", 10), ("inf", 10), ("soon", 7), (None, 7)],
)
def test_seconds_to_wait(header, expected):
    assert seconds_to_wait(header, default=7) == expected


def test_a_busy_server_is_not_asked_all_the_time_where_backoff_is_zero():
    assert seconds_to_wait(None, default=0) == 0.1
