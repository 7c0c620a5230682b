"""Reward: whatever `diffusion-grpo rewards serve` serves, in another process, environment or machine.

In: samples, prompts and chosen columns. Out: the servers' scores. Batches go to all servers at once, each takes the
next one when it is free; one that fails is taken out and noted, and asked again at the next scoring.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

from .http import FailedRequest, json_object, seconds_to_wait, sentence, transport_errors
from .score import RewardError
from .wire import write_request

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 5.0
POLL_SECONDS = 2.0  # between looks for a server that is back
BUSY = (429, 503)
REFUSALS = (400, 401, 403, 404, 413)  # asking again would not help


class _Broken(Exception):
    """A server did not give a usable answer."""


@dataclasses.dataclass
class _Server:
    url: str
    is_alive: bool = True
    reason: str = ""


class RemoteReward:
    """A reward computed by servers; async, so that several are asked at the same time.

    Args:
        url: of a server, such as `http://127.0.0.1:8000`, or a list of these.
        reward: its name there; may be left out where the server has one only.
        columns: dataset columns to send along: pictures, or what JSON has. None are sent otherwise.
        batch_size: samples in one request.
        concurrency: requests under way at one server.
        timeout: seconds for one request, and for a server whose queue is full to take it.
        retries: how often a failed request is made again at the same server before it is taken out.
        backoff: seconds before the first retry; doubled for each further one.
        wait: seconds to wait for a server to come back when all are gone; 0 stops the run.
        token_env: name of the environment variable with the token that the servers ask for.
        groupwise: the reward there compares the samples of a prompt: they are sent together, one prompt a request.

    Raises:
        ValueError: no url, or a number out of its range.
        RewardError: when called: all servers are gone, or one refuses the request.
    """

    def __init__(
        self,
        url: str | list,
        reward: str | None = None,
        columns: list | None = None,
        batch_size: int = 16,
        concurrency: int = 2,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 0.5,
        wait: float = 0.0,
        token_env: str | None = None,
        groupwise: bool = False,
    ):
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or not all(isinstance(one, str) and one.startswith(("http://", "https://")) for one in urls):
            raise ValueError(f"remote: url is {url!r}; give http://host:port, or a list of these.")
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("concurrency", concurrency, 1),
            ("retries", retries, 0),
            ("backoff", backoff, 0),
            ("wait", wait, 0),
        ):
            if value < least:
                raise ValueError(f"remote: {name} is {value}; use at least {least}.")
        if timeout <= 0:
            raise ValueError(f"remote: timeout is {timeout}; it must be above 0 seconds.")
        if token_env is not None and not os.environ.get(token_env):
            raise ValueError(f"remote: token_env names {token_env}, but no such environment variable is set.")
        self.servers = [_Server(one.rstrip("/")) for one in urls]
        self.reward, self.columns, self.token_env = reward, list(columns or []), token_env
        self.batch_size, self.concurrency = batch_size, concurrency
        self.timeout, self.retries, self.backoff, self.wait = timeout, retries, backoff, wait
        self.is_groupwise = groupwise

    async def __call__(
        self, completions: list, prompts: list[str], fps: float | None = None, **columns
    ) -> list[float | None]:
        """Scores pictures or videos; see the class."""
        import httpx2

        for name in self.columns:
            if name not in columns:
                raise RewardError(f"is to send the column {name!r}, which the dataset lacks")
        size = len(completions) if self.is_groupwise else self.batch_size
        pending = [range(start, min(start + size, len(completions))) for start in range(0, len(completions), size)]
        pending.reverse()  # taken from the end
        scores: list[float | None] = [None] * len(completions)

        def body(rows: range) -> bytes:
            sent = {name: [columns[name][row] for row in rows] for name in self.columns}
            groups = [0] * len(rows) if self.is_groupwise else None
            return write_request([completions[r] for r in rows], [prompts[r] for r in rows], sent, groups, fps)

        headers = {"Authorization": f"Bearer {os.environ[self.token_env]}"} if self.token_env else {}
        limit = httpx2.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout))
        async with httpx2.AsyncClient(headers=headers, timeout=limit, trust_env=False) as client:
            await asyncio.gather(*(self._look(client, server) for server in self.servers if not server.is_alive))
            while pending:
                alive = [server for server in self.servers if server.is_alive]
                if not alive:
                    await self._wait_for_any(client)
                workers = [self._work(client, server, pending, body, scores) for server in alive * self.concurrency]
                await _all_or_first_error(workers)
        return scores

    async def _work(
        self, client: httpx2.AsyncClient, server: _Server, pending: list[range], body: Any, scores: list
    ) -> None:
        """Takes batches for one server until none is left or the server fails."""
        while pending and server.is_alive:
            rows = pending.pop()
            try:
                answer = await self._ask(client, server, await asyncio.to_thread(body, rows), len(rows))
            except _Broken as error:
                pending.append(rows)
                self._take_out(server, str(error))
            else:
                for row, value in zip(rows, answer, strict=True):
                    scores[row] = value

    def _take_out(self, server: _Server, reason: str) -> None:
        if server.is_alive:
            server.is_alive, server.reason = False, reason
            warnings.warn(f"The reward server {server.url} is taken out: {reason}.", stacklevel=2)

    async def _ask(self, client: httpx2.AsyncClient, server: _Server, body: bytes, count: int) -> list[float | None]:
        """One batch, with retries; `_Broken` when the server is to be given up."""
        attempt, patience = 0, time.monotonic() + self.timeout
        while True:
            try:
                name = self.reward or await self._only_reward(client, server)
                response = await client.post(f"{server.url}/score/{name}", content=body)
                if response.status_code in BUSY:
                    if time.monotonic() > patience:
                        raise _Broken(f"its queue was full for {self.timeout:g} seconds")
                    await asyncio.sleep(seconds_to_wait(response.headers.get("Retry-After"), self.backoff))
                    continue
                return _scores(response, count)
            except (FailedRequest, *transport_errors()) as error:
                reason = str(error) or type(error).__name__
                if attempt == self.retries:
                    raise _Broken(f"{attempt + 1} requests failed, the last with: {reason}") from error
                await asyncio.sleep(self.backoff * 2**attempt)
                attempt += 1

    async def _only_reward(self, client: httpx2.AsyncClient, server: _Server) -> str:
        response = await client.get(f"{server.url}/health")
        if response.status_code in REFUSALS:
            raise RewardError(f"was refused by {server.url}: {sentence(response)}")
        names = json_object(response).get("rewards")
        if not isinstance(names, list) or not names:
            raise FailedRequest(f"/health answered {response.text[:200]!r}")
        if len(names) > 1:
            raise RewardError(f"has no `reward`, and {server.url} serves several: {', '.join(map(str, names))}")
        return str(names[0])

    async def _look(self, client: httpx2.AsyncClient, server: _Server) -> None:
        """Takes a server in again that answers."""
        try:
            response = await client.get(f"{server.url}/health", timeout=CONNECT_SECONDS)
        except transport_errors():
            return
        server.is_alive = response.status_code == 200

    async def _wait_for_any(self, client: httpx2.AsyncClient) -> None:
        """Returns when a server is back; RewardError when none is after `wait` seconds."""
        end = time.monotonic() + self.wait
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
        if self.wait > 0:
            warnings.warn(f"All reward servers are gone, waiting up to {self.wait:g} s ({reasons}).", stacklevel=2)
        while time.monotonic() < end:
            await asyncio.gather(*(self._look(client, server) for server in self.servers))
            if any(server.is_alive for server in self.servers):
                return
            await asyncio.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
        raise RewardError(f"has no server left ({reasons}); start one with `diffusion-grpo rewards serve`")


async def _all_or_first_error(workers: list) -> None:
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _scores(response: httpx2.Response, count: int) -> list[float | None]:
    """The checked scores of an answer; RewardError for a refusal, `FailedRequest` for everything else that is none."""
    if response.status_code in REFUSALS:
        raise RewardError(f"was refused by {response.url} ({response.status_code}): {sentence(response)}")
    if response.status_code != 200:
        raise FailedRequest(f"status {response.status_code}, {sentence(response)}")
    scores = json_object(response).get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"{response.text[:200]!r}"
        raise FailedRequest(f"it answered {found}, expected {count} scores")
    for value in scores:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            raise FailedRequest(f"it answered the score {value!r}, expected a finite number or null")
    return scores
