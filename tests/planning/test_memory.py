"""Bytes by kind: optimizer states, quantised weights, blocks that are swapped, and phases."""

import math
from types import SimpleNamespace

import pytest
import tiny_pipelines
import torch
from diffusers import DiffusionPipeline
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from torch import nn

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.config.quantization import QuantizationSpec
from diffusion_grpo.planning.measure import DECODING, ENCODING
from diffusion_grpo.planning.memory import (
    Memory,
    add_up,
    count_optimizer_bytes,
    count_quantised_bytes,
    measure_groups,
    measure_largest_unit,
    weigh,
)
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.training.block_swap import Group


def test_eight_bit_states_are_a_byte_a_value_and_a_scale_a_block():
    _, _, args = parse_train_arguments(None, "--model a/b --dataset x --reward_funcs y".split())
    large, small = nn.Parameter(torch.empty(64, 100)), nn.Parameter(torch.empty(10))
    for args.optim, moments in (
        ("adamw_8bit", 2),
        ("ademamix_8bit", 3),
        ("rmsprop_bnb_8bit", 1),
        ("paged_lion_8bit", 1),
    ):
        assert count_optimizer_bytes([large, small], args) == moments * (6400 + 4 * 25 + 4 * 10)


@pytest.mark.slow  # torch compiles the step for half a minute
def test_four_bit_states_are_half_a_byte_a_value():
    _, _, args = parse_train_arguments(
        None, "--model a/b --dataset x --reward_funcs y --optim adamw_torch_4bit".split()
    )
    large = nn.Parameter(torch.empty(1024, 1024))
    assert 2**20 <= count_optimizer_bytes([large], args) <= 1.1 * 2**20


def test_only_the_largest_phase_counts_beside_what_is_always_there():
    always, short = Memory("weights", 100, 10), Memory("decoding", 20, phase="decoding")
    update, loading = Memory("activations", 50, 1, phase="update"), Memory("pipeline", 0, 90, phase="loading")
    total = add_up([always, short, update, loading])
    assert (total.accelerator, total.cpu, total.phase) == (150, 90, "update")
    assert add_up([always, short]).phase == "decoding"
    alone = Memory("encoding prompts", 120, phase="preparing")  # the weights are not there yet
    assert add_up([always, alone]).accelerator == 120


def test_units_of_fsdp_are_the_named_blocks_and_what_is_in_none():
    """A stage of a UNet is a list of modules, too, but no unit."""

    class Block(nn.Linear):
        pass

    class Network(nn.Module):
        _repeated_blocks = ["Block"]

        def __init__(self, width):
            super().__init__()
            self.conv_in = nn.Linear(3, 2, bias=False)
            self.stages = nn.ModuleList(nn.ModuleList(Block(width, 5, bias=False) for _ in range(2)) for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(7) for _ in range(2))

    outside = 3 * 2 + 2 * 2 * 7
    assert measure_largest_unit(Network(20)) == 4 * (20 * 5 + outside)
    assert measure_largest_unit(nn.Linear(3, 2, bias=False)) == 4 * 6


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (QuantizationSpec("bitsandbytes_4bit"), 64 * 128 // 2 + 4 * 128),
        (QuantizationSpec("bitsandbytes_4bit", {"bnb_4bit_use_double_quant": True}), 64 * 128 // 2 + 128 + 4),
        (QuantizationSpec("bitsandbytes_8bit"), 64 * 128 + 4 * 64),
        (QuantizationSpec("quanto", {"weights_dtype": "int4"}), 64 * 128 // 2 + 4 * 64),
    ],
)
def test_quantised_weights_have_scales(spec, expected):
    assert count_quantised_bytes(torch.empty(64, 128), spec) == expected


def test_only_frozen_linear_layers_are_compressed():
    network = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Conv2d(4, 4, 3), torch.nn.Linear(64, 8))
    network[:2].requires_grad_(False)
    left = sum(p.nbytes for p in (*network[1].parameters(), network[0].bias, *network[2].parameters()))
    spec = QuantizationSpec("bitsandbytes_8bit")
    assert weigh(network, spec) == left + 64 * 128 + 4 * 64
    assert weigh(network, spec, is_frozen=True) == weigh(network, spec) - 4 * (64 * 8 + 8)
    assert weigh(network) == sum(p.nbytes for p in network.parameters())


def change_network(folder, **changes):
    """Make the network of a saved pipeline anew, with some changes in its configuration."""
    pipe = DiffusionPipeline.from_pretrained(folder)
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    network = getattr(pipe, name)
    setattr(pipe, name, type(network).from_config(dict(network.config) | changes))
    pipe.save_pretrained(folder)


