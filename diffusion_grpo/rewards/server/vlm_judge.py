"""The rewards `vlm_judge` and `unified_reward`: numbers in a vision-language model's replies about each sample.

They work with any server for OpenAI's chat completions (vLLM, SGLang, llama.cpp, OpenAI itself). Failed requests are
retried. A reply without a readable number gives no reward for that sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import string
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from ...media.samples import frame_positions
from ..call import RewardError, run_in_loop
from ..contract import check_package
from ..models.qwen_vl import read_template
from .wire import (
    HEALTH_SECONDS,
    FailedRequest,
    ask,
    check_at_least_one,
    check_url,
    gather_or_cancel,
    read_error,
    read_object,
    seconds_to_wait,
    write_image,
)

if TYPE_CHECKING:
    import httpx2

PASSING = (408, 409, 425, 429)  # statuses below 500 after which a retry may succeed
ALTERNATIVES = 20  # likeliest first tokens to request; OpenAI's maximum
# finds the 8 in "8/10", "8 / 10", "8 out of 10" and "8 of 10", but also in "a score of 8"
NUMBER = r"(?<![\d./])(?<!/ )(?<!out of )(?<!\d of )([-+]?(?:\d+(?:\.\d+)?|\.\d+))"


@dataclasses.dataclass
class VlmJudge:
    """A reward that asks a vision-language model about each sample; it is async, to ask many questions at once.

    Args:
        url: URL of the server up to the version, such as `http://127.0.0.1:8000/v1`.
        model: name of the model at the server.
        template: the question, which comes after the images. `{prompt}` stands for the prompt, `{name}` for the
            dataset column of that name; double other braces.
        answer: `score` reads a number from the reply. `yes_no` gives P(yes) / (P(yes) + P(no)) from the
            log-probabilities of the reply's first token.
        pattern: a regular expression whose first group is the number; its last match in the reply counts.
        score_range: [lowest, highest] valid number; others give None.
        video_template: the question about videos, if it differs.
        video_score_range: the range for videos, if it differs.
        num_frames: number of frames of a video to show, evenly spaced and including the first and last.
        max_tokens: maximum length of a reply.
        concurrency: number of concurrent requests.
        timeout: seconds for one request.
        retries: how often a request is repeated after a failure of the connection or the server.
        backoff: seconds before the first retry; doubled for each further one.
        api_key_env: name of the environment variable with the key. The key is sent to the server and never written to
            disk.
        extra: further fields of the request, such as `{"seed": 0}`; None removes a field that this server refuses.

    Raises:
        ValueError: an argument is out of range, the URL holds a key, or the variable is not set.
        RewardError: when called, if a request is refused or gets no answer after all retries.

    Examples:
        >>> question = "Does this image show {prompt}? Answer yes or no."
        >>> judge = VlmJudge("http://127.0.0.1:8000/v1", "Qwen/Qwen3-VL-8B-Instruct", question, answer="yes_no")
        >>> judge.num_frames  # it asks nothing yet
        8
    """

    url: str
    model: str
    template: str
    answer: Literal["score", "yes_no"] = "score"
    pattern: str = NUMBER
    score_range: list | None = None
    video_template: str | None = None
    video_score_range: list | None = None
    num_frames: int = 8
    max_tokens: int = 512
    concurrency: int = 16
    timeout: float = 120.0
    retries: int = 3
    backoff: float = 1.0
    api_key_env: str | None = None
    extra: dict | None = None

    def __post_init__(self):
        check_url(self.url, "vlm_judge", "http://host:port/v1", "api_key_env")
        check_at_least_one("vlm_judge", self, "num_frames", "max_tokens", "concurrency")
        try:
            has_group = re.compile(self.pattern).groups > 0
        except re.error as error:
            raise ValueError(f"vlm_judge: pattern {self.pattern!r} is no regular expression: {error}") from error
        if not has_group:
            raise ValueError(f"vlm_judge: pattern {self.pattern!r} has no group; put the number into round brackets.")
        for limits in (self.score_range, self.video_score_range):
            if limits is not None and not (len(limits) == 2 and limits[0] < limits[1]):
                raise ValueError(f"vlm_judge: score_range is {limits!r}; write two numbers, [lowest, highest].")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"vlm_judge: api_key_env names {self.api_key_env}, but no such variable is set.")
        self.url = self.url.rstrip("/")
        self._slots = asyncio.Semaphore(self.concurrency)  # over all calls that are awaited together
        self.needed_columns = (_fields(self.template) | _fields(self.video_template or "")) - {"prompt"}

    def check_needs(self) -> None:
        """Raise an error if the HTTP client is missing or the server cannot be reached."""
        check_package("httpx2", 'pip install "diffusion-grpo[rewards]"')
        run_in_loop(self._check_server()).result()

    async def _check_server(self) -> None:
        async with self._open_client() as client:
            try:
                await ask(client, "GET", f"{self.url}/models", min(HEALTH_SECONDS, self.timeout))  # any answer will do
            except FailedRequest as error:
                raise ValueError(f"no server answers at {self.url} ({error}); start it first.") from error

    def _open_client(self) -> httpx2.AsyncClient:
        import httpx2

        headers = {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}
        # a proxy set in the environment cannot reach a server on this machine
        direct = dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]"))
        return httpx2.AsyncClient(headers=headers, mounts=direct)

    def __hash__(self) -> int:
        return hash((type(self), self.url, self.model))

    async def __call__(
        self, completions: list, prompts: list[str], log_metric: Callable | None = None, **columns
    ) -> list[float | None]:
        """Return one number per image or video; None if the reply has none."""

        async def score(row: int) -> float | None:
            async with self._slots:
                values = {name: columns[name][row] for name in self.needed_columns}
                body = await asyncio.to_thread(self._body, completions[row], {**values, "prompt": prompts[row]})
                return await self._ask(client, body)

        async with self._open_client() as client:
            scores = await gather_or_cancel([score(row) for row in range(len(completions))])
        if log_metric is not None and scores:
            log_metric("vlm_judge/unread", scores.count(None) / len(scores))
        return scores

    def _body(self, sample: Any, values: dict[str, Any]) -> dict[str, Any]:
        """Build the request about one sample, with what `_read` needs to know about it."""
        frames = sample if isinstance(sample, list) else [sample]
        strange = [frame for frame in frames if not isinstance(frame, Image.Image)]
        if strange:
            raise RewardError(f"judges images and videos, but the samples are {type(strange[0]).__name__}")
        shown = [frames[place] for place in frame_positions(self.num_frames, len(frames))]
        is_video = isinstance(sample, list)
        text = (is_video and self.video_template or self.template).format(**values)
        urls = [f"data:image/png;base64,{write_image(frame)}" for frame in shown]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        kind = {"max_tokens": self.max_tokens}
        if self.answer == "yes_no":
            kind = {"max_tokens": 1, "logprobs": True, "top_logprobs": ALTERNATIVES}
        request = {"model": self.model, "messages": [message], "temperature": 0, **kind, **(self.extra or {})}
        return {"request": {k: v for k, v in request.items() if v is not None}, "is_video": is_video}

    async def _ask(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> float | None:
        for attempt in range(self.retries + 1):
            wait = self.backoff * 2**attempt
            try:
                url = f"{self.url}/chat/completions"
                answer = await ask(client, "POST", url, self.timeout, json=body["request"])
                if answer.status_code == 200:
                    return self._read(_choice(answer), body["is_video"])
                reason = f"status {answer.status_code}, {read_error(answer)}"
                if answer.status_code < 500 and answer.status_code not in PASSING:
                    raise RewardError(f"was refused by {self.url}: {reason}")
                wait = seconds_to_wait(answer, wait)
            except FailedRequest as error:
                reason = str(error)
            if attempt < self.retries:
                await asyncio.sleep(wait)
        raise RewardError(f"got no answer from {self.url} in {self.retries + 1} requests, the last with: {reason}")

    def _read(self, choice: dict[str, Any], is_video: bool) -> float | None:
        if self.answer == "yes_no":
            return _yes(choice)
        text = (choice.get("message") or {}).get("content")
        if not isinstance(text, str):
            return None
        numbers = [match[1] for match in re.finditer(self.pattern, text)]
        try:
            value = float(numbers[-1])
        except (IndexError, TypeError, ValueError):
            warnings.warn(f"A reply of {self.model} holds no score: {text[-200:]!r}.", stacklevel=2)
            return None
        low, high = (is_video and self.video_score_range) or self.score_range or (-math.inf, math.inf)
        return value if math.isfinite(value) and low <= value <= high else None


@dataclasses.dataclass
class UnifiedReward(VlmJudge):
    """UnifiedReward's score (https://huggingface.co/papers/2503.05236): 1 to 5 of an image, 1 to 10 of a video."""

    model: str = "UnifiedReward"
    template: str = read_template("unified_reward_image")
    pattern: str = r"Final Score:\W*?" + NUMBER
    score_range: list | None = dataclasses.field(default_factory=lambda: [1, 5])
    video_template: str | None = read_template("unified_reward_video")
    video_score_range: list | None = dataclasses.field(default_factory=lambda: [1, 10])
    max_tokens: int = 1024

    __hash__ = VlmJudge.__hash__


def _fields(template: str) -> set[str]:
    """Return the names in a template's braces."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"vlm_judge: the template cannot be filled in ({error}); double other braces.") from error
    if strange := sorted(name for name in names if not name.isidentifier()):
        raise ValueError(
            f"vlm_judge: the template has {{{strange[0]}}}, which is not the name of a column; double other braces."
        )
    return names


def _choice(answer: httpx2.Response) -> dict[str, Any]:
    """Return the first reply in an answer; raise FailedRequest if there is none."""
    choices = read_object(answer).get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise FailedRequest(f"it answered {answer.text[:200]!r}, expected choices")
    return choices[0]


def _yes(choice: dict[str, Any]) -> float | None:
    """Return P(yes) / (P(yes) + P(no)) of the first token, ignoring case and spaces; None if neither is likely."""
    try:
        likeliest = choice["logprobs"]["content"][0]["top_logprobs"]
        pairs = [(str(one["token"]).strip().lower(), float(one["logprob"])) for one in likeliest]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardError("asks for log-probabilities, which this server does not give; use answer: score") from error
    yes, no = (sum(math.exp(value) for token, value in pairs if token == word) for word in ("yes", "no"))
    return yes / (yes + no) if yes + no > 0 else None
