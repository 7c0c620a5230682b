"""The wire format between `remote.py` and `serve.py`.

A body is JSON with PNGs or MP4s in base64, or a safetensors file with the same JSON in one of its tensors. Data from
outside is checked here: sizes, types, formats, and how many pixels a few bytes expand to. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import ipaddress
import json
import urllib.parse
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image

from ...media.samples import convert_image

if TYPE_CHECKING:
    import httpx2

MAX_PIXELS = 2**28  # of all images in a request together, e.g. 64 of 2048 x 2048
Body = Literal["png", "mp4", "mp4_lossy", "safetensors"]
CONTENT_TYPES = {"png": "application/json", "mp4": "application/json", "mp4_lossy": "application/json"}
CONTENT_TYPES |= {"safetensors": "application/safetensors"}
HEALTH_SECONDS = 5.0  # time limit of an answer that needs no scoring
CONNECT_SECONDS = 5.0
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds before a busy server is asked again, whatever its Retry-After
MAX_ANSWER = 2**22  # bytes; scores need far less
SCORED = "x-scored"  # header of a refusal because of a full queue: how many requests were scored so far


class WireError(ValueError):
    """A body is malformed, or too large (`is_too_large`)."""

    def __init__(self, sentence: str, is_too_large: bool = False):
        super().__init__(sentence)
        self.is_too_large = is_too_large


def write_request(
    samples: list,
    prompts: list[str],
    columns: dict[str, list],
    groups: list[int] | None,
    fps: float | None,
    body: Body = "png",
    sampling_rate: int | None = None,
    are_latents: bool = False,
) -> bytes:
    """Write the body of a request."""
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "samples": [_write_sample(sample, f"sample.{row}", body, tensors) for row, sample in enumerate(samples)],
        "prompts": prompts,
        "columns": {
            name: [_write_value(value, f"column.{name}.{row}", body, tensors) for row, value in enumerate(values)]
            for name, values in columns.items()
        },
        "groups": groups,
        "fps": fps,
        "sampling_rate": sampling_rate,
        "are_latents": are_latents,
        "sounds": _write_sounds(samples),
    }
    text = json.dumps(content).encode()
    if body != "safetensors":
        return text
    from safetensors.torch import save

    return save(tensors | {"request": torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def read_request(body: bytes, max_pixels: int = MAX_PIXELS, is_safetensors: bool = False) -> dict[str, Any]:
    """Return the arguments of `write_request`, with PIL images in RGB, and tensors for arrays.

    All samples are of one kind.
    """
    tensors = _read_tensors(body) if is_safetensors else {}
    try:
        content = json.loads(bytes(tensors.pop("request").numpy()) if is_safetensors else body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"The body is not JSON ({error}).") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list) or not content["samples"]:
        raise WireError("The body must be a JSON object with a list of samples that is not empty.")
    count, source = len(content["samples"]), _Source(max_pixels, tensors)
    columns = content.get("columns") or {}
    _check_lists(content, columns, count)
    kinds = {_find_kind(sample) for sample in content["samples"]}
    if len(kinds) != 1 or None in kinds:
        raise WireError(
            "samples must be of one kind: images (strings), videos (MP4s or non-empty lists of strings), or tensors."
        )
    samples = [_read_sample(sample, source) for sample in content["samples"]]
    samples, are_latents = _add_sounds(samples, content.get("sounds")), content.get("are_latents", False)
    if are_latents is not False and not (are_latents is True and kinds == {"tensor"}):
        raise WireError("are_latents must be false, or true for samples that are tensors.")
    columns = {name: [_read_value(value, source) for value in values] for name, values in columns.items()}
    return {"samples": samples, "columns": columns, "are_latents": are_latents} | {
        name: content.get(name) for name in ("prompts", "groups", "fps", "sampling_rate")
    }


class _Source:
    """The tensors of a request, and the number of pixels that it may still contain."""

    def __init__(self, left: int, tensors: dict[str, torch.Tensor]):
        self.left, self.tensors = left, tensors

    def take(self, pixels: int) -> None:
        self.left -= pixels
        if self.left < 0:
            raise WireError(
                "The images together have more pixels than this server accepts; send fewer per request.",
                is_too_large=True,
            )

    def tensor(self, name: Any) -> torch.Tensor:
        """Return a tensor, but only once, because many references to one tensor would become many copies."""
        if not isinstance(name, str) or name not in self.tensors:
            raise WireError(
                f"A sample or column names the tensor {name!r}, which the body does not hold, or is already used."
            )
        return self.tensors.pop(name)


def _check_lists(content: dict[str, Any], columns: Any, count: int) -> None:
    groups = content.get("groups")
    if not _is_list(content.get("prompts"), count, str):
        raise WireError(f"prompts must be a list of {count} strings, one per sample.")
    if not isinstance(columns, dict) or not all(_is_list(values, count, object) for values in columns.values()):
        raise WireError(f"columns must be an object whose values are lists of {count} values, one per sample.")
    if groups is not None and not _is_list(groups, count, int):
        raise WireError(f"groups must be null or a list of {count} whole numbers.")
    for name in ("fps", "sampling_rate"):
        value = content.get(name)
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise WireError(f"{name} must be null or a number above 0.")


def _is_list(values: Any, count: int, kind: type | tuple) -> bool:
    return isinstance(values, list) and len(values) == count and all(isinstance(value, kind) for value in values)


def _write_sample(sample: Any, name: str, body: Body, tensors: dict[str, torch.Tensor]) -> Any:
    is_video = isinstance(sample, list) and bool(sample) and all(isinstance(one, Image.Image) for one in sample)
    if body == "safetensors":
        if is_video or isinstance(sample, Image.Image):
            frames = [np.asarray(frame.convert("RGB")) for frame in (sample if is_video else [sample])]
            tensors[name] = torch.from_numpy(np.stack(frames) if is_video else frames[0].copy())
            return {"video" if is_video else "picture": name}
        tensors[name] = torch.as_tensor(sample).detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(sample, Image.Image):
        return _write_image(sample)
    if not is_video:
        raise WireError(
            f"A sample is a {type(sample).__name__}, neither an image nor a video; send it as safetensors."
        )
    return [_write_image(frame) for frame in sample] if body == "png" else {"mp4": _write_mp4(sample, body)}


def _write_value(value: Any, name: str, body: Body, tensors: dict[str, torch.Tensor]) -> Any:
    """Write a column's value, an image or a JSON value."""
    if not isinstance(value, Image.Image):
        return value
    if body != "safetensors":
        return {"png": _write_image(value)}
    tensors[name] = torch.from_numpy(np.array(convert_image(value, "RGB")))
    return {"png": {"tensor": name}}


