"""Images, videos, sound and arrays as files: PNG, MP4, WAV and `.npy`, written and read.

Evaluation, `diffusion-grpo sample`, the report and datasets share these files. No other module writes with PyAV.
"""

import fractions
import io
import itertools
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image

from .samples import VideoWithSound, as_images, as_sound

SOUND_IMAGE = (256, 128)  # pixels
WINDOW = 1024  # maximum number of samples per column of a spectrogram
QUIETEST = -80.0  # decibels relative to the loudest; drawn black


def write_sample(
    sample: Any, stem: str | Path, fps: float, sampling_rate: int | None = None
) -> tuple[Path | None, Path]:
    """Write one sample to files: a PNG to look at, unless it is an embedding, and the whole sample."""
    stem, [sample] = Path(stem), as_images([sample])

    def write(ending: str, save: Callable[[Path], Any]) -> Path:
        return write_whole(stem.with_name(f"{stem.name}{ending}"), save)

    if isinstance(sample, Image.Image):
        image = write(".png", sample.save)
        return image, image
    if isinstance(sample, list) and sample and isinstance(sample[0], Image.Image):
        file = write(".mp4", lambda path: write_video(sample, path, fps))
        # the middle frame, since the first one may be the image that the video was made from
        return write(".png", sample[len(sample) // 2].save), file
    if sampling_rate is not None and getattr(sample, "ndim", 0) in (1, 2):
        sound = as_sound(sample)
        file = write(".wav", lambda path: write_sound(sound, path, sampling_rate))
        return write(".png", draw_sound(sound).save), file
    values = sample.detach().float().cpu().numpy() if isinstance(sample, torch.Tensor) else np.asarray(sample)
    return None, write(".npy", lambda path: np.save(path, values))


def write_whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write a file under a temporary name and rename it into place, so that no file is ever incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"tmp-{path.name}")
    write(aside)
    aside.replace(path)
    return path


def draw_sound(sound: np.ndarray) -> Image.Image:
    """Plot a waveform, (channels, time) in [-1, 1], and below it a spectrogram that starts at 0 Hz."""
    width, height = SOUND_IMAGE[0], SOUND_IMAGE[1] // 2
    mono = np.nan_to_num(np.asarray(sound, dtype=np.float64)).mean(axis=0)
    columns = [mono[part] for part in _split(len(mono), width)]
    rows = np.linspace(1, -1, height)[:, None]
    low, high = (np.array([edge(column) for column in columns]) for edge in (np.min, np.max))
    wave_form = np.where((rows <= high + 1 / height) & (rows >= low - 1 / height), 40, 255)
    size = min(WINDOW, len(mono))
    starts = np.linspace(0, len(mono) - size, width).astype(int)
    windows = np.stack([mono[start : start + size] for start in starts]) * np.hanning(size)
    levels = 20 * np.log10(np.abs(np.fft.rfft(windows)) + 1e-12)
    # square root of the frequency, to give the low frequencies of voices and instruments more room
    levels = levels[:, (np.linspace(0, 1, height) ** 2 * (levels.shape[1] - 1)).round().astype(int)]
    levels = np.clip((levels - max(levels.max(), QUIETEST)) / -QUIETEST + 1, 0, 1)
    return Image.fromarray(np.concatenate([wave_form, 255 * levels.T[::-1]]).astype(np.uint8))


def _split(length: int, count: int) -> list[slice]:
    """Split `length` into `count` slices, none of them empty."""
    edges = np.linspace(0, length, count + 1).astype(int)
    return [slice(min(start, length - 1), max(stop, start + 1)) for start, stop in zip(edges, edges[1:])]


def write_video(
    frames: list[Image.Image], target: str | Path | BinaryIO, fps: float, quality: int = 18, is_lossless: bool = False
) -> str | Path | BinaryIO:
    """Write an MP4 (H.264, and AAC for the sound of a [`VideoWithSound`]) that any browser plays."""
    import av

    sizes = sorted({frame.size for frame in frames})
    if len(sizes) != 1:
        raise ValueError(f"A video needs frames of one size, got {sizes or 'no frames'}.")
    width, height = sizes[0]
    with _open_mp4(target) as file:
        encoder = "libx264rgb" if is_lossless else "libx264"
        stream = file.add_stream(encoder, rate=fractions.Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = width, height
        # players expect 4:2:0, which halves the resolution of the colour and so needs even sides
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        stream.options = {"crf": str(quality)}
        if is_lossless:
            stream.pix_fmt, stream.options = "rgb24", {"qp": "0", "preset": "ultrafast"}
        sound = _sound_stream(file, frames) if isinstance(frames, VideoWithSound) else []
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame.convert("RGB"))))
        file.mux(stream.encode())
        for packet in sound:
            file.mux(packet)
    return target


