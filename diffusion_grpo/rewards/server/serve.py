"""The reward server, `diffusion-grpo rewards serve NAME`: it receives samples and prompts over HTTP and returns
scores.

It is for scorers that are too heavy for the training process, or need other packages. Bodies are JSON with PNGs and
MP4s in base64, or safetensors; nothing that arrives is executed or unpickled, and targets that are paths are refused.
One thread scores one request at a time. A limited number of requests may wait. Further requests are refused at once
(503), and the client tries again. `remote.py` is the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from PIL import Image

from ..call import RewardError, score
from ..contract import Reward, check_columns, is_marked, list_image_columns
from .remote import RemoteReward
from .wire import CONTENT_TYPES, MAX_PIXELS, SCORED, WireError, read_request

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
BODY_SECONDS = 120.0
FPS = 16.0  # frame rate of videos sent without one


def create_app(
    rewards: list[Reward],
    token: str | None = None,
    max_waiting: int = 16,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """Create the server as an ASGI application.

    `GET /health` answers `{"status": "ok", "rewards": [names], "served": {name: {"groupwise": bool, "batchwise": bool,
    "image_columns": [names]}}, "waiting": n, "scored": n, "max_waiting": n}`. `POST /score/NAME` takes the bodies of
    `wire.write_request` and answers `{"scores": [float | null, ...]}`. Refusals and failures answer
    `{"error": "one sentence"}`: 400 malformed, or not what this reward can score, 401 wrong token, 404 unknown
    reward, 408 the body did not arrive in time, 413 too large, 500 the reward failed, 503 the queue is full. If a
    client goes away, its request leaves the queue and is not scored.
    """
    app = FastAPI(title="diffusion-grpo rewards", docs_url=None, redoc_url=None, openapi_url=None)
    served = {reward.name: reward for reward in rewards}
    about = {reward.name: _describe(reward) for reward in rewards}
    for reward in rewards:
        if isinstance(reward.function, RemoteReward):
            reward.function.opens_paths = False  # paths would come from this server's clients
    scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
    one_at_a_time, load = asyncio.Semaphore(1), {"waiting": 0, "scored": 0, "max_waiting": max_waiting}

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        if not _is_allowed(request, token):
            return _refusal(401, "The token is missing or wrong.")
        return JSONResponse({"status": "ok", "rewards": list(served), "served": about, **load})

    @app.post("/score/{name}")
    async def score_samples(name: str, request: Request) -> JSONResponse:
        if not _is_allowed(request, token):
            return _refusal(401, "The token is missing or wrong.")
        if name not in served:
            return _refusal(404, f"There is no reward {name!r} here; there is {', '.join(served)}.")
        if load["waiting"] >= max_waiting:
            headers = {"Retry-After": "1", SCORED: str(load["scored"])}
            return _refusal(503, f"{max_waiting} requests are already waiting.", headers)
        load["waiting"] += 1
        try:
            async with asyncio.timeout(body_seconds):
                body = await _body(request, max_bytes)
            if body is None:
                return _refusal(413, f"The request is larger than {max_bytes} bytes; send fewer samples at once.")
            is_safetensors = request.headers.get("content-type") == CONTENT_TYPES["safetensors"]
            loop = asyncio.get_running_loop()
            async with _turn(request, one_at_a_time) as is_awaited:
                if not is_awaited:
                    return _refusal(408, "The client went away.")  # nobody will read this
                answer = await loop.run_in_executor(
                    scorer, _answer_request, served[name], body, max_pixels, is_safetensors
                )
                load["scored"] += 1
                return answer
        except TimeoutError:
            return _refusal(408, f"The request's body did not come within {body_seconds:g} seconds.")
        finally:
            load["waiting"] -= 1

    return app


@contextlib.asynccontextmanager
async def _turn(request: Request, one_at_a_time: asyncio.Semaphore) -> AsyncIterator[bool]:
    """Wait for a request's turn, once its body is read; yield whether its client is still there."""
    turn, gone = asyncio.ensure_future(one_at_a_time.acquire()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((turn, gone), return_when=asyncio.FIRST_COMPLETED)
        yield not gone.done()
    finally:
        for task in (turn, gone):
            task.cancel()
        await asyncio.gather(turn, gone, return_exceptions=True)
        if not turn.cancelled():
            one_at_a_time.release()


def _is_allowed(request: Request, token: str | None) -> bool:
    given = request.headers.get("authorization", "")
    return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _refusal(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


async def _body(request: Request, max_bytes: int) -> bytes | None:
    """Read the request's body; return None as soon as it is too large."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        return None
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            return None
    return b"".join(parts)


def _answer_request(reward: Reward, body: bytes, max_pixels: int, is_safetensors: bool) -> JSONResponse:
    """Decode, score and answer a request, in the scoring thread."""
    try:
        samples = read_request(body, max_pixels, is_safetensors)
    except WireError as error:
        return _refusal(413 if error.is_too_large else 400, str(error))
    if (misuse := _find_misuse(reward, samples)) is not None:
        return _refusal(400, misuse)
    try:
        scores = score_request(reward, samples)
    except RewardError as error:
        logger.error("The reward %r failed", reward.name, exc_info=error)  # the traceback helps the reward's author
        return _refusal(500, str(error))
    return JSONResponse({"scores": scores})


def _describe(reward: Reward) -> dict[str, Any]:
    """Return what a client must know about a reward before it requests scores."""
    marks = {name: is_marked(reward.function, f"is_{name}") for name in ("groupwise", "batchwise")}
    return marks | {"image_columns": list_image_columns(reward)}


def _find_misuse(reward: Reward, samples: dict[str, Any]) -> str | None:
    """Return why a decoded request cannot be scored by this reward, or None."""
    if is_marked(reward.function, "is_batchwise"):
        return (
            f"The reward {reward.name!r} compares all samples of a rollout; use it where they are, without a server."
        )
    if is_marked(reward.function, "is_groupwise") and samples["groups"] is None:
        return (
            f"The reward {reward.name!r} compares the samples of a prompt, so requests must hold whole groups and "
            "name them in `groups`; give the client `groupwise: true`."
        )
    try:
        check_columns([reward], ["prompt", *samples["columns"]], "this request")
    except ValueError as error:
        return f"{error} The client sends the columns that its `columns` name."
    if (misfit := _find_wrong_kind(reward, samples)) is not None:
        return misfit
    for name in list_image_columns(reward):
        strange = [value for value in samples["columns"].get(name, ()) if not isinstance(value, Image.Image | None)]
        if strange:
            return (
                f"The reward {reward.name!r} needs images in the column {name!r}, not {type(strange[0]).__name__}; "
                "this server opens no paths, so cast the column to datasets.Image."
            )
    return None


def _find_wrong_kind(reward: Reward, samples: dict[str, Any]) -> str | None:
    """Return that the reward takes samples of another kind than a request holds, or None."""
    takes_latents, is_video = is_marked(reward.function, "takes_latents"), isinstance(samples["samples"][0], list)
    if takes_latents != samples["are_latents"]:
        taken, given = ("latents", "samples") if takes_latents else ("samples", "latents")
        setting = str(takes_latents).lower()
        return f"The reward {reward.name!r} takes {taken}, not {given}; give the client `latents: {setting}`."
    takes_both = "images" in reward.parameters or is_marked(reward.function, "takes_tensors")
    if "videos" in reward.parameters and not takes_both and not is_video and not takes_latents:
        return f"The reward {reward.name!r} takes videos, and the request holds images."
    return None


def score_request(reward: Reward, samples: dict[str, Any]) -> list[float | None]:
    """Score one decoded request, with None for a sample that the reward leaves out."""
    kind = "videos" if isinstance(samples["samples"][0], list) else "images"
    kind = "latents" if samples["are_latents"] else kind
    values = score(
        [reward],
        **{kind: samples["samples"]},
        prompts=samples["prompts"],
        columns=samples["columns"],
        groups=samples["groups"],
        fps=samples["fps"] or FPS,
        sampling_rate=samples["sampling_rate"],
    )
    return [None if value != value else value for value in values[:, 0].tolist()]


class Server(uvicorn.Server):
    """A server that Ctrl-C stops once the requests received so far are scored; a second Ctrl-C stops it at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the server to stop; the process is interrupted once it has."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(130)  # a scorer in its thread cannot be interrupted, and uvicorn would print tracebacks
        super().handle_exit(sig, frame)
        if self.server_state.tasks:
            print(
                "Stopping when the requests that have arrived are scored; Ctrl-C again stops at once.", file=sys.stderr
            )
