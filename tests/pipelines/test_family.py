"""The defaults of a family, which fit pipelines without particulars."""

import torch

from diffusion_grpo.pipelines import Family


def test_every_token_follows_the_recorded_ones():
    """The first sample's prompt is padded by one on the left; the last token needs no position after it."""
    prompt = {
        "input_ids": torch.tensor([[0, 5], [6, 7]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "extra": 1,
    }
    found = Family().scoring(None, prompt, ids=torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert found["input_ids"].tolist() == [[0, 5, 1, 2], [6, 7, 4, 5]] and found["extra"] == 1
    assert found["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert found["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
