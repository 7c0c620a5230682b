"""Each distinct prompt is encoded once and alone; what is kept outlasts a rollout, in memory or on disk."""

import io
import logging
import os

import pytest
import tiny_pipelines
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.prompt_cache import KeptResults, PromptCache, check_encode_prompt, find_layout, hash_tensor


class Pipe:
    """Encodes a prompt as its length and remembers what it was asked for."""

    _execution_device = torch.device("cpu")

    def __init__(self, encode=None):
        self.asked = []
        self.encode = encode or self.measure

    def measure(self, prompt, **_):
        rows = torch.tensor([[float(len(text))] for text in prompt])
        return rows[:, None], rows

    def encode_prompt(
        self,
        prompt,
        negative_prompt=None,
        prompt_2=None,
        batch_size=None,
        lyrics=None,
        instruction=None,
        template=None,
        num_images_per_prompt=1,
        prompt_embeds=None,
    ):
        self.asked.append([prompt] if isinstance(prompt, str) else list(prompt))
        return self.encode(self.asked[-1], **{} if batch_size is None else {"batch_size": batch_size})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompt_2": ["a", "a", "b", "a"], "negative_prompt": "grey"},
        {"instruction": (10, 20, 30, 40)},
        {"instruction": ["one", "two"], "template": {"template": "{}", "crop_start": 95}},
    ],
)
def test_repeated_prompts_are_encoded_once_and_spread(settings):
    pipe, cache = Pipe(), PromptCache()
    prompts = ["cat", "cat", "horse", "cat"]
    with cache.serve(pipe):
        embeds, pooled = pipe.encode_prompt(prompts, **settings)
        again, _ = pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [["cat"], ["horse"], ["cat", "cat"]]  # the last once, to see how two lie in memory
    assert pooled.flatten().tolist() == [3, 3, 5, 3] and embeds.shape == (4, 1, 1)
    assert torch.equal(embeds, again)


@pytest.mark.parametrize(
    "settings",
    [
        {"lyrics": ["la", "la", "lo", "le"]},
        {"template": {"images": torch.zeros(2)}},
        {"negative_prompt": ["", ""]},
        {"num_images_per_prompt": 2},
        {"prompt_embeds": torch.zeros(4, 2)},
    ],
)
def test_what_may_differ_by_sample_is_encoded_whole(settings):
    pipe, cache = Pipe(), PromptCache(KeptResults())
    prompts = ["cat", "cat", "horse", "cat"]
    with cache.serve(pipe):
        for _ in range(2):
            pipe.encode_prompt(prompts, **settings)
    assert pipe.asked == [prompts] and cache.encoded == 0


def test_a_part_of_a_call_is_a_call():
    """Whatever else it says of the number of samples; a text alone is a list of one."""
    pipe, cache = Pipe(lambda prompt, batch_size: torch.zeros(batch_size, 1)), PromptCache()
    with cache.serve(pipe):
        assert pipe.encode_prompt(["cat", "horse"], negative_prompt=["dog", "fish"], batch_size=2).shape == (2, 1)
        pipe.encode_prompt(["horse"], negative_prompt=["fish"], batch_size=1)
        pipe.encode_prompt("horse", negative_prompt="fish", batch_size=1)
        assert pipe.asked == [["cat"], ["horse"], ["cat", "cat"]]
        pipe.encode_prompt(["horse"], negative_prompt=["dog"], batch_size=1)
    assert pipe.asked[-1] == ["horse"] and len(pipe.asked) == 4


def test_another_rollout_encodes_anew_unless_results_are_kept():
    for kept, again in ((None, [["horse"]]), (KeptResults(), [])):
        pipe, cache = Pipe(), PromptCache(kept)
        with cache.serve(pipe):
            pipe.encode_prompt(["cat", "horse"])
            count = len(pipe.asked)
            _, pooled = pipe.encode_prompt(["horse", "cat", "cat"])
            assert pooled.flatten().tolist() == [5, 3, 3] and len(pipe.asked) == count
            cache.clear()
            pipe.encode_prompt(["horse"])
        assert pipe.asked[count:] == again


def padded(prompt):
    """Embeddings as long as the longest prompt of a call."""
    width = max(map(len, prompt))
    return torch.tensor([[float(ord(letter)) for letter in text.ljust(width)] for text in prompt])[..., None]


def test_embeddings_padded_to_the_longest_prompt_are_encoded_together():
    pipe, cache = Pipe(padded), PromptCache()
    with cache.serve(pipe):
        alone = pipe.encode_prompt(["cat"])
        both = pipe.encode_prompt(["cat", "horse"])
        again = pipe.encode_prompt(["horse", "cat", "cat"])
        assert torch.equal(pipe.encode_prompt(["cat"]), alone)  # whatever it lay beside in between
    assert alone.shape == (1, 3, 1) and both.shape == (2, 5, 1)
    assert torch.equal(again, both[[1, 0, 0]])
    assert sum(len(set(asked)) == 2 for asked in pipe.asked) == 1


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
        pipe, cache = Pipe(encode), PromptCache()
        with cache.serve(pipe):
            found.append({tuple(call): pipe.encode_prompt(call) for call in order})
    for call in map(tuple, calls):
        assert all(torch.equal(one, other) for one, other in zip(found[0][call], found[1][call], strict=True))


