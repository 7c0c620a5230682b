"""A vision-language model as a judge, with servers that answer well, badly, late or not at all."""

import asyncio
import base64
import contextlib
import io
import json
import math
import re
import socket
import time

import httpx2
import numpy as np
import pytest
from PIL import Image

from diffusion_grpo.rewards import RewardError, check_eval_rewards, check_needs, load_rewards, score
from diffusion_grpo.rewards.server.vlm_judge import UnifiedReward, VlmJudge

IMAGES = [Image.new("RGB", (8, 6), (shade, 0, 0)) for shade in (10, 20, 30)]
PROMPTS = ["a fox", "two {braces}", "ä"]


@pytest.fixture
def model(monkeypatch):
    """Makes servers of chat completions: `model(reply)` gives the url and the requests; `reply` gets a request."""
    mounts, real = {}, httpx2.AsyncClient

    def start(reply) -> tuple[str, list]:
        seen = []

        async def complete(request):
            seen.append({"body": json.loads(request.content), "headers": dict(request.headers)})
            answer = reply(seen[-1]["body"])
            answer = await answer if asyncio.iscoroutine(answer) else answer
            if isinstance(answer, httpx2.Response):
                return answer
            message = {"role": "assistant", "content": answer}
            return httpx2.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}]})

        url = f"http://judge-{len(mounts)}"
        mounts[url] = httpx2.MockTransport(complete)
        return f"{url}/v1", seen

    def make_client(headers, **options):
        return real(headers=headers, mounts={**options.pop("mounts"), **mounts}, **options)

    monkeypatch.setattr(httpx2, "AsyncClient", make_client)
    return start


def shown(body) -> list[Image.Image]:
    """The images of a request."""
    parts = [part for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    heads = {part["image_url"]["url"].partition(",")[0] for part in parts}
    assert heads == {"data:image/png;base64"}
    data = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts]
    return [Image.open(io.BytesIO(one)) for one in data]


def read_question(body) -> str:
    [text] = [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]
    return text


def red(body) -> str:
    """A model that knows how red the first image is."""
    return f"Looking at it, 1 thing is clear. Score: {shown(body)[0].getpixel((0, 0))[0]}"


def refusal(status: int, content="{}", **headers) -> httpx2.Response:
    return httpx2.Response(status, text=content, headers=headers)


def judge(url, **options) -> VlmJudge:
    return VlmJudge(url, "tiny", options.pop("template", "Rate it: {prompt}"), backoff=0.01, **options)


def values(reward, images=IMAGES, prompts=PROMPTS, **keywords) -> list:
    found = score([reward], images=images, prompts=prompts, **keywords)[:, 0].tolist()
    return [None if math.isnan(value) else value for value in found]


# what works


def test_images_and_question_arrive_and_the_last_number_counts(model, monkeypatch) -> None:
    url, seen = model(red)
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    template = 'Rate {prompt} in the mood {mood} as {{"score": n}}.'
    options = {"url": url + "/", "model": "tiny", "template": template, "api_key_env": "JUDGE_KEY"}
    options |= {"max_tokens": 77, "extra": {"seed": 3, "temperature": None}}
    (reward,) = load_rewards({"vlm_judge": {**options, "name": "taste", "mean": 10.0, "std": 10.0}})
    logged = {}
    moods = {"mood": ["sad", "gay", "x"]}
    assert values(reward, columns=moods, log_metric=logged.__setitem__) == [0.0, 1.0, 2.0]
    assert logged == {"vlm_judge/unread": 0.0}
    by_shade = {shown(request["body"])[0].getpixel((0, 0))[0]: request for request in seen}
    assert (
        len(seen) == 3 and read_question(by_shade[20]["body"]) == 'Rate two {braces} in the mood gay as {"score": n}.'
    )
    fields = {name: value for name, value in by_shade[10]["body"].items() if name != "messages"}
    assert fields == {"model": "tiny", "max_tokens": 77, "seed": 3}
    assert {request["headers"]["authorization"] for request in seen} == {"Bearer very-secret"}
    assert "very-secret" not in json.dumps(reward.options()) + repr(reward)
    check_eval_rewards([reward], load_rewards({"vlm_judge": {**options, "name": "taste", "mean": 10.0, "std": 10.0}}))


