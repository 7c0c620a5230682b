"""Videos and sound keep what they show through a file."""

import io

import numpy as np
import pytest
from PIL import Image

from diffusion_grpo.media import read_sound, read_video, write_sound, write_video


@pytest.mark.parametrize("size", [(32, 48), (33, 17)], ids=["even", "odd"])
def test_a_video_comes_back_frame_by_frame(tmp_path, size):
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    path = write_video([Image.new("RGB", size, colour) for colour in colours], tmp_path / "a.mp4", fps=12.5)
    for source in (path, io.BytesIO(path.read_bytes())):
        frames = read_video(source)
        assert [frame.size for frame in frames] == [size] * 3
        for frame, colour in zip(frames, colours):
            assert np.abs(np.asarray(frame, dtype=float) - colour).max() < 12  # the codec rounds


def test_a_video_needs_frames_of_one_size(tmp_path):
    with pytest.raises(ValueError, match=r"one size, got \[\(8, 8\), \(16, 8\)\]"):
        write_video([Image.new("RGB", (8, 8)), Image.new("RGB", (16, 8))], tmp_path / "a.mp4", fps=8)


def test_sound_comes_back_within_a_rounding(tmp_path):
    sound = np.stack([np.sin(np.linspace(0, 60, 4000)), np.cos(np.linspace(0, 60, 4000))]) * 0.9
    path = write_sound(sound, tmp_path / "a.wav", 16000)
    back, rate = read_sound(path)
    assert rate == 16000 and back.dtype == np.float32 and back.shape == sound.shape
    assert np.abs(back - sound).max() < 1e-4


def test_a_file_without_that_kind_is_refused(tmp_path):
    sound = write_sound(np.zeros(100), tmp_path / "a.wav", 8000)
    video = write_video([Image.new("RGB", (8, 8))], tmp_path / "a.mp4", fps=8)
    with pytest.raises(ValueError, match="holds no video"):
        read_video(sound)
    with pytest.raises(ValueError, match="holds no sound"):
        read_sound(video)
