"""Samples, rows and columns arrive at another process as they were."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_grpo.media.files import VideoWithSound
from diffusion_grpo.media.serialize import pack_columns, pack_samples, unpack_columns, unpack_samples

CPU = torch.device("cpu")


def noise(mode, size=(5, 3)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], len(mode)), dtype=np.uint8)
    return Image.fromarray(pixels if len(mode) > 1 else pixels[..., 0])


def same(one, other):
    if isinstance(one, Image.Image):
        return one.mode == other.mode and one.size == other.size and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and one.dtype == other.dtype and (one == other).all()


@pytest.mark.parametrize(
    "sample",
    [
        noise("RGB"),
        noise("RGBA"),
        noise("L"),
        [noise("RGB"), noise("RGB", (2, 7))],
        (np.ones((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)),
        np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4).transpose(1, 0, 2),
        torch.linspace(0, 1, 12).view(3, 4).T.bfloat16(),
        torch.tensor([1, 2]),
    ],
    ids=["RGB", "RGBA", "grey", "video", "arrays", "sound", "bfloat16", "integers"],
)
def test_a_parcel_holds_what_was_put_in(sample):
    samples, latents = unpack_samples(pack_samples([sample, sample], [torch.randn(2, 2), torch.zeros(3)]), CPU)
    assert same([sample, sample], samples) and latents[0].shape == (2, 2) and same([torch.zeros(3)], latents[1:])
    assert unpack_samples(pack_samples(None, [torch.ones(1)]), CPU)[0] is None


def test_a_video_keeps_its_sound_and_what_cannot_travel_is_refused():
    video = VideoWithSound([noise("RGB")] * 2, np.arange(6, dtype=np.float32).reshape(2, 3), 16000)
    ((found,), _) = unpack_samples(pack_samples([video], None), CPU)
    assert same(video, found) and same(video.sound, found.sound) and found.sampling_rate == 16000
    with pytest.raises(TypeError, match="holds a set, .*leave out reward_processes"):
        pack_samples([{1}], None)


def test_a_row_arrives_as_it_was_decoded():
    palette = noise("RGB").quantize(4)
    row = {"prompt": "a", "image": noise("L"), "mask": palette, "height": 16, "scale": 0.1, "none": None, "is": True}
    row |= {"pose": {"angles": [1, 2.5], "name": "é"}, "video": [noise("RGB")] * 2}
    ((found,), _) = unpack_samples(pack_samples([row], None), CPU)
    assert found.keys() == row.keys()
    for name in ("image", "video"):
        assert same(row.pop(name), found.pop(name))
    own, theirs = row.pop("mask"), found.pop("mask")
    assert same(own, theirs) and own.getpalette() == theirs.getpalette() and found == row


def test_columns_come_back_as_they_were():
    columns = {"text": ["a", None], "number": [0.1, float("inf")], "count": [2**60, 3], "list": [[1], []]}
    assert unpack_columns(pack_columns(columns, [7, 3])) == (columns, [7, 3])
    assert unpack_columns(pack_columns({}, [7, 3])) == ({}, [])
