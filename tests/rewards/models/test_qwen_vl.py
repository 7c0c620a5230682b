"""Sizes and texts that HPSv3 and VideoAlign share."""

import hashlib
import math

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from diffusion_grpo.rewards.models.qwen_vl import fit_size, read_template


@pytest.mark.parametrize("size", [(500, 300), (64, 2000), (448, 448), (20, 20), (1280, 704), (448, 462)])
@pytest.mark.parametrize(("least", "most"), [(200704, 200704), (100352, 200704)])
def test_sizes_are_those_of_qwen(size, least, most) -> None:
    width, height = fit_size(*size, min_pixels=least, max_pixels=most)
    assert (height, width) == smart_resize(size[1], size[0], min_pixels=least, max_pixels=most)
    with pytest.raises(ValueError, match="too elongated"):
        fit_size(2010, 10, 1, 2)


@pytest.mark.parametrize(("least", "most"), [(200704, 200704), (100352, 200704), (100352, 602112)])
def test_sizes_of_a_dense_grid_are_those_of_qwen_vl_utils(least, most) -> None:
    """Its formula written out; where sides land on multiples of 28 the order of the operations decides."""

    def expected(height: int, width: int) -> tuple[int, int]:
        rows, columns = max(28, round(height / 28) * 28), max(28, round(width / 28) * 28)
        if rows * columns > most:
            beta = math.sqrt((height * width) / most)
            rows, columns = (math.floor(side / beta / 28) * 28 for side in (height, width))
        elif rows * columns < least:
            beta = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * beta / 28) * 28 for side in (height, width))
        return columns, rows

    sides = range(16, 2049, 8)
    wrong = [
        (width, height)
        for width in sides
        for height in sides
        if fit_size(width, height, min_pixels=least, max_pixels=most) != expected(height, width)
    ]
    assert wrong == []
    assert fit_size(272, 272, min_pixels=200704, max_pixels=200704) == (448, 448)


def test_the_texts_are_as_the_models_were_trained_on() -> None:
    """To the last space: an editor that strips the ends of lines would change the scores."""
    digests = {
        name: hashlib.sha256(read_template(name).encode()).hexdigest()[:16]
        for name in ("hpsv3", "videoalign", "unified_reward_image", "unified_reward_video")
    }
    assert digests == {
        "hpsv3": "f6ee57479d4e9eee",
        "videoalign": "fdb6309bac618dd0",
        "unified_reward_image": "f56f919ce3bc6aab",
        "unified_reward_video": "514a6343388979f8",
    }
