"""What the rewards that ask other machines share: a request goes out, checked JSON or a sentence about it comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

LONGEST_WAIT = 10.0  # seconds that a server may ask to be left alone


class FailedRequest(Exception):
    """One request did not give a usable answer; the next may."""


def transport_errors() -> tuple:
    """What httpx raises where no answer came, or none that can be read."""
    import httpx2

    return (httpx2.TransportError, httpx2.DecodingError, httpx2.InvalidURL)


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """The object that a response holds; FailedRequest where there is none."""
    try:
        content = response.json()
    except (ValueError, RecursionError) as error:
        raise FailedRequest(f"it answered no JSON: {response.text[:200]!r}") from error
    if not isinstance(content, dict):
        raise FailedRequest(f"it answered {response.text[:200]!r}, expected an object")
    return content


def sentence(response: httpx2.Response) -> str:
    """What a server says about its refusal or failure."""
    try:
        said = json_object(response)["error"]
    except (FailedRequest, KeyError):
        return response.text[:200]
    return str(said.get("message", said) if isinstance(said, dict) else said)[:500]


def seconds_to_wait(text: str | None, default: float) -> float:
    """The seconds of a Retry-After header, at most 10, or `default` where there are none."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(text)))
    except (TypeError, ValueError):
        return default
