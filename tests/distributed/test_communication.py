"""What processes send: DDP's gradients once an update, what a rollout gathers, and no buffers."""

import json
import sys
from pathlib import Path

import pytest
import ranks_server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import communication
from communication import Update, ddp, gather_bytes


@pytest.mark.distributed
def test_ddp_sends_gradients_once_an_update_and_no_buffers(tmp_path):
    ranks_server.succeed(tmp_path, 2, communication.count, tmp_path, True)
    counted = json.loads((tmp_path / "counted.json").read_text())
    update = Update(0, counted["trained"], 2, 0, 0, counted["samples"], counted["rewards"])
    assert counted["bytes"]["all_reduce"] == ddp(update, 2)["gradients"]  # a ring of two sends what it is handed
    # each of the two hands over its half; and one number, whether it failed, twice in a rollout and once in an update
    assert counted["bytes"]["all_gather"] == gather_bytes(update) // 2 + 3 * 8
    assert counted["bytes"].get("broadcast", 0) < 1024  # the position table alone has 74,048 bytes
