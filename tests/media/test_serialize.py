"""Samples, rows and columns arrive at another process as they were."""

import numpy as np
import pytest
import torch
from plain_images import are_alike, random_image

from diffusion_grpo.media.samples import VideoWithSound
from diffusion_grpo.media.serialize import pack_samples, unpack_samples

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "sample",
    [
        random_image("RGB"),
        random_image("RGBA"),
        random_image("L"),
        [random_image("RGB"), random_image("RGB", (2, 7))],
        (np.ones((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)),
        np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4).transpose(1, 0, 2),
        torch.linspace(0, 1, 12).view(3, 4).T.bfloat16(),
        torch.tensor([1, 2]),
    ],
    ids=["RGB", "RGBA", "grey", "video", "arrays", "sound", "bfloat16", "integers"],
)
def test_a_parcel_holds_what_was_put_in(sample):
    samples, latents = unpack_samples(pack_samples([sample, sample], [torch.randn(2, 2), torch.zeros(3)]), CPU)
    assert are_alike([sample, sample], samples)
    assert latents[0].shape == (2, 2) and are_alike([torch.zeros(3)], latents[1:])
    assert unpack_samples(pack_samples(None, [torch.ones(1)]), CPU)[0] is None


def test_a_video_keeps_its_sound_and_what_cannot_travel_is_refused():
    video = VideoWithSound([random_image("RGB")] * 2, np.arange(6, dtype=np.float32).reshape(2, 3), 16000)
    ((found,), _) = unpack_samples(pack_samples([video], None), CPU)
    assert are_alike(video, found) and are_alike(video.sound, found.sound) and found.sampling_rate == 16000
    with pytest.raises(TypeError, match="holds a set"):
        pack_samples([{1}], None)


def test_a_row_arrives_as_it_was_decoded():
    row = {"prompt": "a", "height": 16, "scale": 0.1, "none": None, "is": True}
    row |= {"image": random_image("L"), "mask": random_image("RGB").quantize(4)}
    row |= {"pose": {"angles": [1, 2.5], "name": "é"}, "video": [random_image("RGB")] * 2}
    ((found,), _) = unpack_samples(pack_samples([row], None), CPU)
    assert found.keys() == row.keys()
    for name in ("image", "video"):
        assert are_alike(row.pop(name), found.pop(name))
    own, theirs = row.pop("mask"), found.pop("mask")
    assert are_alike(own, theirs) and own.getpalette() == theirs.getpalette() and found == row
