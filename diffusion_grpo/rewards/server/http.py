"""HTTP requests to servers, with limits, time-outs and checked JSON, for the rewards that ask a server."""

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

HEALTH_SECONDS = 5.0  # time limit of an answer that needs no scoring
CONNECT_SECONDS = 5.0
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds before a busy server is asked again, whatever its Retry-After
MAX_ANSWER = 2**22  # bytes; scores need far less
SCORED = "x-scored"  # header of a refusal because of a full queue: how many requests were scored so far


class FailedRequest(Exception):
    """A request did not give a usable answer, but the next one may."""


class Slots:
    """A limit on a reward's concurrent requests, over all of its calls that are awaited together."""

    def __init__(self, count: int):
        self.count = count
        self._own: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # a semaphore belongs to one event loop

    def __call__(self, url: str) -> asyncio.Semaphore:
        """Return the semaphore to hold during a request to `url`."""
        own = self._own.setdefault(asyncio.get_running_loop(), {})
        return own.setdefault(url, asyncio.Semaphore(self.count))


@dataclasses.dataclass(frozen=True)
class Answer:
    """A server's answer."""

    status: int
    headers: dict[str, str]
    text: str


async def ask(client: httpx2.AsyncClient, method: str, url: str, timeout: float, **request: Any) -> Answer:
    """Send one request and return its answer, which must be complete within `timeout` seconds.

    httpx's own time-outs limit only pauses: a server that sends a byte now and then could block a run forever.
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


def check_url(url: Any, reward: str, form: str, setting: str) -> None:
    """Refuse a value that is no URL, or a URL that holds a name or key."""
    if isinstance(url, str) and "@" in url:  # it would be written to run.json and into messages
        raise ValueError(f"{reward}: url holds a name or key; put it into an environment variable, see {setting}.")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ValueError(f"{reward}: url is {url!r}; give {form}.")
    try:
        _ = urllib.parse.urlsplit(url).port
    except ValueError as error:  # wrong port, or brackets without an IPv6 address
        raise ValueError(f"{reward}: url is {url!r}, which cannot be used ({error}); give {form}.") from error


def is_loopback(url: str) -> bool:
    """Return whether a URL names this machine itself."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost" or host.endswith(".localhost")


def transport_errors() -> tuple:
    """Return the exceptions that httpx raises if there is no answer, or an unreadable one."""
    import httpx2

    return (httpx2.TransportError, httpx2.DecodingError, httpx2.InvalidURL)


def read_object(answer: Answer) -> dict[str, Any]:
    """Read the JSON object in an answer; raise FailedRequest if there is none."""
    try:
        content = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise FailedRequest(f"its answer is not JSON: {answer.text[:200]!r}") from error
    if not isinstance(content, dict):
        raise FailedRequest(f"it answered {answer.text[:200]!r}, expected an object")
    return content


def read_error(answer: Answer) -> str:
    """Return the reason that a server gives for a refusal or failure."""
    try:
        reason = read_object(answer)["error"]
    except (FailedRequest, KeyError):
        return answer.text[:200]
    return str(reason.get("message", reason) if isinstance(reason, dict) else reason)[:500]


def seconds_to_wait(text: str | None, default: float) -> float:
    """Return the seconds of a Retry-After header, between 0.1 and 10, or `default` if it has none."""
    try:
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, float(text)))  # in this order NaN is the shortest
    except (TypeError, ValueError):
        return max(SHORTEST_WAIT, default)
