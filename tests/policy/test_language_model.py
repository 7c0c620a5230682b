"""Tokens are drawn by seed, and texts end; `test_token.py` scores them."""

import torch
from painter import COLORS, END, INPUTS, LENGTH

from diffusion_grpo.policy.language_model import draw
from diffusion_grpo.policy.token_process import Sampling


def call_of(pipe, prompts):
    """What a pipeline hands to `generate`."""
    return {**pipe.tokenizer(prompts, return_tensors="pt", padding=True), "max_new_tokens": LENGTH, "do_sample": True}


def drawn_by(pipe, prompts, seeds):
    settings = dict(count=LENGTH, vocabulary=COLORS, sampling=Sampling(top_p=0.9), seeds=torch.tensor(seeds))
    return draw(pipe.writer, call_of(pipe, prompts), **settings)


def test_what_a_sample_gets_depends_on_its_seed_alone(painter):
    both = drawn_by(painter, INPUTS["prompt"], [3, 4])
    for row, seed in enumerate([3, 4]):
        alone = drawn_by(painter, INPUTS["prompt"][row : row + 1], [seed])
        length = int(alone.mask.sum())
        assert torch.equal(alone.ids[0, :length], both.ids[row, :length])
    other = drawn_by(painter, INPUTS["prompt"], [3, 5])
    assert torch.equal(other.ids[0][other.mask[0]], both.ids[0][both.mask[0]])
    assert not torch.equal(other.ids[1], both.ids[1])


def test_texts_end_and_what_follows_does_not_count(painter):
    many = drawn_by(painter, ["a cat"] * 64, list(range(64)))
    lengths = many.mask.sum(1)
    assert 1 <= lengths.min() < LENGTH == lengths.max()
    for ids, length in zip(many.ids.tolist(), lengths.tolist(), strict=True):
        assert END not in ids[: length - 1] and (ids[length - 1] == END or length == LENGTH)
        assert all(token < COLORS for token in ids[:length])
