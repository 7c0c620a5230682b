"""The wire format between `remote.py` and `serve.py`, and the HTTP requests of `remote.py` and `vlm_judge.py`.

A body is JSON with PNGs or MP4s in base64, or a safetensors file with the same JSON in one of its tensors. How many
pixels a few bytes expand to is limited here. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image

from ...media.samples import VideoWithSound, convert_image

if TYPE_CHECKING:
    import httpx2

MAX_PIXELS = 2**28  # of all images in a request together, e.g. 64 of 2048 x 2048
Body = Literal["png", "mp4", "mp4_lossy", "safetensors"]
CONTENT_TYPES = {"png": "application/json", "mp4": "application/json", "mp4_lossy": "application/json"}
CONTENT_TYPES |= {"safetensors": "application/safetensors"}
HEALTH_SECONDS = 5.0  # time limit of an answer that needs no scoring
CONNECT_SECONDS = 5.0
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds before a busy server is asked again, whatever its Retry-After
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
    """Return the arguments of `write_request`, with PIL images in RGB, and tensors for arrays."""
    try:
        return _read_request(body, max_pixels, is_safetensors)
    except WireError:
        raise
    except Exception as error:  # of JSON, base64, safetensors, PIL or PyAV, or from a body of another form
        raise WireError(f"The body is malformed ({type(error).__name__}: {error}).") from error


def _read_request(body: bytes, max_pixels: int, is_safetensors: bool) -> dict[str, Any]:
    from safetensors.torch import load

    tensors = load(body) if is_safetensors else {}
    content = json.loads(bytes(tensors.pop("request").numpy()) if is_safetensors else body)
    source, columns = _Source(max_pixels, tensors), content.get("columns") or {}
    values = {name: content.get(name) for name in ("prompts", "groups", "fps", "sampling_rate")}
    lists = [content["samples"], values["prompts"], *columns.values()]
    lists += [values["groups"]] if values["groups"] is not None else []
    if len(set(map(len, lists))) != 1 or not lists[0] or not all(isinstance(one, list) for one in lists):
        raise WireError("samples, prompts, columns and groups must be lists with one value per sample.")
    kinds, samples = zip(*[_read_sample(sample, source) for sample in content["samples"]], strict=True)
    are_latents = content.get("are_latents", False)
    if len(set(kinds)) != 1 or are_latents and kinds[0] != "tensor":
        raise WireError("samples must all be images, videos or tensors, and latents must be tensors.")
    columns = {name: [_read_value(value, source) for value in column] for name, column in columns.items()}
    samples = _add_sounds(list(samples), content.get("sounds"))
    return {"samples": samples, "columns": columns, "are_latents": are_latents, **values}


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

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, but only once, because many references to one tensor would become many copies."""
        return self.tensors.pop(name)


def _write_sample(sample: Any, name: str, body: Body, tensors: dict[str, torch.Tensor]) -> Any:
    is_video = isinstance(sample, list) and bool(sample) and all(isinstance(one, Image.Image) for one in sample)
    if body == "safetensors":
        if is_video or isinstance(sample, Image.Image):
            frames = [np.asarray(frame.convert("RGB")) for frame in (sample if is_video else [sample])]
            tensors[name] = torch.from_numpy(np.stack(frames) if is_video else frames[0].copy())
            return {"video" if is_video else "picture": name}
        tensors[name] = torch.as_tensor(sample).cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(sample, Image.Image):
        return write_image(sample)
    if not is_video:
        raise WireError(
            f"A sample is a {type(sample).__name__}, neither an image nor a video; send it as safetensors."
        )
    return [write_image(frame) for frame in sample] if body == "png" else {"mp4": _write_mp4(sample, body)}


def _write_value(value: Any, name: str, body: Body, tensors: dict[str, torch.Tensor]) -> Any:
    """Write a column's value, an image or a JSON value."""
    if not isinstance(value, Image.Image):
        return value
    if body != "safetensors":
        return {"png": write_image(value)}
    tensors[name] = torch.from_numpy(np.array(convert_image(value, "RGB")))
    return {"png": {"tensor": name}}


def _read_sample(sample: Any, source: _Source) -> tuple[str, Any]:
    """Return the kind of a sample, and the sample."""
    if isinstance(sample, str):
        return "image", _read_image(sample, source)
    if isinstance(sample, list):
        return "video", _check_frames([_read_image(frame, source) for frame in sample])
    [(form, value)] = sample.items()
    if form == "mp4":
        return "video", _check_frames(_read_mp4(value, source))
    if form == "tensor":
        return "tensor", source.tensor(value).clone()
    frames = _read_pixels(source.tensor(value), {"picture": 3, "video": 4}[form], source)
    return ("video", _check_frames(frames)) if form == "video" else ("image", frames[0])


def _check_frames(frames: list[Image.Image]) -> list[Image.Image]:
    if not frames:
        raise WireError("A video holds no frames, or frames larger than this server accepts.")
    return frames


