"""Each distinct prompt is encoded once, also where the pipeline hands settings in lists and dicts to its encoder."""

import io
import logging

import pytest
import torch

from diffusion_grpo.policy.prompt_cache import PromptCache


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
    with cache.serve(pipe):
        embeds, pooled = pipe.encode_prompt(prompts, **settings)
        again, _ = pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [["cat"], ["cat"] * 4, ["horse"]]  # the second once in a run, to compare the shapes
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
    with cache.serve(pipe):
        pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [prompts]


def test_prompts_that_differ_in_another_prompt_are_encoded_apart():
    pipe, cache = Pipe(), PromptCache()
    with cache.serve(pipe):
        pipe.encode_prompt(["cat", "cat"], negative_prompt=["dog", "fish"])
    assert pipe.asked == [["cat"], ["cat", "cat"], ["cat"]]


def test_other_batches_of_the_same_prompts_encode_nothing_again():
    """As with best_of_n, or where rollout and update have different batch sizes."""
    pipe, cache = Pipe(), PromptCache()
    with cache.serve(pipe):
        pipe.encode_prompt(["cat", "cat"])
        pipe.encode_prompt(["cat", "horse"])
        embeds, pooled = pipe.encode_prompt(["horse", "cat", "cat", "horse"])
        pipe.encode_prompt(["horse"])
    assert pipe.asked == [["cat"], ["cat", "cat"], ["horse"]]
    assert pooled.flatten().tolist() == [5, 3, 3, 5] and embeds.shape == (4, 1, 1)
    cache.clear()
    with cache.serve(pipe):
        pipe.encode_prompt(["horse"])
    assert pipe.asked[-1] == ["horse"] and len(pipe.asked) == 4


def test_embeddings_padded_to_the_longest_prompt_are_encoded_together():
    pipe, cache = Pipe(), PromptCache()

    def padded(prompt):
        pipe.asked.append(list(prompt))
        width = max(map(len, prompt))
        return torch.tensor([[float(ord(letter)) for letter in text.ljust(width)] for text in prompt])[..., None]

    pipe.encode_prompt = padded
    with cache.serve(pipe):
        alone = pipe.encode_prompt(["cat"])
        both = pipe.encode_prompt(["cat", "horse"])
        again = pipe.encode_prompt(["horse", "cat"])
    assert alone.shape == (1, 3, 1) and both.shape == (2, 5, 1)
    assert torch.equal(again, both.flip(0)) and pipe.asked.count(["cat", "horse"]) == 1
    with cache.serve(pipe):
        assert torch.equal(pipe.encode_prompt(["cat"]), alone)  # whatever it lay beside in between


def test_embeddings_depend_on_nothing_but_the_call():
    """What a replay, another process or a resumed run is given is what the rollout was given, to the last bit."""
    torch.manual_seed(0)
    weights = torch.randn(64, 64)

    def encode(prompt):
        codes = torch.tensor([[float(ord(letter)) for letter in text.ljust(64)] for text in prompt])
        return codes @ weights / 7, (codes * len(prompt)).sum(1, keepdim=True)  # a batch of another size differs

    calls = [["cat", "horse"], ["horse", "tree"], ["tree"], ["cat", "tree", "horse"]]
    found = []
    for order in (calls, calls[::-1]):
        pipe, cache = Pipe(), PromptCache()
        pipe.encode_prompt = encode
        with cache.serve(pipe):
            found.append({tuple(call): pipe.encode_prompt(call) for call in order})
    for call in map(tuple, calls):
        assert all(torch.equal(one, other) for one, other in zip(found[0][call], found[1][call], strict=True))


def test_one_layer_before_the_samples_is_not_taken_for_samples():
    pipe, cache = Pipe(), PromptCache()
    pipe.encode_prompt = lambda prompt: torch.tensor([[float(len(text)) for text in prompt]])[..., None]
    with cache.serve(pipe):
        assert pipe.encode_prompt(["cat", "cat"]).shape == pipe.encode_prompt(["cat", "horse"]).shape == (1, 2, 1)


