"""The server of rewards: who waits, who is sent away, and what is not scored because nobody asks for it any more."""

import asyncio
import os
import signal
import socket
import threading
import time

import httpx2
import pytest
import torch
import uvicorn

from diffusion_grpo.rewards import (
    REWARDS,
    RemoteReward,
    RewardError,
    batchwise,
    groupwise,
    load_rewards,
    score,
    takes_latents,
    takes_tensors,
)
from diffusion_grpo.rewards.server.serve import Server, create_app
from diffusion_grpo.rewards.server.wire import write_request
from tests.rewards.server.test_remote import FAST, IMAGES, SHADES, scores_of


def test_a_full_queue_answers_at_once(serve) -> None:
    release = threading.Event()

    def stuck(images):
        release.wait(20)
        return [0.0] * len(images)

    url = serve(stuck, max_waiting=1)
    body = write_request(IMAGES[:1], ["a"], {}, None, None)

    async def two() -> httpx2.Response:
        async with httpx2.AsyncClient(timeout=20, trust_env=False) as client:
            first = asyncio.ensure_future(client.post(f"{url}/score/stuck", content=body))
            while (await client.get(f"{url}/health")).json()["waiting"] == 0:
                await asyncio.sleep(0.01)
            second = await client.post(f"{url}/score/stuck", content=body)
            release.set()
            assert (await first).status_code == 200
            return second

    answers = []
    for _ in range(2):
        release.clear()
        answers.append(asyncio.run(two()))
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in answers} == {(503, "1")}
    assert [answer.headers["X-Scored"] for answer in answers] == ["0", "1"]


def waiting(url: str) -> int:
    return httpx2.get(f"{url}/health", trust_env=False).json()["waiting"]


def test_what_its_client_gave_up_leaves_the_queue_and_is_not_scored(serve) -> None:
    release, calls = threading.Event(), []

    def stuck(images):
        calls.append(1)
        release.wait(20)
        return [0.5] * len(images)

    url, body = serve(stuck), write_request(IMAGES[:1], ["a"], {}, None, None)
    first = threading.Thread(target=httpx2.post, args=(f"{url}/score/stuck",), kwargs={"content": body, "timeout": 30})
    first.start()
    while not calls:
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{url}/score/stuck", content=body, timeout=0.2, trust_env=False)
    end = time.monotonic() + 5
    while waiting(url) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert waiting(url) == 1
    release.set()
    first.join()
    assert httpx2.post(f"{url}/score/stuck", content=body, trust_env=False).json() == {"scores": [0.5]}
    assert len(calls) == 2