def rich(prompt):
    """Rows first, layers first, lists, masks that may be missing, and what all samples share."""
    rows = torch.tensor([[float(len(text))] * 3 for text in prompt])
    return rows, (rows.expand(5, -1, -1), list(rows)), {"mask": None, "ids": torch.arange(3), "scale": 2}


def test_results_are_joined_as_the_encoder_would():
    pipe, cache = Pipe(rich), PromptCache()
    expected = rich(["tree", "cat", "tree"])
    with cache.serve(pipe):
        rows, (layers, items), others = pipe.encode_prompt(["tree", "cat", "tree"])
    assert torch.equal(rows, expected[0]) and torch.equal(layers, expected[1][0])
    assert all(map(torch.equal, items, expected[1][1])) and len(items) == 3
    assert others["mask"] is None and others["scale"] == 2 and torch.equal(others["ids"], torch.arange(3))
    assert ["tree", "cat", "tree"] not in pipe.asked


@pytest.mark.parametrize(
    "encode",
    [
        lambda prompt: torch.tensor([0, *map(len, prompt)]).cumsum(0),  # lengths, one after the other
        lambda prompt: torch.tensor([max(map(len, prompt))]),  # of all, and depends on the prompts
    ],
)
def test_results_that_cannot_be_joined_are_encoded_together(encode):
    pipe, cache = Pipe(encode), PromptCache()
    with cache.serve(pipe):
        assert torch.equal(pipe.encode_prompt(["horse", "cat"]), encode(["horse", "cat"]))


def test_layers_before_the_samples_are_not_taken_for_samples():
    one, two = torch.ones(1, 1, 4), torch.ones(1, 2, 4)
    assert find_layout(one, two) == 1 and find_layout(one, torch.ones(2, 1, 4)) == 0


def test_a_pipeline_may_change_what_it_gives_and_gets():
    class Writing(Pipe):
        def encode_prompt(self, prompt, lyrics=None):
            prompt[:] = [f"<{text}>" for text in prompt]
            self.asked.append(prompt)
            return self.measure(prompt), [torch.zeros(2)]

    pipe, cache, prompts = Writing(), PromptCache(), ["cat", "horse"]
    with cache.serve(pipe):
        for mask in (None, torch.ones(2)):  # row by row, and as a whole
            for _ in range(2):
                (_, pooled), others = pipe.encode_prompt(prompt=prompts, lyrics=mask)
                assert pooled.flatten().tolist() == [5, 7] and len(others) == 1
                others.clear()
    assert prompts == ["cat", "horse"] and len(pipe.asked) == 4


class Scaled:
    """An encoder whose embeddings depend on more than the prompt."""

    def encode_prompt(self, prompt, scale=1.0, layers=None, images=None):
        rows = torch.tensor([[float(len(text))] for text in prompt]) * scale * sum(layers or [1])
        return rows if images is None else rows + images[0]


@pytest.mark.parametrize(
    "name, values", [("scale", (1.0, 2.0)), ("layers", ((1, 2), (1, 3))), ("images", torch.eye(2))]
)
def test_a_prompt_that_was_encoded_under_other_settings_is_encoded_anew(name, values):
    pipe, cache, prompts = Scaled(), PromptCache(), ["cat", "horse"]
    settings = [{name: value} for value in values]
    expected = [pipe.encode_prompt(prompts, **given) for given in settings]
    assert not torch.equal(*expected)
    with cache.serve(pipe):
        for given, embeddings in zip(settings * 2, expected * 2, strict=True):
            assert torch.equal(pipe.encode_prompt(prompts, **given), embeddings)


def test_an_encoder_of_the_users_own_stays_on_the_pipeline():
    pipe = Pipe()
    pipe.encode_prompt = own = lambda prompt, **kwargs: torch.zeros(len(prompt), 1)
    with PromptCache().serve(pipe):
        assert pipe.encode_prompt(["cat"], scale=object()).tolist() == [[0.0]]  # an argument that has no equal
    assert pipe.encode_prompt is own


def test_an_encoder_can_be_asked_without_a_pipeline():
    pipe, cache = Pipe(), PromptCache(KeptResults())
    keys = cache.keep(pipe.encode_prompt, ["cat", "horse"])
    count = len(pipe.asked)
    _, pooled = cache.call(pipe.encode_prompt, ["horse", "cat", "horse"])
    assert pooled.flatten().tolist() == [5, 3, 5] and len(pipe.asked) == count and cache.encoded == 2
    assert [cache.kept.shapes(key) for key in keys] == ["[[1, 1, 1], [1, 1]]"] * 2 + ["[]"]


# Kept results


