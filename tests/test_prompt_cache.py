"""Each distinct prompt is encoded once, also where the pipeline hands settings in lists and dicts to its encoder."""

import pytest
import torch

from diffusion_grpo.prompt_cache import PromptCache


class Pipe:
    """Encodes a prompt as its length and remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def encode_prompt(self, prompt, negative_prompt=None, prompt_2=None, lyrics=None, instruction=None, template=None):
        self.asked.append(list(prompt))
        rows = torch.tensor([[float(len(text))] for text in prompt])
        return rows[:, None], rows


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompt_2": ["a", "a", "b", "a"]},
        {"negative_prompt": ["", "", "", ""]},
        {"instruction": ["one", "two"]},
        {"instruction": (10, 20, 30)},
        {"template": {"template": "{}", "crop_start": 95}},
    ],
    ids=["plain", "second prompt", "negative", "list of strings", "layers", "template"],
)
def test_repeated_prompts_are_encoded_once_and_spread(settings):
    pipe, cache = Pipe(), PromptCache()
    prompts = ["cat", "cat", "horse", "cat"]
    with cache.serving(pipe):
        embeds, pooled = pipe.encode_prompt(prompts, **settings)
        again, _ = pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [["cat", "horse"]]
    assert pooled.flatten().tolist() == [3, 3, 5, 3] and embeds.shape == (4, 1, 1)
    assert torch.equal(embeds, again)


@pytest.mark.parametrize(
    "settings",
    [
        {"lyrics": ["la", "la", "lo", "le"]},
        {"template": {"images": torch.zeros(2)}},
        {"negative_prompt": ["", ""]},
    ],
    ids=["a list that may count samples", "a tensor inside", "another length"],
)
def test_what_may_differ_by_sample_is_encoded_whole(settings):
    pipe, cache = Pipe(), PromptCache()
    prompts = ["cat", "cat", "horse", "cat"]
    with cache.serving(pipe):
        pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [prompts]


def test_prompts_that_differ_in_another_prompt_are_encoded_apart():
    pipe, cache = Pipe(), PromptCache()
    with cache.serving(pipe):
        pipe.encode_prompt(["cat", "cat"], negative_prompt=["dog", "fish"])
    assert pipe.asked == [["cat", "cat"]]
