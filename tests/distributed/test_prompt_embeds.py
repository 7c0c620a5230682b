"""Prompts encoded ahead under every engine: two processes train what one trains that encodes as it goes."""

import json

import embedding_runs
import pytest
import ranks_server
import tiny_pipelines
from safetensors.torch import load_file
from tiny_runs import difference

SETTINGS = {"max_steps": 2, "per_device_train_batch_size": 2, "num_generations": 4, "gradient_accumulation_steps": 4}
SETTINGS |= {"num_inference_steps": 3, "beta": 0.05, "height": 32, "width": 32}
SETTINGS |= {"validation_prompts": ["a house", "a ship"], "validation_steps": 2}
FULL = {"lora": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 1}
OFFLOADED = {"offload_frozen": "cpu"}
WRAPPERS = {"ddp": "DistributedDataParallel", "zero3": "DeepSpeedEngine", "fsdp2": "FSDP"}


def ran(folder, processes, settings, source=None):
    """What each process said of itself, and the weights at the end."""
    folder.mkdir()
    ranks_server.succeed(folder / "processes", processes, embedding_runs.run, folder, settings, source)
    reports = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]
    return reports, load_file(folder / "weights.safetensors")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "is_named", "settings"),
    [
        ("ddp", False, OFFLOADED),
        ("zero3", False, {}),
        ("zero3", True, FULL | OFFLOADED),
        ("fsdp2", False, {}),
        ("fsdp2", True, OFFLOADED),
    ],
)
def test_two_processes_train_what_one_trains_that_encodes_as_it_goes(mode, is_named, settings, tmp_path):
    """A given pipeline, whose encoders are spilled; or a named model, whose encoders and network are read late."""
    source = None
    if is_named:
        source = tmp_path / "model"
        tiny_pipelines.build("sd3")[0].save_pretrained(source)
    (plain,), weights = ran(tmp_path / "plain", 1, SETTINGS | settings, source)
    ahead = {"cache_prompt_embeds": "disk" if is_named else "memory", "mode": mode}
    reports, together = ran(tmp_path / "two", 2, SETTINGS | settings | ahead, source)
    assert plain["during"] > 0
    for report in reports:
        assert report["wrapper"].startswith(WRAPPERS[mode]) and report["during"] == 0 and report["calls"]
    assert difference(weights, together) < 1e-6
    drawn = [[entry["reward"] for entry in log if "reward" in entry] for log in (plain["log"], reports[0]["log"])]
    assert drawn[0] == pytest.approx(drawn[1], abs=1e-6)
