"""The defaults of a family, which fit pipelines without particulars."""

from types import SimpleNamespace

import torch
from torch import nn

from diffusion_grpo.pipelines import Family


def test_arguments_and_calls_stay_as_they_are():
    inputs, kwargs = {"prompt": ["a"]}, {"hidden_states": 1}
    family = Family()
    assert family.arguments(None, inputs) is inputs and family.network_call(kwargs) == (kwargs, False)
    assert family.token_count({"max_new_tokens": 7}) == 7 and family.language_model is None
    with family.bridged(None):
        pass


def test_ids_below_the_size_of_the_output_layer_may_be_drawn():
    family = Family()
    family.language_model = "writer"
    writer = SimpleNamespace(get_output_embeddings=lambda: nn.Linear(4, 11))
    assert family.vocabulary(SimpleNamespace(writer=writer)) == 11


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