def shrink_video(path: str | Path, widest: int) -> bytes:
    """Re-encode a video, with its sound, to at most `widest` pixels per side, for a page with many videos."""
    import av

    with av.open(str(path)) as file:
        fps, is_silent = float(file.streams.video[0].average_rate), not file.streams.audio
    frames = read_video(path)
    scale = min(1, widest / max(frames[0].size))
    size = [max(2, round(side * scale / 2) * 2) for side in frames[0].size]  # players need even sides
    frames = [frame.resize(size) for frame in frames]
    target = io.BytesIO()
    write_video(frames if is_silent else VideoWithSound(frames, *read_sound(path)), target, fps, quality=28)
    return target.getvalue()


def compress_sound(path: str | Path) -> bytes:
    """Encode a sound file as AAC in an MP4, about a tenth of the size of a WAV."""
    target = io.BytesIO()
    with _open_mp4(target) as file:
        for packet in _sound_stream(file, VideoWithSound([], *read_sound(path))):
            file.mux(packet)
    return target.getvalue()


def _open_mp4(target: str | Path | BinaryIO) -> Any:
    """Open an MP4 for writing. In a file at a path the index comes first, so that browsers play it while it loads."""
    import av

    if hasattr(target, "write"):
        return av.open(target, "w", format="mp4")
    return av.open(str(target), "w", format="mp4", options={"movflags": "faststart"})


def _sound_stream(file: Any, video: VideoWithSound) -> Any:
    """Add an audio stream to an open MP4 and return an iterator over its packets."""
    import av

    rates = av.codec.Codec("aac", "w").audio_rates
    rate = video.sampling_rate if video.sampling_rate in rates else 48000
    channels = video.sound[:2]  # players take one or two channels
    layout = "mono" if len(channels) == 1 else "stereo"
    stream = file.add_stream("aac", rate=rate, layout=layout)
    return _sound_packets(stream, np.ascontiguousarray(channels, dtype=np.float32).clip(-1, 1), video, layout)


def _sound_packets(stream: Any, channels: np.ndarray, video: VideoWithSound, layout: str) -> Any:
    import av

    if not channels.size:
        return
    frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
    frame.sample_rate, frame.pts = video.sampling_rate, 0
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=stream.rate)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        yield from stream.encode(part)
    yield from stream.encode()


def read_video(source: str | Path | BinaryIO) -> list[Image.Image]:
    """Read all frames of a video file as RGB images, turned upright as players show them."""
    import av

    with av.open(source if hasattr(source, "read") else str(source)) as file:
        if not file.streams.video:
            raise ValueError(f"{source} contains no video.")
        return [frame.to_image().rotate(frame.rotation, expand=True) for frame in file.decode(video=0)]


def write_sound(samples: np.ndarray, path: str | Path, sampling_rate: int) -> Path:
    """Write a 16-bit WAV of (channels, time) or (time,) floats, clipped to [-1, 1]."""
    waveform = np.atleast_2d(np.asarray(samples, dtype=np.float64)).clip(-1, 1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(waveform))
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes((waveform.T * 32767).round().astype("<i2").tobytes())
    return Path(path)


def read_sound(
    source: str | Path | BinaryIO, sampling_rate: int | None = None, channels: int | None = None
) -> tuple[np.ndarray, int]:
    """Read a sound file, or the sound of a video: (channels, time) float32 in [-1, 1], and the sampling rate."""
    import av

    with av.open(source if hasattr(source, "read") else str(source)) as file:
        if not file.streams.audio:
            raise ValueError(f"{source} contains no sound.")
        stream = file.streams.audio[0]
        rate = sampling_rate or stream.rate
        layout = {1: "mono", 2: "stereo"}[channels] if channels else stream.layout
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
        frames = itertools.chain(file.decode(audio=0), [None])  # None flushes the resampler
        parts = [part.to_ndarray() for frame in frames for part in resampler.resample(frame)]
        # a sound may end before the first frame of its encoding
        nothing = np.zeros((channels or stream.channels, 0), np.float32)
        return np.concatenate([nothing, *parts], axis=1), rate
