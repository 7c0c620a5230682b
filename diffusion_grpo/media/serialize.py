"""Serialise samples and dataset rows for other processes of a run: exactly, with their types, and without pickle.

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

from .samples import VideoWithSound


def pack_samples(samples: list | None, latents: list[Tensor] | None) -> Tensor:
    """Pack samples and their latents into one packet, (bytes,) uint8 on the CPU."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    forms = [None if values is None else [_form(one, tensors) for one in values] for values in (samples, latents)]
    text = torch.frombuffer(bytearray(json.dumps(forms).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save({**tensors, "forms": text})), dtype=torch.uint8)


def unpack_samples(packet: Tensor, device: torch.device) -> tuple[list | None, list[Tensor] | None]:
    """Return what `pack_samples` was given; tensors that were on an accelerator are put on `device`."""
    from safetensors.torch import load

    tensors = load(packet.numpy().tobytes())
    samples, latents = json.loads(tensors["forms"].numpy().tobytes())
    return tuple(values and [_sample(form, tensors, device) for form in values] for values in (samples, latents))


def _form(sample: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe a sample in JSON, and add its numbers to `tensors`."""
    name = str(len(tensors))
    if sample is None or isinstance(sample, (bool, int, float, str)):
        return {"plain": sample}
    if isinstance(sample, Image.Image) and sample.mode == "P":  # a PNG also stores the palette
        file = io.BytesIO()
        sample.save(file, "PNG")
        tensors[name] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return {"png": name}
    if isinstance(sample, Image.Image):
        tensors[name] = torch.frombuffer(bytearray(sample.tobytes()), dtype=torch.uint8)
        return {"image": name, "mode": sample.mode, "size": sample.size}
    if isinstance(sample, np.ndarray):
        tensors[name] = torch.from_numpy(np.array(sample, order="C"))
        return {"array": name}
    if isinstance(sample, Tensor):
        tensors[name] = sample.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name, "is_on_device": sample.device.type != "cpu"}
    if isinstance(sample, (list, tuple)):
        form: dict[str, Any] = {type(sample).__name__: [_form(one, tensors) for one in sample]}
        if isinstance(sample, VideoWithSound):
            form |= {"sound": _form(sample.sound, tensors), "sampling_rate": sample.sampling_rate}
        return form
    if isinstance(sample, dict):
        return {"dict": {name: _form(one, tensors) for name, one in sample.items()}}
    raise TypeError(
        f"A sample or a column holds a {type(sample).__name__}, which cannot be sent to another process: images, "
        "arrays, tensors, texts, numbers, and lists and mappings of these can."
    )


def _sample(form: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Any:
    (kind, content), *_ = form.items()
    if kind == "plain":
        return content
    if kind == "dict":
        return {name: _sample(part, tensors, device) for name, part in content.items()}
    if kind == "png":
        return Image.open(io.BytesIO(tensors[content].numpy().tobytes())).copy()
    if kind == "image":
        return Image.frombytes(form["mode"], tuple(form["size"]), tensors[content].numpy().tobytes())
    if kind == "array":
        return tensors[content].numpy()
    if kind == "tensor":
        return tensors[content].to(device) if form["is_on_device"] else tensors[content]
    parts = [_sample(part, tensors, device) for part in content]
    if kind == "VideoWithSound":
        return VideoWithSound(parts, _sample(form["sound"], tensors, device), form["sampling_rate"])
    return tuple(parts) if kind == "tuple" else parts
