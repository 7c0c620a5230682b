"""The reward `remote`: any reward that `diffusion-grpo rewards serve` serves in another process or on another machine.

Each server takes the next batch when it is free. A server that fails is taken out with a warning, and tried again at
the next scoring.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
import warnings
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
    Answer,
    Body,
    FailedRequest,
    ask,
    check_limits,
    check_url,
    gather_or_cancel,
    read_error,
    read_object,
    seconds_to_wait,
    transport_errors,
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
    served: dict[str, Any] | None = None  # answer of /health about each reward, once requested
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
        check_limits("remote", self, batch_size=1, concurrency=1, retries=0, backoff=0, wait=0, num_frames=1)
        self.columns = self._columns = list(self.columns or [])
        if provided := sorted({*self._columns} & {*PROVIDED}):
            raise ValueError(f"remote: columns names {provided[0]!r}, which is no column where rewards are called.")
        if self.latents and self.body != "safetensors":
            raise ValueError(
                f"remote: latents cannot be sent as {self.body}, which is for images; add `body: safetensors`."
            )
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise ValueError(f"remote: token_env names {self.token_env}, but no such environment variable is set.")
        self.url = [url.rstrip("/") for url in urls]
        self.servers = [_Server(url, asyncio.Semaphore(self.concurrency)) for url in self.url]
        self.needed_columns = {*self._columns}
        self.is_groupwise, self.takes_latents = self.groupwise, self.latents  # contract.py reads these marks

    def __hash__(self) -> int:
        return hash((type(self), self.reward))

    def check_needs(self) -> None:
        """Raise an error if the HTTP client is missing, all servers are down, or one does not serve the reward."""
        check_package("httpx2", 'pip install "diffusion-grpo[rewards]"')
        run_in_loop(self._check_servers()).result()

    async def _check_servers(self) -> None:
        import httpx2

        reasons = []
        async with httpx2.AsyncClient(headers=self._headers(), trust_env=False) as client:
            for server in self.servers:
                try:
                    answer = await ask(client, "GET", f"{server.url}/health", min(HEALTH_SECONDS, self.timeout))
                    names = read_object(answer).get("rewards") if answer.status == 200 else None
                except (FailedRequest, *transport_errors()) as error:
                    reasons.append(f"{server.url}: {str(error) or type(error).__name__}")
                    continue
                if isinstance(names, list) and (self.reward not in names if self.reward else len(names) > 1):
                    raise ValueError(f"{server.url} serves {', '.join(map(str, names))}; set reward to one of these.")
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
        import httpx2

        for name in self._columns:
            if name not in columns:
                raise RewardError(f"is to send the column {name!r}, which the dataset lacks")
        size = len(completions) if self.is_groupwise else self.batch_size
        pending = [range(start, min(start + size, len(completions))) for start in range(0, len(completions), size)]
        pending.reverse()  # workers take batches from the end
        left, gone = len(completions), None  # time since which no server has scored anything
        scores: list[float | None] = [None] * len(completions)

        def body(rows: range, images: list[str]) -> bytes:
            sent = {name: [columns[name][row] for row in rows] for name in self._columns}
            sent |= {name: list(map(open_image, sent[name])) for name in images}
            groups = [0] * len(rows) if self.is_groupwise else None
            samples = [self._choose_frames(completions[row]) for row in rows]
            asked = [prompts[row] for row in rows]
            return write_request(samples, asked, sent, groups, fps, self.body, sampling_rate, self.takes_latents)

        async with httpx2.AsyncClient(headers=self._headers(), trust_env=False) as client:
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
                workers = [self._work(client, server, pending, body, scores) for server in alive * self.concurrency]
                await gather_or_cancel(workers)
        return scores

    def _headers(self) -> dict[str, str]:
        token = {"Authorization": f"Bearer {os.environ[self.token_env]}"} if self.token_env else {}
        return {"Content-Type": CONTENT_TYPES[self.body], "Accept-Encoding": "identity", **token}

    def _choose_frames(self, sample: Any) -> Any:
        """Choose the frames of a video to send; return an image as it is."""
        if self.num_frames is None or not isinstance(sample, list):
            return sample
        return [sample[place] for place in frame_positions(self.num_frames, len(sample))]

    async def _work(
        self, client: httpx2.AsyncClient, server: _Server, pending: list[range], body: Any, scores: list
    ) -> None:
        """Take batches for one server until none is left or the server fails."""
        while pending and server.is_alive:
            rows = pending.pop()
            if server.most is not None and len(rows) > server.most:
                pending.append(rows[server.most :])
                rows = rows[: server.most]
            try:
                async with server.slots:
                    images = self._find_image_columns(await self._describe(client, server), server.url)
                    content = await asyncio.to_thread(body, rows, images)
                    answer = await self.score_batch(client, server, content, len(rows))
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
            warnings.warn(f"The reward server {server.url} is taken out: {reason.rstrip('.')}.", stacklevel=2)

    def _send_fewer(self, server: _Server, count: int, reason: str) -> None:
        """Send a server at most half as many samples in a request as it refused."""
        if server.most is None or count // 2 < server.most:
            server.most = count // 2
            text = f"The reward server {server.url} refused {count} samples in one request"
            warnings.warn(f"{text}; it gets at most {server.most} from now on. Its reason: {reason}", stacklevel=2)

    async def score_batch(
        self, client: httpx2.AsyncClient, server: _Server, body: bytes, count: int
    ) -> list[float | None]:
        """Score one batch, with retries; raise `_Broken` to give up the server, `_TooLarge` to send it fewer samples.

        A server whose queue is full is given up only if it scores nothing for `timeout` seconds: other processes may
        take each place that becomes free.
        """
        attempt, patience, scored = 0, time.monotonic() + self.timeout, None
        while True:
            try:
                name = self.reward or await self._only_reward(client, server)
                answer = await ask(
                    client, "POST", f"{server.url}/score/{quote(name, safe='')}", self.timeout, content=body
                )
                if answer.status in BUSY:
                    if (count_now := answer.headers.get(SCORED)) != scored:
                        scored, patience = count_now, time.monotonic() + self.timeout
                    if time.monotonic() > patience:
                        raise _Broken(f"its queue was full for {self.timeout:g} seconds")
                    await asyncio.sleep(seconds_to_wait(answer.headers.get("retry-after"), self.backoff))
                    continue
                if answer.status == 413 and count > 1 and not self.is_groupwise:
                    raise _TooLarge(read_error(answer))
                return _scores(answer, count, server.url)
            except (FailedRequest, *transport_errors()) as error:
                await self._wait_to_retry(attempt, error)
                attempt += 1

    async def _wait_to_retry(self, attempt: int, error: Exception) -> None:
        """Wait before the next attempt; raise `_Broken` after the last."""
        if attempt == self.retries:
            reason = str(error) or type(error).__name__
            raise _Broken(f"{attempt + 1} requests failed, the last with: {reason}") from error
        await asyncio.sleep(self.backoff * 2**attempt)

    async def _describe(self, client: httpx2.AsyncClient, server: _Server) -> dict[str, Any]:
        """Return a server's description of the reward.

        How columns are sent depends on it, so with columns, a server that does not answer is asked again, and raises
        `_Broken` in the end. Without, the description is empty then, and the next request will show what is wrong.
        """
        attempt = 0
        while server.served is None:
            try:
                answer = await ask(client, "GET", f"{server.url}/health", min(HEALTH_SECONDS, self.timeout))
                if answer.status == 200:
                    found = read_object(answer).get("served")
                    server.served = found if isinstance(found, dict) else {}
                elif answer.status in BUSY or answer.status >= 500:
                    raise FailedRequest(f"/health answered with status {answer.status}")
                break
            except (FailedRequest, *transport_errors()) as error:
                if not self.columns:
                    break
                await self._wait_to_retry(attempt, error)
                attempt += 1
        asked = [self.reward] if self.reward is not None else [*(server.served or ())]
        about = (server.served or {}).get(asked[0]) if len(asked) == 1 else None
        return about if isinstance(about, dict) else {}

    def _find_image_columns(self, about: dict[str, Any], url: str) -> list[str]:
        """Return the columns to send as images; refuse a reward that needs more samples together than are sent."""
        if about.get("batchwise"):
            raise RewardError(
                f"compares all samples of a rollout, but a request to {url} contains only some of them; use it here"
            )
        if about.get("groupwise") and not self.is_groupwise:
            raise RewardError(f"compares the samples of a prompt at {url}; add `groupwise: true`")
        expected = about.get("image_columns")
        return [name for name in self._columns if self.opens_paths and isinstance(expected, list) and name in expected]

    async def _only_reward(self, client: httpx2.AsyncClient, server: _Server) -> str:
        answer = await ask(client, "GET", f"{server.url}/health", min(HEALTH_SECONDS, self.timeout))
        if answer.status in REFUSALS:
            raise RewardError(f"was refused by {server.url}: {read_error(answer)}")
        names = read_object(answer).get("rewards")
        if not isinstance(names, list) or not names:
            raise FailedRequest(f"/health answered {answer.text[:200]!r}")
        if len(names) > 1:
            raise RewardError(f"has no `reward`, and {server.url} serves several: {', '.join(map(str, names))}")
        return str(names[0])

    async def _look(self, client: httpx2.AsyncClient, server: _Server) -> None:
        """Use a server again if it answers."""
        try:
            answer = await ask(client, "GET", f"{server.url}/health", HEALTH_SECONDS)
        except (FailedRequest, *transport_errors()):
            return
        # it may serve other rewards now
        server.is_alive, server.served, server.most = answer.status == 200, None, None

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


def _scores(answer: Answer, count: int, url: str) -> list[float | None]:
    """Return the checked scores of an answer; raise RewardError if refused, `FailedRequest` for any other failure."""
    if answer.status in REFUSALS:
        raise RewardError(f"was refused by {url} ({answer.status}): {read_error(answer)}")
    if answer.status != 200:
        raise FailedRequest(f"status {answer.status}, {read_error(answer)}")
    scores = read_object(answer).get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"{answer.text[:200]!r}"
        raise FailedRequest(f"it answered {found}, expected {count} scores")
    for value in scores:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            raise FailedRequest(f"it answered the score {value!r}, expected a finite number or null")
    return scores