@pytest.mark.parametrize("copies", [3, 1], ids=["three layers", "one layer"])
def test_prompts_keep_their_order_where_layers_come_before_samples(copies):
    """Their first call may have prompts that all differ, as in an evaluation after training on single samples."""
    pipe, cache = Pipe(), PromptCache()
    pipe.encode_prompt = lambda prompt: torch.tensor([[float(len(text)) for text in prompt]] * copies)[..., None]
    with cache.serve(pipe):
        pipe.encode_prompt(["tree"])
        found = pipe.encode_prompt(["zebra", "cat"])
    assert torch.equal(found, pipe.encode_prompt(["zebra", "cat"]))


def test_an_encoder_of_the_users_own_stays_on_the_pipeline():
    pipe, cache = Pipe(), PromptCache()
    pipe.encode_prompt = own = lambda prompt: torch.zeros(len(prompt), 1)
    with cache.serve(pipe):
        assert pipe.encode_prompt(["cat"]).tolist() == [[0.0]]
    assert pipe.encode_prompt is own


def test_embeddings_that_do_not_lie_by_sample_are_kept_whole():
    pipe, cache = Pipe(), PromptCache()

    def layers_first(prompt):
        pipe.asked.append(list(prompt))
        return torch.tensor([float(len(text)) for text in prompt]).expand(3, -1)[..., None]

    pipe.encode_prompt = layers_first
    with cache.serve(pipe):
        first = pipe.encode_prompt(["cat", "cat"])
        count = len(pipe.asked)
        assert torch.equal(pipe.encode_prompt(["cat", "cat"]), first) and first.shape == (3, 2, 1)
    assert len(pipe.asked) == count and pipe.asked[-1] == ["cat", "cat"]


def test_an_encoder_that_writes_into_its_prompts_leaves_the_callers_alone():
    class Writing(Pipe):
        def encode_prompt(self, prompt, lyrics=None):
            prompt[:] = [f"<{text}>" for text in prompt]
            return super().encode_prompt(prompt)

    pipe, cache, prompts = Writing(), PromptCache(), ["cat", "horse"]
    with cache.serve(pipe):
        for mask in (None, torch.ones(2)):  # row by row, and as a whole
            first = pipe.encode_prompt(prompt=prompts, lyrics=mask)[1]
            assert torch.equal(first, pipe.encode_prompt(prompt=prompts, lyrics=mask)[1])
    assert prompts == ["cat", "horse"] and pipe.asked == [
        ["<cat>"],
        ["<cat>", "<cat>"],
        ["<horse>"],
        ["<cat>", "<horse>"],
    ]


class Scaled:
    """An encoder whose embeddings depend on more than the prompt."""

    def encode_prompt(self, prompt, scale=1.0, layers=None, images=None):
        rows = torch.tensor([[float(len(text))] for text in prompt]) * scale * sum(layers or [1])
        return rows if images is None else rows + images.sum()


@pytest.mark.parametrize(
    "settings",
    [
        [{"scale": 1.0}, {"scale": 2.0}],
        [{"layers": (1, 2)}, {"layers": (1, 3)}],
        [{"scale": 2.0, "layers": (1,)}, {"scale": 1.0, "layers": (1,)}],
        [{"images": torch.ones(2)}, {"images": torch.zeros(2)}],
    ],
    ids=["scale", "layers", "both", "tensors"],
)
def test_a_prompt_that_was_encoded_under_other_settings_is_encoded_anew(settings):
    pipe, cache, prompts = Scaled(), PromptCache(), ["cat", "horse"]
    expected = [pipe.encode_prompt(prompts, **given) for given in settings]
    assert not torch.equal(*expected)
    with cache.serve(pipe):
        for given, embeddings in zip(settings * 2, expected * 2, strict=True):
            assert torch.equal(pipe.encode_prompt(prompts, **given), embeddings)


def test_that_a_prompt_is_cut_for_clip_is_said_once(monkeypatch):
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [handler])
    PromptCache(), PromptCache()
    text = "The following part of your input was truncated because CLIP can only handle sequences up to 77 tokens: "
    for cut in (["a, b"], ["a, b", "a, b"], ["c", "a, b"], ["c"]):
        logging.getLogger("diffusers.pipelines").warning(text + str(cut))
    logging.getLogger("diffusers").warning("something else")
    logging.getLogger("diffusers").warning("something else")
    said = [line.removeprefix(text) for line in handler.stream.getvalue().splitlines()]
    assert said == ["['a, b']", "['c', 'a, b']", "something else", "something else"]
