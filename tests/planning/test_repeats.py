"""A few equal blocks tell what many of them take."""

import contextlib
import json

import pytest
import torch
from diffusers import SD3Transformer2DModel
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from torch import nn

from diffusion_grpo.planning import measure as measuring
from diffusion_grpo.planning.live_bytes import LiveBytes
from diffusion_grpo.planning.plan import plan
from diffusion_grpo.planning.repeats import KEPT, BlocksDifferError, count_repeats, describe, shorten


class Layers(nn.Module):
    """Layers of some widths, one after the other."""

    def __init__(self, widths, skips=()):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in widths
        )
        self.skips, self.ran = skips, 0

    def forward(self, x):
        self.ran, kept = len(self.layers), []
        for place, layer in enumerate(self.layers):
            x = layer(x)
            kept.append(x if place in self.skips else None)
        return x


def peak(network, is_short):
    """The most bytes of a forward and backward pass, by all blocks or by a few of them."""
    with LiveBytes(list(network.parameters())) as live:
        x = torch.ones(64, 8, requires_grad=True)
        if is_short:
            with shorten([network]) as runs, count_repeats(runs, live):
                network(x).sum().backward()
        else:
            network(x).sum().backward()
    return live.peak


@pytest.mark.parametrize("widths", [[16] * 12, [16] * 7 + [32] * 9 + [8], [16, 32] * 4, [16] * KEPT, [8] * 6 + [64]])
def test_the_most_bytes_are_those_of_all_blocks(widths):
    network = Layers(widths).requires_grad_(False)
    expected = peak(network, is_short=False)
    assert network.ran == len(widths)
    assert peak(network, is_short=True) == expected
    assert network.ran == sum(min(KEPT, widths.count(width)) for width in set(widths)) or widths == [16, 32] * 4
    assert [layer[0].out_features for layer in network.layers] == widths  # all are back


def test_blocks_are_equal_if_their_weights_and_attributes_are():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert describe(one) == describe(other)
    assert describe(one) != describe(nn.Linear(4, 5)) and describe(one) != describe(nn.Linear(4, 4, bias=False))
    assert describe(one) != describe(nn.Linear(4, 4).half())
    assert describe(one) != describe(nn.Linear(4, 4).requires_grad_(False))
    other.window = 3
    assert describe(one) != describe(other)


def test_blocks_that_keep_different_amounts_are_told_apart():
    """Here the second of equal blocks is told by its place."""
    network = Layers([16] * 12, skips=(1,))
    with LiveBytes(list(network.parameters())) as live, shorten([network]) as runs, count_repeats(runs, live):
        with torch.no_grad(), pytest.raises(BlocksDifferError):
            network(torch.ones(64, 8))


def deepen(tmp_path, name, **settings):
    """A run on a tiny pipeline with many blocks."""
    config = write_run(tmp_path, name, bf16=True, **settings)
    path = tmp_path / "model" / "transformer" / "config.json"  # there are no weights to fit
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 9}))
    return config


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # gradients of one pass wait for those of the other
        pytest.param("qwen_image", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        ("sd3", {"samples_per_latent": 1}),  # the last block is another
        pytest.param("wan", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_networks_are_measured_by_a_few_blocks(name, settings, tmp_path, monkeypatch):
    config, found, made = deepen(tmp_path, name, **settings), [], []
    roll_out = measuring.rollout

    @contextlib.contextmanager
    def watch(networks):
        with shorten(networks) as runs:
            found.extend(runs)
            yield runs

    def count(*args, **kwargs):
        made.append(roll_out(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(measuring, "rollout", count)
    monkeypatch.setattr(measuring, "shorten", watch)
    short = plan(config, [])
    equal = 7 if name == "sd3" else 9  # its first block has two attentions
    assert {run.left_out for run in found} == {equal - KEPT}
    assert len(made) == 1  # and not a second time with all blocks
    monkeypatch.setattr(measuring, "shorten", lambda networks: contextlib.nullcontext([]))
    assert plan(config, []).memory == short.memory


def test_what_counts_on_the_number_of_blocks_runs_all(tmp_path, monkeypatch):
    config, forward = deepen(tmp_path, "sd3"), SD3Transformer2DModel.forward
    monkeypatch.setattr(measuring, "shorten", lambda networks: contextlib.nullcontext([]))
    expected = plan(config, []).memory
    monkeypatch.undo()

    def count(network, *args, **kwargs):
        return forward(network, *args, **kwargs) if network.transformer_blocks[8] else None

    monkeypatch.setattr(SD3Transformer2DModel, "forward", count)
    assert plan(config, []).memory == expected
