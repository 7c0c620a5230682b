"""Gradients of rewards on two processes: the rewards and weights of one, in every mode."""

import pytest
import rank_runs
from tiny_runs import difference

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


RUNS = [(kind, mode, {}) for kind in ("lora", "full") for mode in ("ddp", "zero2", "zero3", "fsdp2")]
RUNS += [("full", "ddp", {"context_parallel_size": 2})]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "mode", "own"), RUNS)
def test_two_processes_train_what_one_trains(tmp_path, kind, mode, own):
    settings = {"lora": SETTINGS, "full": FULL}[kind]
    _, alone, weights = rank_runs.trained(tmp_path / "one", 1, settings, "blue")
    _, both, together = rank_runs.trained(tmp_path / "two", 2, settings | {"mode": mode} | own, "blue")
    assert len(alone) == len(both) == 3
    for one, other in zip(alone, both, strict=True):
        for name in ("reward", "loss/policy", "kl", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
        assert other["prediction/max_error"] < 1e-6
    first = rank_runs.first_weights(settings, rank_runs.REWARDS["blue"])
    assert difference(weights, first) > 1e-4
    assert difference(weights, together) < 1e-6
