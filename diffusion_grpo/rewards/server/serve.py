"""The reward server, `diffusion-grpo rewards serve NAME`: it scores the samples and prompts that it gets over HTTP.

It is for scorers that are too heavy for the training process, or need other packages. Bodies are JSON with PNGs and
MP4s in base64, or safetensors; nothing that arrives is executed or unpickled, and paths in place of images are
refused. One thread scores one request at a time. A limited number of requests may wait. Further requests are refused
at once (503), and the client, `remote.py`, retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from fastapi import Depends, FastAPI, HTTPException, Request
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
    served = {reward.name: reward for reward in rewards}
    about = {reward.name: {"image_columns": list_image_columns(reward)} for reward in rewards}
    for reward in rewards:
        if is_marked(reward.function, "is_batchwise"):
            raise ValueError(f"The reward {reward.name!r} compares all samples of a rollout, so it cannot be served.")
        if isinstance(reward.function, RemoteReward):
            reward.function.opens_paths = False  # paths would come from this server's clients
    scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
    one_at_a_time, load = asyncio.Semaphore(1), {"waiting": 0, "scored": 0, "max_waiting": max_waiting}

    async def check_token(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "The token is missing or wrong.")

    async def refuse(request: Request, refusal: HTTPException) -> JSONResponse:
        return JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)

    app = FastAPI(
        title="diffusion-grpo rewards",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(check_token)],
        exception_handlers={HTTPException: refuse},
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "rewards": list(served), "served": about, **load}

    @app.post("/score/{name}")
    async def score_samples(name: str, request: Request) -> dict[str, Any]:
        if name not in served:
            raise HTTPException(404, f"There is no reward {name!r} here; there is {', '.join(served)}.")
        if load["waiting"] >= max_waiting:
            headers = {"Retry-After": "1", SCORED: str(load["scored"])}
            raise HTTPException(503, f"{max_waiting} requests are already waiting.", headers)
        load["waiting"] += 1
        try:
            async with asyncio.timeout(body_seconds):
                body = await _read_body(request, max_bytes)
            is_safetensors = request.headers.get("content-type") == CONTENT_TYPES["safetensors"]
            score_body = functools.partial(_score_body, served[name], body, max_pixels, is_safetensors)
            async with _turn(request, one_at_a_time) as is_awaited:
                if not is_awaited:
                    raise HTTPException(408, "The client went away.")  # nobody will read this
                scores = await asyncio.get_running_loop().run_in_executor(scorer, score_body)
                load["scored"] += 1
                return {"scores": scores}
        except TimeoutError as error:
            raise HTTPException(408, f"The request's body did not come within {body_seconds:g} seconds.") from error
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


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the request's body; refuse it as soon as it is too large."""
    body, declared = bytearray(), request.headers.get("content-length", "0")
    too_large = HTTPException(413, f"The request is larger than {max_bytes} bytes; send fewer samples at once.")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _score_body(reward: Reward, body: bytes, max_pixels: int, is_safetensors: bool) -> list[float | None]:
    """Decode and score a request, in the scoring thread; None stands for a sample that the reward leaves out."""
    try:
        request = read_request(body, max_pixels, is_safetensors)
        _check_request(reward, request)
    except WireError as error:
        raise HTTPException(413 if error.is_too_large else 400, str(error)) from error
    kind = "videos" if isinstance(request["samples"][0], list) else "images"
    try:
        values = score(
            [reward],
            **{"latents" if request["are_latents"] else kind: request["samples"]},
            prompts=request["prompts"],
            columns=request["columns"],
            groups=request["groups"],
            fps=request["fps"] or FPS,
            sampling_rate=request["sampling_rate"],
        )
    except RewardError as error:
        logger.error("The reward %r failed", reward.name, exc_info=error)  # the traceback helps the reward's author
        raise HTTPException(500, str(error)) from error
    return [None if value != value else value for value in values[:, 0].tolist()]


def _check_request(reward: Reward, request: dict[str, Any]) -> None:
    """Refuse a request that this reward can never score, or that would make it open a file."""
    if is_marked(reward.function, "is_groupwise") and request["groups"] is None:
        raise WireError(
            f"The reward {reward.name!r} compares the samples of a prompt, so requests must hold whole groups and "
            "name them in `groups`; give the client `groupwise: true`."
        )
    takes_latents = is_marked(reward.function, "takes_latents")
    if takes_latents != request["are_latents"]:
        setting = str(takes_latents).lower()
        raise WireError(
            f"The reward {reward.name!r} takes {'' if takes_latents else 'no '}latents; give the client "
            f"`latents: {setting}`."
        )
    takes_images = "images" in reward.parameters or is_marked(reward.function, "takes_tensors") or takes_latents
    if "videos" in reward.parameters and not takes_images and not isinstance(request["samples"][0], list):
        raise WireError(f"The reward {reward.name!r} takes videos, and the request holds images.")
    try:
        check_columns([reward], ["prompt", *request["columns"]], "this request")
    except ValueError as error:
        raise WireError(f"{error} The client sends the columns that its `columns` name.") from error
    for name in list_image_columns(reward):
        strange = [value for value in request["columns"].get(name, ()) if not isinstance(value, Image.Image | None)]
        if strange:
            raise WireError(
                f"The reward {reward.name!r} needs images in the column {name!r}, not {type(strange[0]).__name__}; "
                "this server opens no paths, so cast the column to datasets.Image."
            )


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
