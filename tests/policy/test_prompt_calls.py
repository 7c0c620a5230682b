"""What a call of `encode_prompt` asks for, and how results for single prompts become one for several."""

import pytest
import tiny_pipelines
import torch
from PIL import Image
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.prompt_calls import (
    CannotJoin,
    check_encode_prompt,
    find_layout,
    hash_tensor,
    join_results,
    list_shapes,
    move_result,
    read_call,
)


def encode(prompt, negative_prompt=None, device=None, layers=None, batch_size=None, prompt_embeds=None, image=None):
    """Has the parameters that matter."""


def read(**kwargs):
    return read_call(encode, (), kwargs)


def test_equal_parts_of_calls_have_equal_keys():
    both = read(prompt=["a", "b"], negative_prompt=["", ""], batch_size=2, device=torch.device("cpu"))
    assert both.count == 2 and both.names == ("prompt", "negative_prompt")
    for same in (
        read(prompt=["b"], negative_prompt=[""], batch_size=1),
        read(prompt="b", negative_prompt="", batch_size=1, device=torch.device("meta")),
        read(prompt=["b"], negative_prompt="", batch_size=1),
    ):
        assert same.key(0) == both.key(1) != both.key(0) and same.kind == both.kind
    assert read(prompt="b", negative_prompt="", batch_size=1, layers=(1, 2)).key(0) != both.key(1)
    assert read(prompt="b", negative_prompt="c", batch_size=1).key(0) != both.key(1)
    assert read(prompt="b", batch_size=1).key(0) != both.key(1)
    assert both.text(1) == {"prompt": "b", "negative_prompt": ""}


def test_a_part_of_a_call_is_a_call():
    call = read(prompt=["a", "b", "c"], negative_prompt="grey", batch_size=3)
    assert call.select([1]) == call.arguments | {"prompt": ["b"], "negative_prompt": "grey", "batch_size": 1}
    assert call.select([2, 2])["prompt"] == ["c", "c"] and call.select([2, 2])["negative_prompt"] == ["grey", "grey"]
    assert call.select([0, 1, 2])["prompt"] is not call.arguments["prompt"]  # an encoder may write into its list
    embeds = torch.arange(12.0).view(3, 2, 2)
    call = read(prompt=None, prompt_embeds=embeds, negative_prompt=["x", "y", "z"])
    assert call.names == ("negative_prompt", "prompt_embeds")
    assert torch.equal(call.select([1])["prompt_embeds"], embeds[1:2])
    assert call.key(0) != read(prompt=None, prompt_embeds=embeds[1:2], negative_prompt=["x"]).key(0)
    assert call.key(1) == read(prompt=None, prompt_embeds=embeds[1:2], negative_prompt=["y"]).key(0)


def test_what_is_no_text_is_refused():
    with pytest.raises(UnsupportedPipeline, match="also passes it 'image', a Image; leave cache_prompt_embeds out"):
        read(prompt=["a"], image=Image.new("RGB", (4, 4)))
    with pytest.raises(UnsupportedPipeline, match="it 'layers', a list; leave"):  # may be one for each sample
        read(prompt=["a", "b"], layers=["x", "y"])
    assert read(prompt=["a", "b"], layers=["x", "y", "z"]).count == 2
    with pytest.raises(UnsupportedPipeline, match="one sample per prompt"):
        read_call(lambda prompt, num_images_per_prompt=1: None, (["a"],), {"num_images_per_prompt": 2})
    for name, match in (
        ("qwen_image_edit", "takes 'image' in addition to the prompt"),
        ("dit", "has no method encode_prompt"),
    ):
        with pytest.raises(UnsupportedPipeline, match=match):
            check_encode_prompt(type(tiny_pipelines.build(name)[0]))
    check_encode_prompt(type(tiny_pipelines.build("sd3")[0]))


def encoded(texts):
    """Rows first, layers first, lists, masks that may be missing, and what all samples share."""
    rows = torch.tensor([[float(len(text))] * 3 for text in texts])
    return rows, (rows.expand(5, -1, -1), list(rows)), {"mask": None, "ids": torch.arange(3), "scale": 2}


def test_results_are_joined_as_the_encoder_would():
    layout = find_layout(encoded(["a"]), encoded(["a", "a"]))
    assert layout == [0, [1, "rows"], {"mask": "shared", "ids": "shared", "scale": "shared"}]
    joined = join_results([encoded([text]) for text in ("a", "bc", "def")], layout)
    expected = encoded(["a", "bc", "def"])
    assert torch.equal(joined[0], expected[0]) and torch.equal(joined[1][0], expected[1][0])
    assert all(map(torch.equal, joined[1][1], expected[1][1])) and joined[2]["scale"] == 2
    assert list_shapes(joined) == [[3, 3], [[5, 3, 3], [[3]] * 3], {"mask": None, "ids": [3], "scale": None}]
    assert move_result(joined, "meta")[1][1][0].device.type == "meta"


def test_what_cannot_be_joined_is_refused():
    with pytest.raises(CannotJoin):
        find_layout(torch.tensor([0, 4]), torch.tensor([0, 4, 8]))  # lengths, one after the other
    with pytest.raises(CannotJoin):
        find_layout([torch.ones(1)], torch.ones(2))
    with pytest.raises(CannotJoin, match=r"different sizes: \(1, 2\), \(1, 3\)"):
        join_results([torch.ones(1, 2), torch.ones(1, 3)], 0)
    with pytest.raises(CannotJoin, match="depends on the prompt"):
        join_results([torch.ones(2), torch.zeros(2)], "shared")


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