def test_frames_of_a_video_in_one_question(model) -> None:
    url, seen = model(red)
    video = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in range(11)]
    reward = judge(url, num_frames=3, video_template="Rate the video: {prompt}", score_range=[5, 9])
    found = score([reward], videos=[video], prompts=["a"], fps=8)
    assert [image.getpixel((0, 0))[0] for image in shown(seen[0]["body"])] == [0, 5, 10]
    assert read_question(seen[0]["body"]) == "Rate the video: a" and found.isnan().all()  # 0 is below 5
    whole = judge(url, num_frames=20, score_range=[5, 9], video_score_range=[0, 9])
    assert score([whole], videos=[video], prompts=["a"], fps=8).item() == 0
    assert len(shown(seen[1]["body"])) == 11


def test_yes_is_a_probability(model) -> None:
    def likely(body):
        shade = shown(body)[0].getpixel((0, 0))[0]
        tokens = {10: [("Yes", 0.5), (" yes", 0.1), ("No", 0.2), ("Perhaps", 0.2)], 20: [("no", 1.0)]}
        pairs = [{"token": token, "logprob": math.log(p)} for token, p in tokens.get(shade, [("Maybe", 0.9)])]
        choice = {"message": {"content": "Yes"}, "logprobs": {"content": [{"token": "Yes", "top_logprobs": pairs}]}}
        return refusal(200, json.dumps({"choices": [choice]}))

    url, seen = model(likely)
    assert values(judge(url, answer="yes_no")) == [pytest.approx(0.6 / 0.8), 0.0, None]
    assert {(b["max_tokens"], b["logprobs"], b["top_logprobs"]) for b in (r["body"] for r in seen)} == {(1, True, 20)}
    assert {request["body"]["temperature"] for request in seen} == {0}
    url, _ = model(red)
    with pytest.raises(RewardError, match="log-probabilities, which this server does not give"):
        values(judge(url, answer="yes_no"))


def test_unified_reward(model) -> None:
    replies = {10: "fox (animal): 1\nFinal Score: 4.5", 20: "**Final Score:** 3", 30: "Final Score: 7"}
    url, seen = model(lambda body: replies[shown(body)[0].getpixel((0, 0))[0]])
    (reward,) = load_rewards({"unified_reward": {"url": url, "std": 5.0}})
    assert values(reward) == [pytest.approx(0.9), pytest.approx(0.6), None]  # images have 1 to 5
    assert any(read_question(request["body"]).endswith("Text Caption: [a fox]") for request in seen)
    assert {request["body"]["model"] for request in seen} == {"UnifiedReward"}
    assert score([UnifiedReward(url)], videos=[[IMAGES[2]] * 2], prompts=["a fox"], fps=8).item() == 7  # 1 to 10
    assert read_question(seen[-1]["body"]).endswith("Text Prompt: [a fox]")


def test_so_many_questions_at_a_time(model) -> None:
    inside, most = [], []

    async def slow(body):
        inside.append(1)
        most.append(len(inside))
        await asyncio.sleep(0.03)
        inside.pop()
        return "5"

    url, _ = model(slow)
    assert values(judge(url, concurrency=2), IMAGES * 3, PROMPTS * 3) == [5] * 9
    assert max(most) == 2


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Score: 8/10", 8),
        ("8.5 / 10", 8.5),
        ("4 out of 5", 4),
        ("10/10", 10),
        ("Score: 7.5.", 7.5),
        ("It has 2 cats. Score: 9.", 9),
        ("-3", -3),
        ("+.5", 0.5),
    ],
)
def test_the_number_is_not_that_out_of_which_it_is(reply, expected, model) -> None:
    url, _ = model(lambda body: reply)
    assert values(judge(url), IMAGES[:1], PROMPTS[:1]) == [expected]


def test_unified_reward_reads_signs_and_points(model) -> None:
    """The sign belongs to the number, so -1 is out of range; a dash of a list does not."""
    replies = {10: "Final Score: -1", 20: "Final Score:\n - 4", 30: "Final Score: .5"}
    url, _ = model(lambda body: replies[shown(body)[0].getpixel((0, 0))[0]])
    assert values(UnifiedReward(url)) == [None, 4, None]


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(serve, monkeypatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RewardError, match="was refused by .*status 404"):  # which a server of rewards answers
        values(judge(serve("brightness"), retries=0))