def _find_kind(sample: Any) -> str | None:
    """Return the kind of a written sample, or None if its form is unknown."""
    if isinstance(sample, str):
        return "picture"
    if isinstance(sample, list):
        return "video" if sample else None
    [form] = sample if isinstance(sample, dict) and len(sample) == 1 else [None]
    return "video" if form == "mp4" else form if form in ("picture", "video", "tensor") else None


def _read_sample(sample: Any, source: _Source) -> Any:
    if isinstance(sample, str):
        return _read_image(sample, source)
    if isinstance(sample, list):
        return [_read_image(frame, source) for frame in sample]
    [(form, value)] = sample.items()
    if form == "mp4":
        return _read_mp4(value, source)
    if form == "tensor":
        return source.tensor(value).clone()
    frames = _read_pixels(source.tensor(value), 4 if form == "video" else 3, source)
    return frames if form == "video" else frames[0]


def _read_value(value: Any, source: _Source) -> Any:
    if not isinstance(value, dict) or set(value) != {"png"}:
        return value
    if isinstance(value["png"], dict):
        return _read_pixels(source.tensor(value["png"].get("tensor")), 3, source)[0]
    return _read_image(value["png"], source)


def _read_tensors(body: bytes) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file; the library checks sizes and offsets, and reads only numbers."""
    import safetensors.torch

    try:
        return safetensors.torch.load(body)
    except Exception as error:  # the library's own errors, and KeyError for a dtype that torch lacks
        raise WireError(f"The body is not a safetensors file ({type(error).__name__}: {error}).") from error


def _read_pixels(pixels: torch.Tensor, dimensions: int, source: _Source) -> list[Image.Image]:
    """Read images from `(height, width, 3)` or `(frames, height, width, 3)` uint8."""
    if pixels.dtype != torch.uint8 or pixels.ndim != dimensions or pixels.shape[-1] != 3 or not pixels.numel():
        raise WireError(f"Pixels are {pixels.dtype} {tuple(pixels.shape)}; expected uint8 (..., height, width, 3).")
    source.take(pixels.numel() // 3)
    return [Image.fromarray(frame) for frame in (pixels[None] if dimensions == 3 else pixels).numpy()]


def _write_image(image: Image.Image) -> str:
    buffer = io.BytesIO()
    convert_image(image, "RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _read_image(text: Any, source: _Source) -> Image.Image:
    """Read a PNG in base64; check its size in the header before decoding any pixel."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        source.take(image.width * image.height)
        return image.convert("RGB")
    except WireError:
        raise
    except Exception as error:  # PIL has no common class for the errors of broken files
        raise WireError(f"An image is not a PNG in base64 ({type(error).__name__}: {error}).") from error


