"""Samples in memory: taken from a pipeline's output, converted to the forms that rewards receive, copied, measured.

Samples are converted once, to PIL images or one tensor, and frames of videos are chosen by one rule, so that all
rewards see the same pixels.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

SOUND_FIELDS = ("audio", "sound")  # output fields in which a video pipeline returns sound


class VideoWithSound(list):
    """A list of video frames that also carries the video's sound, (channels, time) float32 in [-1, 1]."""

    def __init__(self, frames: list[Image.Image], sound: np.ndarray, sampling_rate: int):
        super().__init__(frames)
        self.sound, self.sampling_rate = sound, sampling_rate


def extract_samples(pipe: DiffusionPipeline, output: Any) -> Any:
    """Return the samples in a pipeline's output, with their sound if it returned videos and sound."""
    samples = next(iter(output.values())) if type(output) is dict else output[0]  # a dict of a modular pipeline
    sounds = [output[name] for name in SOUND_FIELDS if isinstance(output, dict) and output.get(name) is not None]
    if not sounds or not isinstance(samples, list) or (rate := find_sampling_rate(pipe)) is None:
        return samples
    pairs = zip(samples, sounds[0], strict=True)
    return [VideoWithSound(frames, as_sound(sound), rate) for frames, sound in pairs]


def find_sampling_rate(pipe: DiffusionPipeline) -> int | None:
    """Return the sampling rate of the sound that a pipeline makes, in hertz; None if it makes no sound."""
    # the vocoder runs last, so it comes first
    parts = [pipe.components.get("vocoder"), pipe.components.get("audio_vae"), *pipe.components.values()]
    for part in parts:
        for name in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            rate = getattr(getattr(part, "config", None), name, None)
            if rate is not None:
                return int(rate)
    return None


def as_sound(sample: Any) -> np.ndarray:
    """Convert a pipeline's waveform, an array or tensor (channels, time) or (time,), to (channels, time) float32."""
    values = sample.detach().float().cpu().numpy() if isinstance(sample, torch.Tensor) else np.asarray(sample)
    return np.atleast_2d(values).astype(np.float32)


def as_images(samples: list) -> list:
    """Convert samples to PIL images, or to lists of PIL frames for videos; move other tensors to the CPU."""
    if all(isinstance(sample, Image.Image) for sample in samples):
        return samples
    converted = [_convert(sample) for sample in samples]
    return samples if all(new is old for new, old in zip(converted, samples, strict=True)) else converted


def kind_of(samples: list[Any]) -> str | None:
    """Return the kind of samples: "images", "videos", or None for others (sound, embeddings, latents)."""
    first = as_images(samples[:1])[0]
    frames = first if isinstance(first, list) else [first]
    if not frames or not all(isinstance(frame, Image.Image) for frame in frames):
        return None
    return "videos" if isinstance(first, list) else "images"


def count_bytes(sample: Any) -> int:
    """Return how many bytes the frames, the array or the tensor of a sample take in memory."""
    if isinstance(sample, Image.Image):
        return 4 * sample.width * sample.height
    return sum(map(count_bytes, sample)) if isinstance(sample, (list, tuple)) else getattr(sample, "nbytes", 0)


def convert_image(image: Image.Image, mode: str | None) -> Image.Image:
    """Return an image with 8 bits per channel, in the given mode (of Pillow) if there is one."""
    if image.mode.startswith("I"):
        pixels = np.asarray(image).astype(np.int64)
        # Pillow would clip 16 bits, so that most become white; some masks have 8 bits in this mode
        pixels = pixels >> 8 if pixels.max(initial=0) > 255 else pixels
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("the image holds floats; store it with 8 or 16 bits per channel")
    return image if mode in (None, image.mode) else image.convert(mode)


def _convert(sample: Any) -> Any:
    if _is_frame(sample):
        return _to_image(sample)
    is_video = isinstance(sample, (list, tuple)) or getattr(sample, "ndim", 0) == 4
    if not is_video or not len(sample) or not all(_is_frame(frame) for frame in sample):
        return _on_cpu(sample) if isinstance(sample, Tensor) else sample
    is_done = isinstance(sample, list) and all(isinstance(frame, Image.Image) for frame in sample)
    return sample if is_done else [_to_image(frame) for frame in sample]


def _is_frame(frame: Any) -> bool:
    if isinstance(frame, Image.Image):
        return True
    return isinstance(frame, (np.ndarray, Tensor)) and frame.ndim == 3 and frame.shape[-1] in (1, 3, 4)


def _on_cpu(sample: Tensor) -> Tensor:
    """Return a sample in CPU memory, without a gradient, and in float32 if it has a precision that NumPy lacks."""
    sample = sample.detach() if sample.requires_grad else sample
    return sample.cpu().float() if sample.dtype == torch.bfloat16 else sample.cpu()


def _to_image(frame: Any) -> Image.Image:
    if isinstance(frame, Image.Image):
        return frame
    pixels = np.asarray(_on_cpu(frame) if isinstance(frame, Tensor) else frame)
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    if pixels.dtype != np.uint8:
        pixels = (255 * pixels.astype(np.float64).clip(0, 1)).round().astype(np.uint8)
    return Image.fromarray(pixels)


def as_tensor(samples: list) -> Tensor:
    """Stack images (one frame each) or videos: `(batch, frames, 3, height, width)` float32 in [0, 1] on the CPU."""
    videos = [sample if isinstance(sample, list) else [sample] for sample in samples]
    strange = [frame for video in videos for frame in video if not isinstance(frame, Image.Image)]
    if strange:
        raise ValueError(f"A reward asks for a tensor of images, but the samples are {type(strange[0]).__name__}.")
    shapes = sorted({(len(video), *frame.size) for video in videos for frame in video})
    if len(shapes) != 1:
        raise ValueError(
            f"A reward asks for one tensor of all samples, but these have several sizes (frames, width, height): "
            f"{', '.join(map(str, shapes))}; give height and width, or use a reward that takes images."
        )
    pixels = np.stack([[np.asarray(frame.convert("RGB")) for frame in video] for video in videos])
    return torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).float() / 255


def copy_value(value: Any) -> Any:
    """Copy `value`, unless it cannot be copied, so that writing to the copy leaves the original unchanged."""
    if isinstance(value, Image.Image):
        return _copy_image(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(map(copy_value, value))
    if type(value) is dict:
        return {name: copy_value(item) for name, item in value.items()}
    if not isinstance(value, list):
        try:
            return copy.deepcopy(value)
        except TypeError:  # raised by `copy` for locks, files and decoders
            return value
    copied = copy.copy(value)  # a video with sound is a list with attributes
    copied[:] = map(copy_value, value)
    for name, item in getattr(value, "__dict__", {}).items():
        setattr(copied, name, copy_value(item))
    return copied


def _copy_image(image: Image.Image) -> Image.Image:
    """Copy an image with its format and file name, which `Image.copy` leaves out."""
    copied = image.copy()
    copied.format = image.format
    if hasattr(image, "filename"):
        copied.filename = image.filename
    return copied


def frame_positions(frames: int | str, length: int) -> list[int]:
    """Return the positions of the frames that represent a video: evenly spaced, including the first and the last."""
    if frames == "all" or frames >= length:
        return list(range(length))
    return [0] if frames == 1 else [round(place * (length - 1) / (frames - 1)) for place in range(frames)]


def choose_evenly(steps: list[int], most: int) -> list[int]:
    """Choose evenly spaced steps, including the first and the last."""
    return [steps[place] for place in frame_positions(most, len(steps))]
