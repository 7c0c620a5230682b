"""The reward `remote`: any reward that `diffusion-grpo rewards serve` serves in another process or on another machine.

Each server takes the next batch when it is free. A server that fails is dropped with a warning, and tried again at the
next scoring.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...media.samples import frame_positions
from ..call import RewardError, run_in_loop
from ..contract import PROVIDED, check_package
from ..models.base import open_image
from .wire import (
    CONTENT_TYPES,
    HEALTH_SECONDS,
    SCORED,
    Body,
    FailedRequest,
    ask,
    check_at_least_one,
    check_url,
    gather_or_cancel,
    read_error,
    read_object,
    seconds_to_wait,
    write_request,
)

if TYPE_CHECKING:
    import httpx2

POLL_SECONDS = 2.0  # between checks of whether a server is back
BUSY = (429, 503)
REFUSALS = (400, 401, 403, 404, 413)  # a retry would not help


class _Broken(Exception):
    """A server did not give a usable answer."""


class _TooLarge(Exception):
    """A server takes fewer samples in a request."""


@dataclasses.dataclass
class _Server:
    url: str
    slots: asyncio.Semaphore  # limits concurrent requests over all calls that are awaited together
    is_alive: bool = True
    reason: str = ""
    served: dict[str, Any] | None = None  # what /health says about each reward, once asked
    most: int | None = None  # most samples of a request, once a larger one was refused


@dataclasses.dataclass
class RemoteReward:
    """A reward computed by servers; it is async, so that several servers are asked at the same time.

    Rewards with equal settings are equal, so a reward may be both trained on and evaluated.

    Args:
        url: URL of a server, such as `http://127.0.0.1:8000`, or a list of these.
        reward: name of the reward at the server; may be left out if the server has only one.
        columns: dataset columns to send too, with images or JSON values; none by default. Paths are sent as images if
            the served reward needs images in that column.
        batch_size: number of samples per request; halved for a server that refuses a request as too large.
        concurrency: number of concurrent requests per server.
        timeout: seconds for one request, including its wait in the server's queue. A server with a full queue is
            given up if it scores nothing for that long.
        retries: how often a failed request is sent again to the same server before the server is taken out.
        backoff: seconds before the first retry; doubled for each further one.
        wait: seconds to wait for a server to come back when all are gone; 0 stops the run.
        token_env: name of the environment variable with the token that the servers require.
        groupwise: whether the reward compares the samples of a prompt; each request then holds all samples of one
            prompt. Needed for a served reward that is marked `groupwise`; one marked `batchwise` cannot be served.
        body: how samples are sent. With `png`, `mp4` (lossless) and `safetensors` (raw, also sound and tensors), the
            server scores the same pixels. `mp4_lossy` sends videos as a player shows them, in few bytes.
        latents: whether to send latents, the result of the last denoising step, instead of images; needs
            `body: safetensors`.
        num_frames: frames to send of each video, evenly spaced and including the first and last, for a reward on
            images; 1 sends only the first. All by default.

    Raises:
        ValueError: there is no URL, one holds a name or password, or a number is out of range.
        RewardError: when called, if all servers are gone, one refuses the request, or the served reward needs other
            samples together than these settings send.

    Examples:
        >>> reward = RemoteReward("http://127.0.0.1:8000", reward="text", columns=["word"])  # asks nothing yet
        >>> reward.batch_size
        16
    """

    url: str | list
    reward: str | None = None
    columns: list | None = None
    batch_size: int = 16
    concurrency: int = 2
    timeout: float = 120.0
    retries: int = 3
    backoff: float = 0.5
    wait: float = 0.0
    token_env: str | None = None
    groupwise: bool = False
    body: Body = "png"
    num_frames: int | None = None
    latents: bool = False

    opens_paths = True  # a server that serves this reward sets it to False

    def __post_init__(self):
        urls = [self.url] if isinstance(self.url, str) else list(self.url)
        for url in urls or [self.url]:
            check_url(url, "remote", "http://host:port, or a list of these", "token_env")
        check_at_least_one("remote", self, "batch_size", "concurrency", "num_frames")
        self.columns = list(self.columns or [])
        if provided := sorted({*self.columns} & {*PROVIDED}):
            raise ValueError(f"remote: columns names {provided[0]!r}, which is no column where rewards are called.")
        if self.latents and self.body != "safetensors":
            raise ValueError(
                f"remote: latents cannot be sent as {self.body}, which is for images; add `body: safetensors`."
            )
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(f"remote: token_env names {self.token_env}, but no such environment variable is set.")
        self.url = [url.rstrip("/") for url in urls]
        self.servers = [_Server(url, asyncio.Semaphore(self.concurrency)) for url in self.url]
        self.needed_columns = {*self.columns}
        self.is_groupwise, self.takes_latents = self.groupwise, self.latents  # contract.py reads these marks

    def __hash__(self) -> int:
        return hash((type(self), self.reward))

    def check_needs(self) -> None:
        """Raise an error if the HTTP client is missing, all servers are down, or one does not serve the reward."""
        check_package("httpx2", 'pip install "diffusion-grpo[rewards]"')
        run_in_loop(self._check_servers()).result()

    async def _check_servers(self) -> None:
        reasons = []
        async with self.open_client() as client:
            for server in self.servers:
                try:
                    await self._describe(client, server)
                except FailedRequest as error:
                    reasons.append(f"{server.url}: {error}")
                except RewardError as error:
                    raise ValueError(f"it {error}.") from error
        if len(reasons) == len(self.servers) and self.wait == 0:
            raise ValueError(
                f"no server answers ({'; '.join(reasons)}); start one with `diffusion-grpo rewards serve`, or set "
                "wait to the seconds to wait for one."
            )

    async def __call__(
        self,
        completions: list,
        prompts: list[str],
        fps: float | None = None,
        sampling_rate: int | None = None,
        **columns,
    ) -> list[float | None]:
        """Score images, videos, sounds or latents; see the class."""
        size = len(completions) if self.is_groupwise else self.batch_size
        pending = [range(start, min(start + size, len(completions))) for start in range(0, len(completions), size)]
        pending.reverse()  # workers take batches from the end
        left, gone = len(completions), None  # time since which no server has scored anything
        scores: list[float | None] = [None] * len(completions)

        def write(rows: range, image_columns: list[str]) -> bytes:
            sent = {name: [columns[name][row] for row in rows] for name in self.columns or ()}
            sent |= {name: list(map(open_image, sent[name])) for name in image_columns}
            groups = [0] * len(rows) if self.is_groupwise else None
            samples = [self._choose_frames(completions[row]) for row in rows]
            asked = [prompts[row] for row in rows]
            return write_request(samples, asked, sent, groups, fps, self.body, sampling_rate, self.takes_latents)

        async with self.open_client() as client:
            await asyncio.gather(*(self._look(client, server) for server in self.servers if not server.is_alive))
            while pending:
                alive = [server for server in self.servers if server.is_alive]
                if not alive:
                    # a server with a good /health may fail every batch, so only a scored batch restarts the wait
                    unscored = sum(map(len, pending))
                    gone = time.monotonic() if gone is None or unscored < left else gone
                    left = unscored
                    await self._wait_for_any(client, gone + self.wait)
                    alive = [server for server in self.servers if server.is_alive]
                workers = [self._work(client, server, pending, write, scores) for server in alive * self.concurrency]
                await gather_or_cancel(workers)
        return scores

    def open_client(self) -> httpx2.AsyncClient:
        import httpx2

        token = {"Authorization": f"Bearer {os.environ[self.token_env]}"} if self.token_env else {}
        headers = {"Content-Type": CONTENT_TYPES[self.body], "Accept-Encoding": "identity", **token}
        return httpx2.AsyncClient(headers=headers, trust_env=False)

    def _choose_frames(self, sample: Any) -> Any:
        """Choose the frames of a video to send; return an image as it is."""
        if self.num_frames is None or not isinstance(sample, list):
            return sample
        return [sample[place] for place in frame_positions(self.num_frames, len(sample))]

    async def _work(
        self, client: httpx2.AsyncClient, server: _Server, pending: list[range], write: Callable, scores: list
    ) -> None:
        """Take batches for one server until none is left or the server fails."""
        while pending and server.is_alive:
            rows = pending.pop()
            if server.most is not None and len(rows) > server.most:
                pending.append(rows[server.most :])
                rows = rows[: server.most]
            try:
                async with server.slots:
                    answer = await self.score_batch(client, server, rows, write)
            except _Broken as error:
                pending.append(rows)
                self._take_out(server, str(error))
            except _TooLarge as error:
                pending.append(rows)
                self._send_fewer(server, len(rows), str(error))
            else:
                for row, value in zip(rows, answer, strict=True):
                    scores[row] = value

    def _take_out(self, server: _Server, reason: str) -> None:
        if server.is_alive:
            server.is_alive, server.reason = False, reason.rstrip(".")
            warnings.warn(f"The reward server {server.url} is taken out: {server.reason}.", stacklevel=2)

    def _send_fewer(self, server: _Server, count: int, reason: str) -> None:
        """Send a server at most half as many samples in a request as it refused."""
        if server.most is None or count // 2 < server.most:
            server.most = count // 2
            text = f"The reward server {server.url} refused {count} samples in one request"
            warnings.warn(f"{text}; it gets at most {server.most} from now on. Its reason: {reason}", stacklevel=2)

    async def score_batch(
        self, client: httpx2.AsyncClient, server: _Server, rows: range, write: Callable[[range, list[str]], bytes]
    ) -> list[float | None]:
        """Score one batch, with retries; raise `_Broken` to give up the server, `_TooLarge` to send fewer samples."""
        body: bytes | None = None
        attempt, patience, scored = 0, time.monotonic() + self.timeout, None
        while True:
            try:
                name, image_columns = await self._describe(client, server)
                body = body or await asyncio.to_thread(write, rows, image_columns)
                url = f"{server.url}/score/{quote(name, safe='')}"
                answer = await ask(client, "POST", url, self.timeout, content=body)
                if answer.status_code not in BUSY:
                    if answer.status_code == 413 and len(rows) > 1 and not self.is_groupwise:
                        raise _TooLarge(read_error(answer))
                    return _read_scores(answer, len(rows), server.url)
            except FailedRequest as error:
                if attempt >= self.retries:
                    raise _Broken(f"{attempt + 1} requests failed, the last with: {error}") from error
                await asyncio.sleep(self.backoff * 2**attempt)
                attempt += 1
                continue
            # other processes may take each place that becomes free, so a queue may stay full while the server scores
            if (count := answer.headers.get(SCORED)) != scored:
                scored, patience = count, time.monotonic() + self.timeout
            if time.monotonic() > patience:
                raise _Broken(f"its queue was full for {self.timeout:g} seconds")
            await asyncio.sleep(seconds_to_wait(answer, self.backoff))

    async def _describe(self, client: httpx2.AsyncClient, server: _Server) -> tuple[str, list[str]]:
        """Return the name of the reward at a server, and the columns to send as images."""
        if server.served is None:
            answer = await ask(client, "GET", f"{server.url}/health", min(HEALTH_SECONDS, self.timeout))
            _check_status(answer, server.url)
            served = read_object(answer).get("served")
            if not served or not isinstance(served, dict):
                raise FailedRequest("its /health names no rewards")
            server.served = served
        names = [self.reward] if self.reward is not None else list(server.served)
        if len(names) != 1 or names[0] not in server.served:
            raise RewardError(f"finds {', '.join(server.served)} at {server.url}; set reward to one of these")
        image_columns = server.served[names[0]].get("image_columns", []) if self.opens_paths else []
        return names[0], [name for name in self.columns or () if name in image_columns]

    async def _look(self, client: httpx2.AsyncClient, server: _Server) -> None:
        """Use a server again if it answers."""
        server.served = server.most = None  # it may serve other rewards now
        with contextlib.suppress(FailedRequest, RewardError):
            await self._describe(client, server)
            server.is_alive = True

    async def _wait_for_any(self, client: httpx2.AsyncClient, end: float) -> None:
        """Wait until a server is back, for at least one poll; raise RewardError if none is at `end`."""
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
        if self.wait > 0:
            warnings.warn(
                f"No reward server is left; waiting up to {self.wait:g} s for one ({reasons}).", stacklevel=2
            )
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(POLL_SECONDS, left))
            await asyncio.gather(*(self._look(client, server) for server in self.servers))
            if any(server.is_alive for server in self.servers):
                return
        raise RewardError(
            f"has no server left ({reasons}); start one with `diffusion-grpo rewards serve`, or see in the output of "
            "a running one why its reward failed"
        )


def _check_status(answer: httpx2.Response, url: str) -> None:
    """Raise RewardError if a server refuses a request, FailedRequest if it fails in another way."""
    if answer.status_code in REFUSALS:
        raise RewardError(f"was refused by {url} ({answer.status_code}): {read_error(answer)}")
    if answer.status_code != 200:
        raise FailedRequest(f"status {answer.status_code}, {read_error(answer)}")


def _read_scores(answer: httpx2.Response, count: int, url: str) -> list[float | None]:
    _check_status(answer, url)
    scores = read_object(answer).get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise FailedRequest(f"it answered {answer.text[:200]!r}, expected {count} scores")
    return scores