def _write_mp4(frames: list[Image.Image], body: Body) -> str:
    from ...media.files import write_video

    buffer = io.BytesIO()
    write_video(list(frames), buffer, fps=1, is_lossless=body == "mp4")  # the true rate is sent separately
    return base64.b64encode(buffer.getvalue()).decode()


def _read_mp4(text: Any, source: _Source) -> list[Image.Image]:
    """Read an MP4 in base64 frame by frame, to stop early if a few bytes expand to too many frames."""
    import av

    try:
        data = io.BytesIO(base64.b64decode(text, validate=True))
        with av.open(data, format="mp4") as file:
            stream = file.streams.video[0]
            if stream.codec_context.name != "h264":
                raise WireError(f"A video is {stream.codec_context.name}, expected h264.")
            stream.codec_context.options = {
                "max_pixels": str(max(1, source.left))
            }  # limit per frame, checked before decoding
            frames = []
            for frame in file.decode(stream):
                source.take(frame.width * frame.height)
                frames.append(frame.to_image())
    except WireError:
        raise
    except Exception as error:  # from base64 or PyAV, and IndexError without a stream
        raise WireError(f"A video is not an MP4 in base64 ({type(error).__name__}: {error}).") from error
    if not frames:
        raise WireError("A video holds no frames, or frames larger than this server accepts.")
    return frames


def _write_sounds(samples: list) -> list | None:
    """Write the raw sound of videos that have one."""
    from ...media.files import VideoWithSound

    sounds = [sample if isinstance(sample, VideoWithSound) else None for sample in samples]
    if not any(sound is not None for sound in sounds):
        return None
    return [
        video
        and {
            "channels": len(video.sound),
            "rate": video.sampling_rate,
            "float32": base64.b64encode(np.ascontiguousarray(video.sound, dtype="<f4").tobytes()).decode(),
        }
        for video in sounds
    ]


def _add_sounds(samples: list, sounds: Any) -> list:
    from ...media.files import VideoWithSound

    if sounds is None:
        return samples
    if not _is_list(sounds, len(samples), (dict, type(None))) or not isinstance(samples[0], list):
        raise WireError("sounds must be null, or a list with one object or null per video.")
    whole = []
    for sample, sound in zip(samples, sounds, strict=True):
        try:
            data = sound and np.frombuffer(base64.b64decode(sound["float32"], validate=True), dtype="<f4")
            shape = sound and (int(sound["channels"]), -1)
            whole.append(VideoWithSound(sample, data.reshape(shape), int(sound["rate"])) if sound else sample)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # OverflowError: int() of infinity
            raise WireError(f"A sound is malformed ({type(error).__name__}: {error}).") from error
    return whole


# HTTP


class FailedRequest(Exception):
    """A request did not give a usable answer, but the next one may."""


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


async def gather_or_cancel(coroutines: list) -> list:
    """Return all results; at the first error, cancel the others before raising it."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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


def check_limits(name: str, reward: Any, **least: float) -> None:
    """Refuse settings of a reward below these; its time limit must be above 0."""
    for setting, limit in least.items():
        value = getattr(reward, setting)
        if value is not None and value < limit:
            raise ValueError(f"{name}: {setting} is {value}; use at least {limit}.")
    if reward.timeout <= 0:
        raise ValueError(f"{name}: timeout is {reward.timeout}; it must be above 0 seconds.")


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
