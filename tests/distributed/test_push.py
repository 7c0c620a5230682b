"""Pushes of a run on several processes: the first one makes them."""

import json

import pushed_run
import ranks_server

SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "num_inference_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}


def test_the_first_process_pushes_and_the_others_do_not(tmp_path):
    strategies = ["checkpoint", "end"]
    ranks_server.succeed(tmp_path, 2, pushed_run.run, tmp_path, SETTINGS, strategies)
    first, second = (json.loads((tmp_path / f"uploads-{rank}.json").read_text()) for rank in (0, 1))
    assert first == {
        "checkpoint": ["top", "last-checkpoint", "top", "last-checkpoint", "the end", "top"],
        "end": ["the end", "top"],
    }
    assert second == dict.fromkeys(strategies, ["the end"])
