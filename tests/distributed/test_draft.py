"""Gradients of rewards on two processes: the rewards and weights of one, in every mode."""

import json

import pytest
import rank_runs
import ranks_server
from safetensors.torch import load_file

SETTINGS = {
    "loss_type": "draft",
    "trained_steps": [0, 3],
    "noisy_steps": "trained",
    "step_selection": "sample",  # so that the processes take different numbers of steps
    "num_generations": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_inference_steps": 3,
    "max_steps": 3,
    "name": "flux",  # which context parallelism knows
    "beta": 0.05,
}
FULL = SETTINGS | {"lora": False, "optim": "sgd", "learning_rate": 0.3, "gradient_checkpointing": True}


def ran(folder, processes, settings):
    ranks_server.succeed(folder, processes, rank_runs.train, folder / "run", settings, "BLUE")
    log = json.loads((folder / "run" / "result.json").read_text())["log"]
    return [entry for entry in log if "prediction/max_error" in entry], load_file(
        folder / "run" / "weights.safetensors"
    )


RUNS = [(kind, mode, {}) for kind in ("lora", "full") for mode in ("ddp", "zero2", "zero3", "fsdp2")]
RUNS += [("full", "ddp", {"context_parallel_size": 2})]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "mode", "own"), RUNS)
def test_two_processes_train_what_one_trains(tmp_path, kind, mode, own):
    settings = {"lora": SETTINGS, "full": FULL}[kind]
    alone, weights = ran(tmp_path / "one", 1, settings)
    both, together = ran(tmp_path / "two", 2, settings | {"mode": mode} | own)
    assert len(alone) == len(both) == 3
    for one, other in zip(alone, both, strict=True):
        for name in ("reward", "loss/policy", "kl", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
        assert other["prediction/max_error"] < 1e-6
    first = rank_runs.first_weights(settings, rank_runs.BLUE)
    assert max(float((weights[name] - first[name]).abs().max()) for name in weights) > 1e-4
    assert max(float((weights[name] - together[name]).abs().max()) for name in weights) < 1e-6