def test_equal_tensors_are_in_memory_once():
    kept = KeptResults()
    for name, value in (("cat", 1.0), ("horse", 2.0), ("dog", 1.0)):
        kept.put(name, (torch.full((2,), value), None, [torch.zeros(2)]), {})
    (cat, nothing, [ends]), (horse, _, [same]), (dog, _, _) = map(kept.get, ("cat", "horse", "dog"))
    assert ends is same and cat is dog and not torch.equal(cat, horse) and nothing is None
    assert kept.get("fish") is None and "fish" not in kept and "cat" in kept


def encode_on_disk(folder, prompts):
    """Encode with results in a folder; return the pipeline."""
    pipe = Pipe(lambda prompt: (torch.tensor([[float(len(text))] for text in prompt]).bfloat16(), [torch.zeros(2)]))
    with PromptCache(KeptResults(folder)).serve(pipe):
        rows, _ = pipe.encode_prompt(prompts)
    assert rows.dtype == torch.bfloat16 and rows.flatten().tolist() == [len(text) for text in prompts]
    return pipe


def test_a_folder_serves_later_runs(tmp_path):
    encode_on_disk(tmp_path, ["cat", "horse"])
    texts = "".join(path.read_text() for path in (tmp_path / "prompts").iterdir())
    assert "cat" in texts and "horse" in texts
    assert len(list((tmp_path / "tensors").iterdir())) == 3  # what both share is there once
    assert encode_on_disk(tmp_path, ["horse", "cat", "cat"]).asked == [] and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["{", '{"texts": {}}', '{"leaves": [{"name": "gone"}], "structure": ""}'])
def test_a_damaged_form_counts_as_missing(damage, tmp_path):
    encode_on_disk(tmp_path, ["cat"])
    (path,) = (tmp_path / "prompts").iterdir()
    path.write_text(damage)
    assert encode_on_disk(tmp_path, ["cat"]).asked == [["cat"]]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_damaged_tensor_is_written_anew(is_whole, tmp_path):
    encode_on_disk(tmp_path, ["cat"])
    for path in (tmp_path / "tensors").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size if is_whole else b"")
    assert [encode_on_disk(tmp_path, ["cat"]).asked for _ in range(3)] == [[["cat"]], [["cat"]], []]


def test_what_is_not_written_to_its_end_is_not_there(tmp_path, monkeypatch):
    kept = KeptResults(tmp_path)
    kept.put("before", torch.ones(2), {})

    def fail(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    for key, tensor in (("key", torch.ones(2)), ("other", torch.zeros(2))):  # the first tensor is there
        with pytest.raises(OSError, match="No space left"):
            kept.put(key, tensor, {})
    assert "before" in kept and "key" not in kept and "other" not in kept
    assert len(list(tmp_path.rglob("*.*"))) == 2  # a prompt and a tensor, and nothing half written


def quantise(value):
    """Return a weight as torchao keeps it, made of numbers and scales."""
    layer = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


def test_equal_tensors_have_equal_hashes_quantised_ones_too():
    one = torch.arange(6.0)
    assert hash_tensor(one) == hash_tensor(one.clone()) == hash_tensor(torch.arange(12.0)[:6])
    others = [one.view(2, 3), one.bfloat16(), one + 1, torch.tensor(1.0), quantise(1.0), quantise(2.0)]
    assert len({hash_tensor(tensor) for tensor in (one, *others)}) == 7
    assert hash_tensor(quantise(1.0)) == hash_tensor(quantise(1.0))


@pytest.mark.parametrize("name", ["qwen_image_edit", "dit"])
def test_pipelines_whose_encoder_takes_more_than_texts_are_refused(name):
    with pytest.raises(UnsupportedPipeline, match="cache_prompt_embeds"):
        check_encode_prompt(type(tiny_pipelines.build(name)[0]))
    check_encode_prompt(type(tiny_pipelines.build("sd3")[0]))


def test_that_a_prompt_is_cut_for_clip_is_said_once(monkeypatch):
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [handler])
    PromptCache(), PromptCache()
    text = "The following part of your input was truncated because CLIP can only handle sequences up to 77 tokens: "
    for line in (f"{text}['a, b']", f"{text}['c']", f"{text}['a, b']", "something else", "something else"):
        logging.getLogger("diffusers.pipelines").warning(line)
    said = [line.removeprefix(text) for line in handler.stream.getvalue().splitlines()]
    assert said == ["['a, b']", "['c']", "something else", "something else"]


def test_results_have_no_graph_and_each_call_is_told_its_size():
    """In a replay, gradients are on; an encoder that is trained by nobody must not keep its activations."""
    weight, sizes = torch.ones(1, requires_grad=True), []

    def encode(prompt, batch_size):
        sizes.append((len(prompt), batch_size))
        return torch.tensor([[float(len(text))] for text in prompt]) * weight

    pipe = Pipe(encode)
    with PromptCache().serve(pipe):
        embeds = pipe.encode_prompt(["cat", "horse"], batch_size=2)
    assert not embeds.requires_grad and embeds.flatten().tolist() == [3, 5]
    assert sizes == [(1, 1), (1, 1), (2, 2)]