def _read_value(value: Any, source: _Source) -> Any:
    if not isinstance(value, dict) or set(value) != {"png"}:
        return value
    if isinstance(value["png"], dict):
        return _read_pixels(source.tensor(value["png"]["tensor"]), 3, source)[0]
    return _read_image(value["png"], source)


def _read_pixels(pixels: torch.Tensor, dimensions: int, source: _Source) -> list[Image.Image]:
    """Read images from `(height, width, 3)` or `(frames, height, width, 3)` uint8."""
    if pixels.dtype != torch.uint8 or pixels.ndim != dimensions or pixels.shape[-1] != 3 or not pixels.numel():
        raise WireError(f"Pixels are {pixels.dtype} {tuple(pixels.shape)}; expected uint8 (..., height, width, 3).")
    source.take(pixels.numel() // 3)
    return [Image.fromarray(frame) for frame in (pixels[None] if dimensions == 3 else pixels).numpy()]


def write_image(image: Image.Image) -> str:
    buffer = io.BytesIO()
    convert_image(image, "RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _read_image(text: str, source: _Source) -> Image.Image:
    """Read a PNG in base64; check its size in the header before decoding any pixel."""
    image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
    source.take(image.width * image.height)
    return image.convert("RGB")


def _write_mp4(frames: list[Image.Image], body: Body) -> str:
    from ...media.files import write_video

    buffer = io.BytesIO()
    write_video(list(frames), buffer, fps=1, is_lossless=body == "mp4")  # the true rate is sent separately
    return base64.b64encode(buffer.getvalue()).decode()


def _read_mp4(text: str, source: _Source) -> list[Image.Image]:
    """Read an MP4 in base64 frame by frame, to stop early if a few bytes expand to too many frames."""
    import av

    with av.open(io.BytesIO(base64.b64decode(text, validate=True)), format="mp4") as file:
        stream = file.streams.video[0]
        if stream.codec_context.name != "h264":
            raise WireError(f"A video is {stream.codec_context.name}, expected h264.")
        # the limit per frame is checked before decoding
        stream.codec_context.options = {"max_pixels": str(max(1, source.left))}
        frames = []
        for frame in file.decode(stream):
            source.take(frame.width * frame.height)
            frames.append(frame.to_image())
    return frames


def _write_sounds(samples: list) -> list | None:
    """Write the raw sound of videos that have one."""
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


def _add_sounds(samples: list, sounds: list | None) -> list:
    if sounds is None:
        return samples
    whole = []
    for sample, sound in zip(samples, sounds, strict=True):
        if sound is not None:
            data = np.frombuffer(base64.b64decode(sound["float32"], validate=True), dtype="<f4")
            sample = VideoWithSound(sample, data.reshape(int(sound["channels"]), -1), int(sound["rate"]))
        whole.append(sample)
    return whole


# HTTP


class FailedRequest(Exception):
    """A request did not give a usable answer, but the next one may."""


async def ask(client: httpx2.AsyncClient, method: str, url: str, timeout: float, **request: Any) -> httpx2.Response:
    """Send one request and return its answer, which must be complete within `timeout` seconds."""
    import httpx2

    # httpx's own time-outs limit only pauses: a server that sends a byte now and then could block a run forever
    limit = httpx2.Timeout(None, connect=min(CONNECT_SECONDS, timeout))
    try:
        async with asyncio.timeout(timeout):
            return await client.request(method, url, timeout=limit, **request)
    except TimeoutError as error:
        raise FailedRequest(f"no answer within {timeout:g} seconds") from error
    except (httpx2.TransportError, httpx2.DecodingError, httpx2.InvalidURL) as error:
        raise FailedRequest(str(error) or type(error).__name__) from error


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


def check_at_least_one(name: str, reward: Any, *settings: str) -> None:
    for setting in settings:
        value = getattr(reward, setting)
        if value is not None and value < 1:
            raise ValueError(f"{name}: {setting} is {value}; use at least 1.")


def read_object(answer: httpx2.Response) -> dict[str, Any]:
    """Read the JSON object in an answer; raise FailedRequest if there is none."""
    try:
        content = answer.json()
    except (ValueError, RecursionError) as error:
        raise FailedRequest(f"its answer is not JSON: {answer.text[:200]!r}") from error
    if not isinstance(content, dict):
        raise FailedRequest(f"it answered {answer.text[:200]!r}, expected an object")
    return content


def read_error(answer: httpx2.Response) -> str:
    """Return the reason that a server gives for a refusal or failure."""
    try:
        reason = read_object(answer)["error"]
    except (FailedRequest, KeyError):
        return answer.text[:200]
    return str(reason.get("message", reason) if isinstance(reason, dict) else reason)[:500]


def seconds_to_wait(answer: httpx2.Response, default: float) -> float:
    """Return the seconds of a Retry-After header, between 0.1 and 10, or `default` if it has none."""
    try:
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, float(answer.headers["retry-after"])))
    except (KeyError, ValueError):
        return max(SHORTEST_WAIT, default)
