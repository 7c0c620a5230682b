"""What processes send: DDP's formula is what a run of two really hands to its collectives."""

import json
import sys
from pathlib import Path

import pytest
import ranks_server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import communication
from communication import Update, counted_run, ddp, gather_bytes, zero2, zero3


@pytest.mark.distributed
def test_ddp_sends_gradients_once_an_update_and_no_buffers(tmp_path):
    ranks_server.succeed(tmp_path, 2, communication.count, tmp_path, True)
    assert_ddp(json.loads((tmp_path / "counted.json").read_text()))


@pytest.mark.distributed
def test_the_command_counts_so_too():
    assert_ddp(counted_run(is_lora=True))


def assert_ddp(counted):
    """What the formulas say is what was sent."""
    update = Update(0, counted["trained"], 2, 0, 0, counted["samples"], counted["rewards"])
    assert counted["bytes"]["all_reduce"] == ddp(update, 2)["gradients"]  # a ring of two sends what it is handed
    # each of the two hands over its half; and one number, whether it failed, twice in a rollout and once in an update
    assert counted["bytes"]["all_gather"] == gather_bytes(update) // 2 + 3 * 8
    assert counted["bytes"].get("broadcast", 0) < 1024  # the position table alone has 74,048 bytes


def test_formulas_scale_as_they_say():
    update = Update(weights=1000, trained=100, micro_batches=4, rollout_calls=10, trained_passes=36, samples=8)
    for formula in (ddp, zero2, zero3):
        assert sum(formula(update, 1).values()) == 0.0  # one process sends nothing
        few, many = (sum(formula(update, processes).values()) for processes in (2, 512))
        assert few < many < 2 * few + 1  # and each of many no more than twice what each of two does
    whole = 2 * 1100 * 511 / 512
    assert zero3(update, 512)["weights"] == pytest.approx(whole * (2 * 36 + 1))
    assert zero3(update, 512, gathers_once=False)["weights"] == pytest.approx(whole * (2 * 36 + 10))


@pytest.mark.parametrize(("name", "billions"), [("SD3.5-M", 2.2), ("FLUX.1-dev", 11.9)])
def test_networks_have_their_published_sizes(name, billions):
    weights, lora = communication.sizes(name)
    assert weights / 1e9 == pytest.approx(billions, abs=0.1)
    assert 0 < lora < 0.02 * weights
