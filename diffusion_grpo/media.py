"""Videos and sound as files: frames and waveforms go in, MP4 and WAV come out, and the other way round.

A module of its own because evaluation, `diffusion-grpo sample` and datasets need the same files, and because PyAV is
known to this one alone.
"""

import fractions
import wave
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from PIL import Image


def write_video(frames: list[Image.Image], path: str | Path, fps: float) -> Path:
    """Writes an MP4 (H.264) that any browser plays.

    Args:
        frames: of one size, at least one.
        path: ends in `.mp4`.
        fps: frames a second.

    Raises:
        ValueError: frames of different sizes, or none.
    """
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) != 1:
        raise ValueError(f"A video needs frames of one size, got {sizes or 'no frames'}.")
    width, height = sizes[0]
    with av.open(str(path), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("libx264", rate=fractions.Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = width, height
        # players want 4:2:0, which halves the colour and so needs even sides
        stream.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        stream.options = {"crf": "18"}
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame.convert("RGB"))))
        file.mux(stream.encode())
    return Path(path)


def read_video(source: str | Path | BinaryIO) -> list[Image.Image]:
    """All frames of a video file, as RGB pictures.

    Raises:
        ValueError: the file holds no video.
    """
    with av.open(source if hasattr(source, "read") else str(source)) as file:
        if not file.streams.video:
            raise ValueError(f"{source} holds no video.")
        return [frame.to_image() for frame in file.decode(video=0)]


def write_sound(samples: np.ndarray, path: str | Path, sampling_rate: int) -> Path:
    """Writes a 16-bit WAV.

    Args:
        samples: (channels, time) or (time,) floats in [-1, 1]; what lies outside is cut off.
        path: ends in `.wav`.
        sampling_rate: samples a second.
    """
    waveform = np.atleast_2d(np.asarray(samples, dtype=np.float64)).clip(-1, 1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(waveform))
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes((waveform.T * 32767).round().astype("<i2").tobytes())
    return Path(path)


def read_sound(source: str | Path | BinaryIO) -> tuple[np.ndarray, int]:
    """(channels, time) float32 in [-1, 1] and the sampling rate of a sound file, or of the sound of a video.

    Raises:
        ValueError: the file holds no sound.
    """
    with av.open(source if hasattr(source, "read") else str(source)) as file:
        if not file.streams.audio:
            raise ValueError(f"{source} holds no sound.")
        rate, layout = file.streams.audio[0].rate, file.streams.audio[0].layout
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
        parts = [part.to_ndarray() for frame in file.decode(audio=0) for part in resampler.resample(frame)]
        return np.concatenate(parts, axis=1), rate
