"""Rewards over HTTP, with real servers on loopback: what arrives, and what happens when a server misbehaves."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image
from plain_images import noise, save_turned

from diffusion_grpo import cli
from diffusion_grpo.rewards import (
    REWARDS,
    RemoteReward,
    RewardError,
    check_eval_rewards,
    check_needs,
    load_rewards,
    score,
)
from diffusion_grpo.rewards.server import remote as remote_module
from diffusion_grpo.rewards.server.wire import FailedRequest, ask, write_request

IMAGES = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in range(0, 250, 25)]
PROMPTS = [f"prompt {index}" for index in range(len(IMAGES))]
SHADES = [shade / 255 for shade in range(0, 250, 25)]
SERVED = {"brightness": {}}
FAST = {"backoff": 0.01, "timeout": 10.0}


@pytest.fixture
def answering(monkeypatch):
    """Makes servers; `answer` takes the number of a POST, returns status, body and headers, or None to hang up."""
    mounts = {}

    def start(answer, served=SERVED) -> tuple[str, list]:
        requests = []

        def handle(request):
            if request.method == "GET":
                return httpx2.Response(200, json={"served": served})
            requests.append(request.url.path)
            found = answer(len(requests))
            if found is None:
                raise httpx2.RemoteProtocolError("hung up")
            return httpx2.Response(found[0], text=found[1], headers=found[2])

        url = f"http://server-{len(mounts)}"
        mounts[url] = httpx2.MockTransport(handle)
        return url, requests

    monkeypatch.setattr(RemoteReward, "open_client", lambda self: httpx2.AsyncClient(mounts=mounts, trust_env=False))
    return start


def scores_of(remote: RemoteReward, **keywords) -> list:
    return score([remote], images=IMAGES, prompts=PROMPTS, **keywords)[:, 0].tolist()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# what works


def test_the_same_scores_as_here(serve) -> None:
    url = serve({"brightness": {}, "sharpness": {}})
    assert scores_of(RemoteReward(url, "brightness", batch_size=3)) == pytest.approx(SHADES)
    (reward,) = load_rewards({"remote": {"url": url, "reward": "brightness", "name": "far", "clip": [0.5, 1]}})
    assert reward.name == "far" and scores_of(reward)[:2] == [0.5, 0.5]
    with pytest.raises(RewardError, match="brightness, sharpness"):
        scores_of(RemoteReward(url))


def test_images_prompts_columns_and_none_arrive_as_they_are(serve) -> None:
    seen = []

    def look(images, prompts, mood, goal, **columns):
        seen.append(([image.tobytes() for image in images], prompts, mood, goal[0].getpixel((1, 1)), columns.keys()))
        return [None, 2.0]

    table = score(
        [RemoteReward(serve(look), columns=["mood", "goal"])],
        images=IMAGES[:2],
        prompts=["ä", "b"],
        columns={"mood": [{"a": 1}, None], "goal": [Image.new("RGB", (2, 2), (1, 2, 3))] * 2, "kept": ["x", "y"]},
    )
    assert table[0].isnan() and table[1] == 2
    pixels, prompts, mood, goal, others = seen[0]
    assert pixels == [picture.tobytes() for picture in IMAGES[:2]] and prompts == ["ä", "b"]
    assert mood == [{"a": 1}, None] and goal == (1, 2, 3) and "kept" not in others


def test_equal_settings_make_it_the_same_evaluation_only_reward() -> None:
    spec = {"url": "http://a", "reward": "x", "columns": ["mood"]}
    assert RemoteReward(**spec) == RemoteReward(**{**spec, "url": ["http://a/"]}) != RemoteReward("http://a")
    assert hash(RemoteReward(**spec)) == hash(RemoteReward(**spec))
    with pytest.raises(ValueError, match="different rewards called 'remote'"):
        check_eval_rewards(load_rewards({"remote": spec}), load_rewards({"remote": {**spec, "timeout": 5.0}}))


@pytest.mark.parametrize("body", ["png", "safetensors"])
def test_targets_that_are_paths_here_are_sent_as_images(serve, tmp_path, body) -> None:
    target = noise(8, 8)
    deep = Image.fromarray(np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16))
    paths = [save_turned(target, tmp_path / "turned.png"), None, target, deep]
    words = [paths[0], "a", "b", "c"]  # strings that no reward reads as images stay strings
    seen = []

    def look(images, word):
        seen.extend(word)
        return [0.0] * len(images)

    psnr, other = (
        RemoteReward(serve(reward), columns=["target", "word"], body=body, **FAST) for reward in ("psnr", look)
    )
    columns = {"target": paths, "word": words}
    table = score([psnr, REWARDS["psnr"]], images=IMAGES[:1] * 4, prompts=PROMPTS[:4], columns=columns)
    assert table[0, 0] == table[0, 1] == table[2, 0] and table[1].isnan().all() and table[3, 0] == table[3, 1]
    score([other], images=IMAGES[:4], prompts=PROMPTS[:4], columns={"target": [None] * 4, "word": words})
    assert sorted(seen) == sorted(words)
    with pytest.raises(RewardError, match="FileNotFoundError.*none.png"):
        score([psnr], images=IMAGES[:1], prompts=["a"], columns={"target": ["none.png"], "word": ["a"]})


def test_a_server_that_is_late_is_asked_again_how_to_send_columns(serve, tmp_path, monkeypatch) -> None:
    real, late = remote_module.ask, []

    async def ask(client, method, url, *args, **kwargs):
        if method == "GET" and len(late) < 2:
            late.append(url)
            if len(late) == 1:
                raise FailedRequest("not yet")
            return httpx2.Response(503, text="starting")  # a gateway
        return await real(client, method, url, *args, **kwargs)

    monkeypatch.setattr(remote_module, "ask", ask)
    target = {"target": [save_turned(IMAGES[0], tmp_path / "turned.png")]}
    psnr = RemoteReward(serve("psnr"), columns=["target"], retries=2, **FAST)
    assert score([psnr], images=IMAGES[:1], prompts=["a"], columns=target).item() == 100 and len(late) == 2


def test_several_servers_share_the_work(serve) -> None:
    counts = [0, 0]

    def worker(index):
        def slow(images):
            counts[index] += len(images)
            time.sleep(0.05)
            return [image.getpixel((0, 0))[0] / 255 for image in images]

        return slow

    urls = [serve(worker(index)) for index in range(2)]
    assert scores_of(RemoteReward(urls, batch_size=1, concurrency=1)) == pytest.approx(SHADES)
    assert sum(counts) == 10 and min(counts) >= 2


def test_a_full_queue_is_tried_again_and_is_no_failure(serve) -> None:
    inside = []

    def slow(images):
        inside.append(1)
        time.sleep(0.05)
        return [0.5] * len(images)

    url = serve(slow, max_waiting=1)
    remote = RemoteReward(url, "slow", batch_size=5, concurrency=2, retries=0, timeout=60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores_of(remote) == [0.5] * 10
    assert len(inside) == 2


def test_a_server_that_scores_for_others_is_waited_for_longer_than_one_that_scores_nothing(answering) -> None:
    def start(count_scored):
        def answer(number):
            if number <= 8:
                return 503, '{"error": "full"}', {"Retry-After": "0", "X-Scored": count_scored(number)}
            return 200, '{"scores": [0.5, 0.5, 0.5, 0.5, 0.5]}', {}

        return answering(answer)[0]

    options = {"batch_size": 5, "concurrency": 1, "retries": 0, "timeout": 0.5}
    began = time.monotonic()
    assert scores_of(RemoteReward(start(str), **options)) == [0.5] * 10
    assert time.monotonic() - began >= 0.8  # a tenth of a second each, though Retry-After is 0
    with pytest.warns(UserWarning, match="queue was full for 0.5 s"), pytest.raises(RewardError, match="no server"):
        scores_of(RemoteReward(start(lambda number: "3"), **options))


def test_a_server_gets_as_few_samples_at_a_time_as_it_takes(serve) -> None:
    body = len(write_request(IMAGES[:3], PROMPTS[:3], {}, None, None))
    sizes = []

    def shade(images):
        sizes.append(len(images))
        return [image.getpixel((0, 0))[0] / 255 for image in images]

    small, large = serve(shade, max_bytes=body), serve("brightness")
    remote = RemoteReward(small, concurrency=2, **FAST)
    with pytest.warns(
        UserWarning, match="refused 5 samples in one request; it gets at most 2 from now on. .* larger than"
    ):
        assert scores_of(remote) == pytest.approx(SHADES)
    assert max(sizes) == 2 and sum(sizes) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores_of(remote) == pytest.approx(SHADES)  # it remembers
    pixels = serve(shade, max_pixels=64 * 5)
    with pytest.warns(UserWarning, match="at most 5"):
        assert scores_of(RemoteReward([pixels, large], batch_size=10, concurrency=1, **FAST)) == pytest.approx(SHADES)


# what does not


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("no json", 200, "its answer is not JSON: 'no json'"),
        ('{"scores": [1.0]}', 200, "expected 10 scores"),
        ("<html>oops</html>", 500, "status 500, <html>oops"),
        (None, 200, "2 requests failed"),
    ],
)
def test_a_server_that_answers_nonsense_is_taken_out(body, status, message, serve, answering) -> None:
    bad, requests = answering(lambda number: None if body is None else (status, body, {}))
    remote = RemoteReward([bad, serve("brightness")], "brightness", retries=1, concurrency=1, **FAST)
    with pytest.warns(UserWarning, match="taken out"):
        assert scores_of(remote) == pytest.approx(SHADES)
    assert len(requests) == 2 and not remote.servers[0].is_alive
    alone = RemoteReward(bad, "brightness", retries=0, **FAST)
    with pytest.warns(UserWarning), pytest.raises(RewardError, match=message if body else "no server left"):
        scores_of(alone)


def test_a_server_that_never_comes_to_an_end_is_given_up() -> None:
    """A byte now and then keeps httpx's own time-outs from striking."""

    async def trickle(request):
        async def send():
            for _ in range(40):
                yield b" "
                await asyncio.sleep(0.01)

        return httpx2.Response(200, content=send())

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(trickle)) as client:
            await ask(client, "POST", "http://there/score", 0.1)

    with pytest.raises(FailedRequest, match="0.1 seconds"):
        asyncio.run(run())


