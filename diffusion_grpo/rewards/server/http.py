"""HTTP requests to servers, shared by the rewards that ask one: limits, time-outs, and checked JSON."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import urllib.parse
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 5.0
LONGEST_WAIT = 10.0  # seconds that a server may ask to be left alone
MAX_ANSWER = 2**22  # bytes: no server of scores has more to say


class FailedRequest(Exception):
    """One request did not give a usable answer; the next may."""


class Slots:
    """How many requests of a reward are under way at once, over all its calls that are awaited together.

    Args:
        count: at one server.
    """

    def __init__(self, count: int):
        self.count = count
        self._own: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # a semaphore belongs to one loop

    def __call__(self, url: str) -> asyncio.Semaphore:
        """To be held during a request to `url`."""
        own = self._own.setdefault(asyncio.get_running_loop(), {})
        return own.setdefault(url, asyncio.Semaphore(self.count))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server sent back."""

    status: int
    headers: dict[str, str]
    text: str


async def ask(client: httpx2.AsyncClient, method: str, url: str, timeout: float, **request: Any) -> Answer:
    """One request, of which the answer must be there, whole, within `timeout` seconds.

    httpx's own time-outs are of silence: a server that sends a byte now and then would hold up a run for ever.

    Raises:
        FailedRequest: it was not, or it is longer than `MAX_ANSWER`.
    """
    import httpx2

    content, limit = bytearray(), httpx2.Timeout(None, connect=min(CONNECT_SECONDS, timeout))
    try:
        async with asyncio.timeout(timeout), client.stream(method, url, timeout=limit, **request) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_ANSWER:
                    raise FailedRequest(f"it answered more than {MAX_ANSWER} bytes")
    except TimeoutError as error:
        raise FailedRequest(f"no answer within {timeout:g} seconds") from error
    return Answer(response.status_code, dict(response.headers), content.decode("utf-8", "replace"))


def is_loopback(url: str) -> bool:
    """Whether a url names this machine itself."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def transport_errors() -> tuple:
    """What httpx raises where no answer came, or none that can be read."""
    import httpx2

    return (httpx2.TransportError, httpx2.DecodingError, httpx2.InvalidURL)


def read_object(answer: Answer) -> dict[str, Any]:
    """The object that an answer holds; FailedRequest where there is none."""
    try:
        content = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise FailedRequest(f"it answered no JSON: {answer.text[:200]!r}") from error
    if not isinstance(content, dict):
        raise FailedRequest(f"it answered {answer.text[:200]!r}, expected an object")
    return content


def read_error(answer: Answer) -> str:
    """What a server says about its refusal or failure."""
    try:
        said = read_object(answer)["error"]
    except (FailedRequest, KeyError):
        return answer.text[:200]
    return str(said.get("message", said) if isinstance(said, dict) else said)[:500]


def seconds_to_wait(text: str | None, default: float) -> float:
    """The seconds of a Retry-After header, at most 10, or `default` where there are none."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(text)))
    except (TypeError, ValueError):
        return default
