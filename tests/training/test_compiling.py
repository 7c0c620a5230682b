"""Compiled blocks: as many graphs as there are circumstances, all of them made in the first rollout and update."""

import numpy as np
import pytest
import tiny_pipelines
import torch
from tiny_runs import finished_run, logged
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from diffusion_grpo.algorithms.base import RatioError
from diffusion_grpo.training.compiling import compile_blocks

SIZES = {"height": [32, 64, 32, 48], "width": [32, 32, 64, 32]}  # two prompts in each update


@pytest.fixture(autouse=True)
def fresh():
    """No graphs of other tests, and torch's own limits afterwards."""
    limit = torch._dynamo.config.cache_size_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.cache_size_limit = limit
    torch._dynamo.reset()


def round_otherwise(graph, inputs):
    """Run a graph as it is, and change its results a little if it is one with a gradient."""
    factor = 1 + 1e-3 * torch.is_grad_enabled()
    return lambda *given: [result * factor for result in graph(*given)]


class CountGraphs(TrainerCallback):
    """How many graphs there are after each update."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, args, state, control, **kwargs):
        self.counts.append(counters["stats"]["unique_graphs"])


def compiled(folder, **settings):
    """The trainer of a run with compiled blocks, and the number of graphs after each update."""
    count = CountGraphs()
    settings = {"torch_compile_backend": "eager", "max_steps": 3, "callbacks": [count]} | settings
    trainer = finished_run(folder, **settings)
    assert counters["frames"]["total"] == counters["frames"]["ok"] and not counters["graph_break"]
    return trainer, count.counts


class Block(torch.nn.Module):
    """One of several, each with something of its own in its code."""

    def __init__(self, power):
        super().__init__()
        self.linear, self.power = torch.nn.Linear(4, 4), power

    def forward(self, x):
        return self.linear(x) * 2**self.power


class Network(torch.nn.Module):
    """Blocks in a row, and a last layer that is not compiled."""

    _repeated_blocks = ["Block"]

    def __init__(self, count):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block(power) for power in range(count)))
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.blocks(x))


@pytest.mark.parametrize("is_hooked", [False, True])
def test_all_blocks_are_compiled_however_many_graphs_that_takes(is_hooked):
    network, shapes = Network(5), [(2, 4), (3, 4), (5, 4)]
    expected = [network(torch.ones(shape)) for shape in shapes]
    compile_blocks(network, {"backend": "eager"}, is_hooked)
    found = [network(torch.ones(shape)) for shape in shapes]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 8 and counters["frames"]["total"] == counters["frames"]["ok"]
    for shape in [*shapes, (9, 4), (11, 4)]:  # a third shape is one of any
        network(torch.ones(shape))
    assert counters["stats"]["unique_graphs"] == graphs


def test_nothing_is_compiled_after_the_first_update_and_the_ratio_stays_one(tmp_path):
    trainer, counts = compiled(tmp_path, name="wan", rewards=bright)
    assert counts[0] >= 3 and counts[1:] == counts[:1] * 2
    assert max(logged(trainer, "ratio/max_error")) <= 1e-5


def test_the_ratio_is_one_although_graphs_with_a_gradient_round_otherwise(tmp_path, monkeypatch):
    """The anchor of a single update is its own replay; the drift from the rollout is still measured and bounded."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compile_module(self, backend=round_otherwise))
    settings = {"name": "wan", "rewards": bright}
    trainer, _ = compiled(tmp_path / "within", max_ratio_error=1e-3, **settings)
    assert min(logged(trainer, "ratio/max_error")) > 1e-5
    assert set(logged(trainer, "ratio/min")) == set(logged(trainer, "ratio/max")) == {1.0}
    with pytest.raises(RatioError, match="The first ratio after a rollout is off by"):
        compiled(tmp_path / "beyond", max_ratio_error=1e-5, **settings)


def bright(completions, **columns):
    """Mean value of images, or of the first frames of videos."""
    return [float(np.asarray(x[0] if isinstance(x, list) else x).mean() / 255) for x in completions]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("sdxl", False), ("flux", True)])
def test_each_shape_is_compiled_once(tmp_path, name, checkpointing):
    """Several sizes, calls of another batch size in the rollout, a reference, evaluations: more graphs than 8."""
    settings = {"columns": SIZES, "shuffle_dataset": False, "rollout_batch_size": 3, "max_steps": 6, "beta": 0.1}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": checkpointing}
    trainer, counts = compiled(tmp_path, name=name, **settings)
    assert counts[3:] == counts[2:3] * 3  # every shape was seen in two updates and an evaluation
    assert max(logged(trainer, "ratio/max_error")) <= 1e-5


def test_quantised_layers_are_compiled_with_their_lora(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    pipe, _ = tiny_pipelines.build("wan")
    torchao.quantize_(pipe.transformer, torchao.Int8WeightOnlyConfig())
    trainer, counts = compiled(tmp_path, name="wan", model=pipe, rewards=bright, max_steps=2)
    assert counts[0] >= 3 and counts[1:] == counts[:1]
    assert max(logged(trainer, "ratio/max_error")) <= 1e-5