def test_servers_that_cannot_score_are_refused_before_a_run(serve, answering) -> None:
    url = serve({"brightness": {}, "sharpness": {}})
    for refused, message in (
        ({"url": answering(None, served={})[0]}, "names no rewards"),
        ({"url": answering(None, served=["brightness"])[0]}, "names no rewards"),
        ({"url": [closed_port()] * 2}, "no server answers"),
        ({"url": url}, "brightness, sharpness"),
        ({"url": url, "reward": "text"}, "brightness, sharpness"),
    ):
        with pytest.raises(ValueError, match=message):
            check_needs(load_rewards({"remote": refused}))
    for accepted in (
        {"url": [closed_port(), url], "reward": "brightness"},
        {"url": closed_port(), "wait": 1.0},
    ):
        check_needs(load_rewards({"remote": accepted}))


def test_a_server_that_comes_back_without_the_reward_ends_nothing(serve) -> None:
    remote = RemoteReward([serve("sharpness"), serve("brightness")], "brightness", **FAST)
    remote.servers[0].is_alive = False
    assert scores_of(remote) == pytest.approx(SHADES) and not remote.servers[0].is_alive


def test_waits_for_a_server_to_come_back(serve, monkeypatch) -> None:
    monkeypatch.setattr(remote_module, "POLL_SECONDS", 0.2)
    url = serve("brightness")
    remote = RemoteReward(closed_port(), "brightness", retries=0, wait=20.0, **FAST)
    threading.Timer(0.5, setattr, (remote.servers[0], "url", url)).start()
    with pytest.warns(UserWarning, match="waiting up to 20 s"):
        assert scores_of(remote) == pytest.approx(SHADES)


