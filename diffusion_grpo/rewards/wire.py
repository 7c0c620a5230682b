"""What goes over the wire between `remote.py` and `serve.py`: samples in, JSON with PNGs in base64 out, and back.

A module of its own so that both sides share one form, and because what arrives from outside is checked here: sizes,
types, picture formats. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from PIL import Image

MAX_PIXELS = 2**28  # of all pictures of a request: 64 of 2048 x 2048


class WireError(ValueError):
    """A body that is not of the form, or too large (`is_too_large`)."""

    def __init__(self, sentence: str, is_too_large: bool = False):
        super().__init__(sentence)
        self.is_too_large = is_too_large


def write_request(
    samples: list, prompts: list[str], columns: dict[str, list], groups: list[int] | None, fps: float | None
) -> bytes:
    """A request's body.

    Args:
        samples: PIL pictures, or lists of PIL frames.
        prompts: one a sample.
        columns: one value a sample each: PIL pictures, or what JSON has.
        groups: the group of each sample, or None.
        fps: of videos, or None.

    Raises:
        TypeError: a column holds something that JSON does not have.
    """
    content = {
        "samples": [
            _write_picture(sample) if isinstance(sample, Image.Image) else [_write_picture(frame) for frame in sample]
            for sample in samples
        ],
        "prompts": prompts,
        "columns": {
            name: [{"png": _write_picture(value)} if isinstance(value, Image.Image) else value for value in values]
            for name, values in columns.items()
        },
        "groups": groups,
        "fps": fps,
    }
    return json.dumps(content).encode()


def read_request(body: bytes, max_pixels: int = MAX_PIXELS) -> dict[str, Any]:
    """What `write_request` was given, with PIL pictures; all of one kind, in RGB.

    Raises:
        WireError: the body is not of the form, or holds more than `max_pixels`.
    """
    try:
        content = json.loads(body)
    except ValueError as error:
        raise WireError(f"The body is not JSON ({error}).") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list) or not content["samples"]:
        raise WireError("The body must be a JSON object with a list of samples that is not empty.")
    count, left = len(content["samples"]), _Pixels(max_pixels)
    prompts, columns = content.get("prompts"), content.get("columns") or {}
    groups, fps = content.get("groups"), content.get("fps")
    if not _is_list(prompts, count, str):
        raise WireError(f"prompts must be a list of {count} strings, one a sample.")
    if not isinstance(columns, dict) or not all(_is_list(values, count, object) for values in columns.values()):
        raise WireError(f"columns must be an object of lists with {count} values each.")
    if groups is not None and not _is_list(groups, count, int):
        raise WireError(f"groups must be null or a list of {count} whole numbers.")
    if fps is not None and not (isinstance(fps, (int, float)) and fps > 0):
        raise WireError("fps must be null or a number above 0.")
    kinds = {type(sample) for sample in content["samples"]}
    if len(kinds) != 1 or not kinds <= {str, list} or [] in content["samples"]:
        raise WireError("samples must be all pictures (strings) or all videos (lists of strings, not empty).")
    samples = [_read_sample(sample, left) for sample in content["samples"]]
    columns = {name: [_read_value(value, left) for value in values] for name, values in columns.items()}
    return {"samples": samples, "prompts": prompts, "columns": columns, "groups": groups, "fps": fps}


class _Pixels:
    """How many more pixels a request may hold."""

    def __init__(self, left: int):
        self.left = left

    def take(self, pixels: int) -> None:
        self.left -= pixels
        if self.left < 0:
            raise WireError("The pictures have too many pixels in all; send fewer at once.", is_too_large=True)


def _is_list(values: Any, count: int, kind: type) -> bool:
    return isinstance(values, list) and len(values) == count and all(isinstance(value, kind) for value in values)


def _read_sample(sample: Any, left: _Pixels) -> Any:
    return (
        [_read_picture(frame, left) for frame in sample] if isinstance(sample, list) else _read_picture(sample, left)
    )


def _read_value(value: Any, left: _Pixels) -> Any:
    return _read_picture(value["png"], left) if isinstance(value, dict) and set(value) == {"png"} else value


def _write_picture(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _read_picture(text: Any, left: _Pixels) -> Image.Image:
    """The size is read from the header before any pixel is decoded."""
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        left.take(image.width * image.height)
        return image.convert("RGB")
    except WireError:
        raise
    except Exception as error:  # PIL has no one class for what a broken file raises
        raise WireError(f"A picture is no PNG in base64 ({type(error).__name__}: {error}).") from error