def begin_post(url: str, length: int) -> bytes:
    """What a server answers to a POST of which only the head comes."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as half:
        half.sendall(f"POST /score/brightness HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        answer = half.recv(4096)
        while not answer.endswith(b"}"):  # headers and body may come apart
            answer += half.recv(4096)
    return answer


def test_a_body_that_does_not_come_gives_up_its_place(serve) -> None:
    url = serve("brightness", body_seconds=0.3)
    answer = begin_post(url, 1000)
    assert b" 408 " in answer.splitlines()[0] and b"within 0.3 seconds" in answer and waiting(url) == 0
    assert scores_of(RemoteReward(url)) == pytest.approx(SHADES)


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(serve) -> None:
    answer = begin_post(serve("brightness", max_bytes=1000, body_seconds=30), 1001)
    assert b" 413 " in answer.splitlines()[0]


def test_too_large_and_unknown_are_refused(serve) -> None:
    with pytest.raises(RewardError, match="413.*larger than 100 bytes"):
        scores_of(RemoteReward(serve("brightness", max_bytes=100), "brightness", batch_size=1, **FAST))
    url = serve("brightness", max_bytes=1000)
    with pytest.raises(RewardError, match="413.*larger than 1000 bytes"):  # groups stay whole
        scores_of(RemoteReward(url, "brightness", groupwise=True, **FAST), groups=[0] * len(IMAGES))
    assert scores_of(RemoteReward(url, "brightness", batch_size=1)) == pytest.approx(SHADES)
    with pytest.raises(RewardError, match="finds brightness"):
        scores_of(RemoteReward(url, "text", batch_size=1, **FAST))
    assert post(url, "text", {}).status_code == 404

    def chunks():  # without a Content-Length
        for _ in range(10):
            yield b"x" * 1000

    assert httpx2.post(f"{url}/score/brightness", content=chunks(), trust_env=False).status_code == 413


def test_columns_named_like_options_reach_a_served_reward_as_columns_alone(serve) -> None:
    """`fps` is an option of the client, `target_column` one of the reward that is served."""
    columns = {"target": IMAGES, "target_column": ["x"] * len(IMAGES), "fps": ["y"] * len(IMAGES)}
    remote = RemoteReward(serve("psnr"), columns=["target", "target_column"], **FAST)
    prompts = ["a"] * len(IMAGES)
    table = score([remote, REWARDS["psnr"]], images=IMAGES, prompts=prompts, columns=columns)
    assert table[:, 0].tolist() == table[:, 1].tolist() == [100.0] * len(IMAGES)
    with pytest.raises(ValueError, match="columns names 'fps', which is no column"):
        RemoteReward("http://a", columns=["fps"])


def post(url: str, name: str, columns: dict) -> httpx2.Response:
    """Ask for the scores of two images, as any client could."""
    body = write_request(IMAGES[:2], ["a", "a"], columns, None, None)
    return httpx2.post(f"{url}/score/{name}", content=body, timeout=10, trust_env=False)


SIMILARITIES = ["psnr", "ssim", "lpips", "dino_similarity", "clip_similarity"]


def test_no_file_of_the_server_is_opened_for_a_client(serve, tmp_path) -> None:
    """Nor does the answer tell whether there is one; a pipe would block whoever opens it."""
    IMAGES[0].save(tmp_path / "image.png")
    os.mkfifo(tmp_path / "pipe")
    url = serve([*SIMILARITIES, {"psnr": {"name": "other", "target_column": "goal"}}])
    for name in [*SIMILARITIES, "other"]:
        column, errors = "goal" if name == "other" else "target", set()
        for file in ("image.png", "none.png", "pipe"):
            answer = post(url, name, {column: [IMAGES[0], str(tmp_path / file)]})
            assert answer.status_code == 400
            errors.add(answer.json()["error"])
        (error,) = errors
        assert f"{name!r} needs images in the column {column!r}, not str; this server opens no paths" in error
    assert post(url, "psnr", {"target": [IMAGES[0], None]}).json() == {"scores": [100.0, None]}
    assert post(url, "psnr", {"target": IMAGES[:2], "mood": ["x", "y"]}).json() == {"scores": [100.0, 100.0]}


def test_a_server_that_asks_another_opens_no_file_either(serve, tmp_path) -> None:
    IMAGES[0].save(tmp_path / "image.png")
    inner = {"remote": {"url": serve("psnr"), "columns": ["target"], **FAST}}
    url = serve(load_rewards(inner))
    answer = post(url, "remote", {"target": [str(tmp_path / "image.png")] * 2})
    assert answer.status_code == 500 and "this server opens no paths" in answer.json()["error"]
    assert post(url, "remote", {"target": IMAGES[:2]}).json() == {"scores": [100.0, 100.0]}


@groupwise
def size(images):
    return [float(len(images))] * len(images)


def test_what_a_reward_can_never_score_is_refused_at_once(serve) -> None:
    @takes_latents
    def hidden(latents):
        return [0.0] * len(latents)

    def moves(videos):
        return [0.0] * len(videos)

    noisy = {"latents": [torch.zeros(2, 2)] * len(IMAGES)}
    for reward, given, settings, message in (
        ("psnr", {}, {}, "'psnr' needs the column 'target', which this request lacks"),
        (moves, {}, {}, "'moves' takes videos"),
        (hidden, {}, {}, "'hidden' .*`latents: true`"),
        ("brightness", noisy, {"latents": True, "body": "safetensors"}, "'brightness' .*`latents: false`"),
    ):
        client = RemoteReward(serve(reward), retries=9, wait=60.0, **settings, **FAST)
        with pytest.raises(RewardError, match=f"was refused by .*400.*{message}"):
            scores_of(client, **given)

    @takes_tensors
    def bright(videos):  # an image is a video of one frame
        return videos.float().mean(dim=tuple(range(1, videos.ndim))).tolist()

    assert scores_of(RemoteReward(serve(bright), **FAST)) == scores_of(bright)


def test_what_compares_samples_gets_whole_groups_or_nothing(serve) -> None:
    @batchwise
    def total(images): ...

    url = serve([size, "text", "psnr"])
    with pytest.raises(RewardError, match="groupwise: true"):
        scores_of(RemoteReward(url, "size", batch_size=2, **FAST))
    groups = [0] * 7 + [1] * 3
    assert scores_of(RemoteReward(url, "size", batch_size=2, groupwise=True), groups=groups) == [7] * 7 + [3] * 3
    with pytest.raises(ValueError, match="'total' compares all samples"):
        serve(total)
    served = httpx2.get(f"{url}/health", trust_env=False).json()["served"]
    assert [own["image_columns"] for own in served.values()] == [[], [], ["target"]]


def test_any_name_of_a_reward_finds_it(serve) -> None:
    name = "two words? 100 % a#b&c"
    assert scores_of(RemoteReward(serve({"brightness": {"name": name}}), name)) == pytest.approx(SHADES)


def test_why_a_reward_failed_is_in_the_servers_output(serve, caplog) -> None:
    def clumsy(images):
        return [1 / 0]

    answer = post(serve(clumsy), "clumsy", {})
    assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]
    assert "The reward 'clumsy' failed" in caplog.text and "return [1 / 0]" in caplog.text


def test_a_second_ctrl_c_stops_the_server_at_once(monkeypatch, capsys) -> None:
    """The first waits for requests, and says so. uvicorn's own second one ends in tracebacks."""
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    server = Server(uvicorn.Config(create_app(load_rewards("brightness"))))
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not ended and not capsys.readouterr().err
    server.should_exit = False
    server.server_state.tasks.add("a request")
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and not ended and "Ctrl-C again stops at once" in capsys.readouterr().err
    server.handle_exit(signal.SIGINT, None)
    assert ended == [130]