def test_a_server_that_is_well_but_fails_every_batch_is_not_waited_for_again_and_again(serve) -> None:
    asked = []

    def fails(images):
        asked.append(1)
        raise KeyError("weights missing")

    remote = RemoteReward(serve(fails), "fails", retries=0, wait=0.5, **FAST)
    start = time.monotonic()
    with pytest.warns(UserWarning), pytest.raises(RewardError, match="no server left .*fails.* KeyError.*weights"):
        scores_of(remote)
    assert time.monotonic() - start < 5 and 1 <= len(asked) <= 6


def test_tokens(serve, monkeypatch) -> None:
    url = serve("brightness", token="right")
    monkeypatch.setenv("REWARD_TOKEN", "right")
    assert scores_of(RemoteReward(url, token_env="REWARD_TOKEN")) == pytest.approx(SHADES)
    with pytest.raises(RewardError, match="refused by .*token"):
        scores_of(RemoteReward(url, "brightness", **FAST))
    monkeypatch.setenv("REWARD_TOKEN", "wrong")
    with pytest.raises(RewardError, match="refused by .*401.*token is missing or wrong"):
        scores_of(RemoteReward(url, "brightness", token_env="REWARD_TOKEN", **FAST))
    assert httpx2.get(f"{url}/health", trust_env=False).status_code == 401


# the settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": []}, "http://host:port"),
        ({"url": "localhost:8000"}, "http://host:port"),
        ({"url": ["http://a", "http://me:password@b"]}, "holds a name or key.*token_env"),
        ({"url": "me:password@b"}, "holds a name or key.*token_env"),
        ({"url": "http://a", "batch_size": 0}, "batch_size"),
        ({"url": "http://a", "body": "pickle"}, "expected Literal"),
        ({"url": "http://a", "token_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_rewards({"remote": arguments})
    assert "password" not in str(error.value)


# the command


def stalls(images):
    """A reward that says it was called, and takes its time."""
    print("called", flush=True)
    time.sleep(60)
    return [0.0] * len(images)


@pytest.mark.slow
def test_the_command_serves_and_is_killed_mid_batch(serve) -> None:
    code = "import sys; from diffusion_grpo.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "rewards", "serve", f"{{{__name__}.stalls: {{name: brightness}}}}", "--port"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    with subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            url = line.split(" on ")[1].strip()
            assert line.startswith("serving brightness on http://127.0.0.1:")
            remote = RemoteReward([url, serve("brightness")], "brightness", batch_size=5, retries=1, concurrency=1)

            def kill():
                assert process.stdout.readline() == "called\n"
                process.send_signal(signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.warns(UserWarning, match=f"{url} is taken out"):
                assert scores_of(remote) == pytest.approx(SHADES)
            killer.join(10)
        finally:
            process.kill()


def test_the_command_refuses_what_it_cannot_serve(capsys) -> None:
    for words, message in (
        (["brigthness"], "brightness"),
        (["brightness", "--token_env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ):
        assert cli.main(["rewards", "serve", *words]) == 2
        assert message in capsys.readouterr().err
    assert "brightness" in REWARDS