POSITIONS = {"pos_embed_max_size": 96}  # a table that is large beside the other layers, as in real networks of SD3
DEEP = {"transformer_layers_per_block": [1, 8]}  # an attention of SDXL has up to ten blocks


SWAPS = [
    ("sd3", "leaf_level", 1, True, POSITIONS, True),
    ("wan_experts", "block_level", 1, True, None, False),  # one expert at a time
]
MORE_SWAPS = [
    ("sd3", "block_level", 2, False, None, True),
    ("sd3", "leaf_level", 1, False, None, True),  # all layers of a block, while it is recomputed
    ("sd3", "leaf_level", 1, False, POSITIONS, False),  # the table belongs to a module that has a layer
    ("sdxl", "leaf_level", 1, False, DEEP, True),  # recomputes its attentions block by block
    ("sdxl", "block_level", 1, True, None, False),  # no two large groups follow each other
]


@pytest.mark.parametrize(
    ("name", "level", "blocks", "stream", "changes", "is_recomputed"),
    SWAPS + [pytest.param(*swap, marks=pytest.mark.slow) for swap in MORE_SWAPS],
)
def test_swapped_blocks_take_what_the_largest_group_takes(
    name, level, blocks, stream, changes, is_recomputed, tmp_path, monkeypatch
):
    swap = {"group_offload": level, "group_offload_blocks": blocks, "group_offload_stream": stream}
    config = write_run(tmp_path, name, **swap, gradient_checkpointing=is_recomputed)
    if changes is not None:
        change_network(tmp_path / "model", **changes)
    planned = next(item for item in plan(config, []).memory if item.name == "parameters")
    present, most, fetch = {}, [0], Group.fetch

    def count(group):
        fetch(group)
        present[id(group)] = group
        there = {id(x): x.nbytes for g in present.values() if g.is_present for x in g.tensors}
        most[0] = max(most[0], sum(there.values()))

    monkeypatch.setattr(Group, "fetch", count)
    trainer = build_trainer(*parse_train_arguments(config, []))
    network = trainer.model  # experts together
    trainer.train()
    own = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    excess = 1.1 if stream and (name == "sdxl" or level == "leaf_level") else 1.0
    assert own + most[0] <= planned.accelerator <= excess * (own + most[0])
    waiting = [x.nbytes for x in (*network.parameters(), *network.buffers()) if not x.requires_grad]
    # torch rounds page-locked memory up to powers of two
    assert planned.cpu == sum(2 ** math.ceil(math.log2(size)) if stream else size for size in waiting)


def test_a_stream_fetches_one_block_at_a_time_whatever_the_size_of_a_group():
    network, args = nn.Module(), SimpleNamespace(group_offload="block_level", group_offload_blocks=3)
    network.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False).requires_grad_(False) for _ in range(6))
    for args.group_offload_stream, blocks in ((False, 3), (True, 2)):
        assert measure_groups(network, args) == blocks * 100


def test_what_works_beside_cached_prompts_is_counted(tmp_path):
    """GLM-Image's language model writes tokens in each rollout, though the text encoder is gone."""
    swap = {"offload_frozen": "cpu", "cache_prompt_embeds": "memory"}
    config = write_run(tmp_path, "glm_image", **swap)
    pipe, _ = tiny_pipelines.build("glm_image")
    encoder = pipe.vision_language_encoder
    own = sum(x.nbytes for x in (*encoder.parameters(), *encoder.buffers()))
    rows = [item for item in plan(config, []).memory if item.phase == ENCODING]
    assert [item.accelerator for item in rows] == [own]


def test_what_turns_tokens_into_samples_is_counted_by_its_weights(tmp_path):
    settings = {"train_component": "vision_language_encoder", "offload_frozen": "cpu", "epsilon": 0.2}
    config = write_run(tmp_path, "glm_image", **settings)
    made = plan(config, [])
    trainer = build_trainer(*parse_train_arguments(config, []))
    parts = [part for name, part in trainer.pipe.components.items() if isinstance(part, torch.nn.Module)]
    others = [part for part in parts if part is not trainer.pipe.vision_language_encoder]
    largest = max(sum(x.nbytes for x in (*part.parameters(), *part.buffers())) for part in others)
    [row] = [item for item in made.memory if item.phase == DECODING]
    assert row.accelerator == largest
    assert any("without activations" in note for note in made.notes)
