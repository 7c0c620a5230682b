"""Serialise dataset rows and prompt embeddings for other processes of a run: exactly, with types, without pickle.

A packet is a safetensors file: pixels and numbers as tensors, and JSON that describes each of them. Servers get
another form, always RGB: `rewards/server/wire.py`.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def pack_values(values: list[Any]) -> Tensor:
    """Pack rows or other values into one packet, (bytes,) uint8 on the CPU."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    text = json.dumps([_form(value, tensors) for value in values]).encode()
    forms = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save({**tensors, "forms": forms})), dtype=torch.uint8)


def unpack_values(packet: Tensor) -> list[Any]:
    """Return what `pack_values` was given, with all tensors on the CPU."""
    from safetensors.torch import load

    tensors = load(packet.numpy().tobytes())
    return [_value(form, tensors) for form in json.loads(tensors["forms"].numpy().tobytes())]


def _form(value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe a value in JSON, and add its numbers to `tensors`."""
    name = str(len(tensors))
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    if isinstance(value, Image.Image) and value.mode == "P":  # a PNG also stores the palette
        file = io.BytesIO()
        value.save(file, "PNG")
        tensors[name] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return {"png": name}
    if isinstance(value, Image.Image):
        tensors[name] = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return {"image": name, "mode": value.mode, "size": value.size}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(np.array(value, order="C"))
        return {"array": name}
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_form(one, tensors) for one in value]}
    if isinstance(value, dict):
        return {"dict": {name: _form(one, tensors) for name, one in value.items()}}
    raise TypeError(
        f"A column holds a {type(value).__name__}, which cannot be sent to another process: images, arrays, tensors, "
        "texts, numbers, and lists and mappings of these can."
    )


def _value(form: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    (kind, content), *_ = form.items()
    if kind == "plain":
        return content
    if kind == "dict":
        return {name: _value(part, tensors) for name, part in content.items()}
    if kind == "png":
        return Image.open(io.BytesIO(tensors[content].numpy().tobytes())).copy()
    if kind == "image":
        return Image.frombytes(form["mode"], tuple(form["size"]), tensors[content].numpy().tobytes())
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tensor":
        return tensors[content]
    parts = [_value(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts
