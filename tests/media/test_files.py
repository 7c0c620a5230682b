"""Videos and sound keep what they show through a file."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_grpo.media.files import (
    compress_sound,
    draw_sound,
    read_sound,
    read_video,
    shrink_video,
    write_sample,
    write_sound,
    write_video,
)
from diffusion_grpo.media.samples import VideoWithSound


@pytest.mark.parametrize("size", [(32, 48), (33, 17)], ids=["even", "odd"])
def test_a_video_comes_back_frame_by_frame(tmp_path, size):
    with pytest.raises(ValueError, match="one size"):
        write_video([Image.new("RGB", size), Image.new("RGB", (16, 8))], tmp_path / "b.mp4", fps=8)
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]
    path = write_video([Image.new("RGB", size, colour) for colour in colours], tmp_path / "a.mp4", fps=12.5)
    for source in (path, io.BytesIO(path.read_bytes())):
        frames = read_video(source)
        assert [frame.size for frame in frames] == [size] * 3
        for frame, colour in zip(frames, colours):
            assert np.abs(np.asarray(frame, dtype=float) - colour).max() < 12  # the codec rounds


def test_sound_comes_back_within_a_rounding(tmp_path):
    sound = np.stack([np.sin(np.linspace(0, 60, 4000)), np.cos(np.linspace(0, 60, 4000))]) * 0.9
    path = write_sound(sound, tmp_path / "a.wav", 16000)
    back, rate = read_sound(path)
    assert rate == 16000 and back.dtype == np.float32 and back.shape == sound.shape
    assert np.abs(back - sound).max() < 1e-4
    with pytest.raises(ValueError, match="contains no video"):
        read_video(path)
    with pytest.raises(ValueError, match="contains no sound"):
        read_sound(write_video([Image.new("RGB", (8, 8))], tmp_path / "a.mp4", fps=8))


TIME = np.arange(48000) / 24000
TONES = np.stack([0.8 * np.sin(2 * np.pi * 440 * TIME), 0.3 * np.sin(2 * np.pi * 1000 * TIME)]).astype(np.float32)


def loudest(sound, rate):
    """The frequency of each channel, in Hz."""
    spectrum = np.abs(np.fft.rfft(sound))
    return [float(np.fft.rfftfreq(sound.shape[1], 1 / rate)[row.argmax()]) for row in spectrum]


@pytest.mark.parametrize("rate", [24000, 11111], ids=["a rate AAC has", "another"])
def test_a_video_carries_its_sound(tmp_path, rate):
    video = VideoWithSound([Image.new("RGB", (32, 32))] * 16, TONES, rate)
    path = write_video(video, tmp_path / "a.mp4", fps=8)
    sound, written = read_sound(path)
    assert len(read_video(path)) == 16 and written == (24000 if rate == 24000 else 48000)
    assert loudest(sound, written) == pytest.approx([440 * rate / 24000, 1000 * rate / 24000], rel=0.01)


@pytest.mark.parametrize("length", [0, 1, 10])
def test_a_sound_may_be_shorter_than_its_encoding_can_hold(tmp_path, length):
    video = VideoWithSound([Image.new("RGB", (32, 32))] * 4, TONES[:, :length], 24000)
    path = write_video(video, tmp_path / "a.mp4", fps=8)
    assert len(read_video(path)) == len(read_video(io.BytesIO(shrink_video(path, 384)))) == 4
    if length:  # without samples, the file has no stream for them
        assert read_sound(path)[0].shape == (2, 0 if length == 1 else 1024)
    path = write_sound(TONES[:, :length], tmp_path / "a.wav", 24000)
    assert read_sound(path)[0].shape == (2, length)
    assert read_sound(path, 24000, 1)[0].shape == (1, length)
    assert bool(compress_sound(path)) == (length > 0)


def test_what_a_pipeline_makes_becomes_files_by_its_kind(tmp_path):
    frames = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in (0, 120, 240)]
    made = {
        "picture": (frames[1], ".png", ".png"),
        "array": (np.full((16, 16, 3), 0.5), ".png", ".png"),
        "video": (frames, ".png", ".mp4"),
        "frames": (np.zeros((3, 16, 16, 3)), ".png", ".mp4"),
        "sound": (torch.from_numpy(TONES).bfloat16(), ".png", ".wav"),
        "mono": (TONES[0], ".png", ".wav"),
        "embedding": (torch.zeros(2, 3, 5), None, ".npy"),
    }
    for name, (sample, image, file) in made.items():
        paths = write_sample(sample, tmp_path / "deep" / name, 8.0, 24000)
        assert [path and path.name for path in paths] == [image and name + image, name + file]
        assert all(path.is_file() for path in paths if path)
    assert read_sound(tmp_path / "deep" / "sound.wav")[1] == 24000
    # the first frame of an image-to-video model is the image that it was given
    assert Image.open(tmp_path / "deep" / "video.png").getpixel((0, 0)) == (120, 0, 0)
    assert not list((tmp_path / "deep").glob("tmp-*"))
    assert write_sample(TONES, tmp_path / "numbers", 8.0)[1].suffix == ".npy"  # nothing says that it is sound


def test_a_drawn_sound_shows_when_it_is_loud_and_how_high(tmp_path):
    rising = np.sin(2 * np.pi * 2000 * TIME) * (TIME > 1)
    image = np.asarray(draw_sound(rising[None])).astype(int)
    wave_form, spectrum = image[:64], image[64:]
    assert (wave_form[:, :120] < 255).sum() < (wave_form[:, 136:] < 255).sum() / 20
    assert spectrum[:, :100].max() < 30 < 200 < spectrum[:, 200:].max()
    row = 64 - spectrum[:, 200].argmax()
    assert row / 64 == pytest.approx((2000 / 12000) ** 0.5, abs=0.03)
    assert draw_sound(np.zeros((1, 1))).size == draw_sound(rising[None]).size


def test_a_small_video_is_small_and_keeps_its_sound(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (4, 300, 1001, 3), dtype=np.uint8)
    video = VideoWithSound([Image.fromarray(frame) for frame in noise], TONES, 24000)
    path = write_video(video, tmp_path / "a.mp4", fps=2)
    small = shrink_video(path, 384)
    assert len(small) < path.stat().st_size / 4
    assert {frame.size for frame in read_video(io.BytesIO(small))} == {(384, 116)}
    assert loudest(*read_sound(io.BytesIO(small))) == pytest.approx([440, 1000], rel=0.01)
    sound = write_sound(TONES, tmp_path / "a.wav", 24000)
    assert len(compress_sound(sound)) < sound.stat().st_size / 4
    assert loudest(*read_sound(io.BytesIO(compress_sound(sound)))) == pytest.approx([440, 1000], rel=0.01)


def test_a_video_of_a_phone_is_turned_upright(tmp_path):
    """The frames are stored on their side, and a matrix in the header says how to show them."""
    frame = Image.new("RGB", (64, 32), "red")
    frame.paste("blue", (0, 0, 32, 32))  # blue on the left, red on the right
    path = write_video([frame] * 3, tmp_path / "a.mp4", fps=8)
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 44
    one, minus = (65536).to_bytes(4, "big"), (-65536).to_bytes(4, "big", signed=True)
    assert content[start : start + 4] == one  # the matrix begins here
    clockwise = [0, one, 0, minus, 0, 0]  # x' = -y, y' = x
    content[start : start + 24] = b"".join(item or bytes(4) for item in clockwise)
    path.write_bytes(content)
    (first, *rest) = read_video(path)
    assert len(rest) == 2 and first.size == (32, 64)
    top, bottom = first.getpixel((16, 8)), first.getpixel((16, 56))
    assert top[2] > 200 > top[0] and bottom[0] > 200 > bottom[2]  # the left side has become the top