# what does not


@pytest.mark.parametrize("reply", ["", None, "Score: 1e", 7])
def test_what_holds_no_score_is_none(reply, model) -> None:
    url, seen = model(lambda body: reply if shown(body)[0].getpixel((0, 0))[0] == 20 else "Score: 2")
    logged = {}
    reward = judge(url, pattern=r"Score: (\d+)$")
    told = pytest.warns(UserWarning, match="A reply of tiny holds no score")
    with told if isinstance(reply, str) else contextlib.nullcontext():
        assert values(reward, log_metric=logged.__setitem__) == [2, None, 2]
    assert logged == {"vlm_judge/unread": pytest.approx(1 / 3)} and len(seen) == 3  # asked once


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        ("no json", 200, "its answer is not JSON: 'no json'"),
        ('{"choices": []}', 200, "expected choices"),
        ('{"error": {"message": "out of memory"}}', 500, "status 500, out of memory"),
        ("<html>oops", 503, "status 503, <html>oops"),
    ],
)
def test_a_server_that_fails_is_asked_again_and_then_the_run_stops(content, status, reason, model) -> None:
    answers = [refusal(status, content), refusal(status, content), "4"]
    url, seen = model(lambda body: answers.pop(0))
    assert values(judge(url), IMAGES[:1], PROMPTS[:1]) == [4] and len(seen) == 3
    url, seen = model(lambda body: refusal(status, content))
    with pytest.raises(RewardError, match=re.escape(reason)):
        values(judge(url, retries=1), IMAGES[:1], PROMPTS[:1])
    assert len(seen) == 2


def test_too_many_requests_wait_as_long_as_the_server_asks(model) -> None:
    answers = [refusal(429, **{"Retry-After": "0.2"}), "4"]
    url, _ = model(lambda body: answers.pop(0))
    start = time.monotonic()
    assert values(judge(url), IMAGES[:1], PROMPTS[:1]) == [4] and time.monotonic() - start >= 0.2


def test_a_refusal_stops_at_once_and_names_no_key(model, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    url, seen = model(lambda body: refusal(401, '{"error": {"message": "wrong key"}}'))
    with pytest.raises(RewardError, match="was refused by .*status 401, wrong key") as caught:
        values(judge(url, api_key_env="JUDGE_KEY"), IMAGES[:1], PROMPTS[:1])
    assert len(seen) == 1 and "very-secret" not in str(caught.value)


def test_a_slow_server_and_none_at_all(model) -> None:
    async def slow(body):
        await asyncio.sleep(0.5)

    url, _ = model(slow)
    with pytest.raises(RewardError, match="in 1 requests, the last with: no answer within 0.1 seconds"):
        values(judge(url, timeout=0.1, retries=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with pytest.raises(RewardError, match="got no answer from"):
        values(judge(url, retries=1))
    with pytest.raises(ValueError, match="no server answers at"):
        check_needs(load_rewards([judge(url)]))


def test_what_it_cannot_score(model) -> None:
    url, _ = model(red)
    with pytest.raises(RewardError, match="judges images and videos, but the samples are ndarray"):
        score([judge(url)], images=[np.zeros((2, 50))], prompts=["a"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"url": "127.0.0.1:8000"}, "give http://host:port/v1"),
        ({"url": "https://me:key@host/v1"}, "api_key_env"),
        ({"template": "{prompt"}, "cannot be filled in"),
        ({"pattern": "Score: ("}, "pattern"),
        ({"pattern": "Score"}, "has no group"),
        ({"score_range": [5, 1]}, "lowest, highest"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ({"answer": "maybe"}, "expected"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(arguments, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        load_rewards({"vlm_judge": {"url": "http://host/v1", "model": "m", "template": "{prompt}", **arguments}})
    with pytest.raises(ValueError, match="missing a required argument: 'model'"):
        load_rewards({"vlm_judge": {"url": "http://host/v1"}})
