"""Rows and embeddings arrive at another process as they were."""

import numpy as np
import pytest
import torch
from plain_images import are_alike, random_image

from diffusion_grpo.media.serialize import pack_values, unpack_values


@pytest.mark.parametrize(
    "value",
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
def test_a_packet_holds_what_was_put_in(value):
    assert are_alike([value, torch.zeros(3)], unpack_values(pack_values([value, torch.zeros(3)])))


def test_what_cannot_travel_is_refused():
    with pytest.raises(TypeError, match="holds a set"):
        pack_values([{1}])


def test_a_row_arrives_as_it_was_decoded():
    row = {"prompt": "a", "height": 16, "scale": 0.1, "none": None, "is": True}
    row |= {"image": random_image("L"), "mask": random_image("RGB").quantize(4)}
    row |= {"pose": {"angles": [1, 2.5], "name": "é"}, "video": [random_image("RGB")] * 2}
    (found,) = unpack_values(pack_values([row]))
    assert found.keys() == row.keys()
    for name in ("image", "video"):
        assert are_alike(row.pop(name), found.pop(name))
    own, theirs = row.pop("mask"), found.pop("mask")
    assert are_alike(own, theirs) and own.getpalette() == theirs.getpalette() and found == row
