"""Requests with limits, and answers that are checked."""

import asyncio

import httpx2
import pytest

from diffusion_grpo.rewards.server import http
from diffusion_grpo.rewards.server.http import (
    Answer,
    FailedRequest,
    Slots,
    ask,
    check_url,
    is_loopback,
    read_error,
    read_object,
    seconds_to_wait,
)


def send(handler, timeout: float = 5.0) -> Answer:
    """Ask a server that is a function."""

    async def run():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as client:
            return await ask(client, "POST", "http://there/score", timeout, content=b"body")

    return asyncio.run(run())


def test_an_answer_is_status_headers_and_text():
    answer = send(lambda request: httpx2.Response(503, headers={"retry-after": "3"}, content=request.content))
    assert (answer.status, answer.headers["retry-after"], answer.text) == (503, "3", "body")


def test_an_answer_without_end_and_one_too_long_are_refused(monkeypatch):
    async def never(request):
        await asyncio.sleep(60)

    with pytest.raises(FailedRequest, match="no answer within 0.05 seconds"):
        send(never, timeout=0.05)
    monkeypatch.setattr(http, "MAX_ANSWER", 10)
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


def test_slots_limit_the_requests_at_one_server():
    slots, running, most = Slots(2), [], []

    async def request(url):
        async with slots(url):
            running.append(url)
            most.append(running.count(url))
            await asyncio.sleep(0)
            running.remove(url)

    async def several():
        await asyncio.gather(*(request(url) for url in ["a", "a", "a", "a", "b"]))

    asyncio.run(several())
    asyncio.run(several())  # another event loop has semaphores of its own
    assert max(most) == 2 and len(most) == 10


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
