"""What is measured between two lines of the log."""

from types import SimpleNamespace

import pytest
import torch
from tiny_runs import first_frame_brightness, trainer_for

from diffusion_grpo.training.metrics import Metrics


def test_metrics_of_a_log_entry(tmp_path):
    """Memory, spreads and ratios are logged; samples of videos are not called images."""
    trainer = trainer_for(tmp_path, name="wan", rewards=first_frame_brightness, num_iterations=2, epsilon=0.1)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert 0.05 < entry["memory/peak_gib"] < 100
        assert "images_per_second" not in entry
    assert trainer.state.log_history[0]["samples_per_second"] > 0  # the second update uses that rollout again
    first, second = trainer.state.log_history[:2]
    assert first["ratio/min"] == first["ratio/max"] == 1 and second["ratio/min"] < second["ratio/max"]
    assert first["spread/reward_min"] <= first["reward"] <= first["spread/reward_max"]
    assert first["spread/advantage_min"] < 0 < first["spread/advantage_max"]
    assert first["spread/reward_std"] == pytest.approx(first["rewards/first_frame_brightness/std"])


def test_both_standard_deviations_are_unbiased(tmp_path):
    """With one group of one reward they are the same number."""
    trainer = trainer_for(tmp_path, max_steps=1, num_generations=8)
    trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["rewards/brightness/std"] == pytest.approx(entry["reward_std"], rel=1e-4)


class Alone:
    """What `Metrics.gather` asks of the backend of one process."""

    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"))


def test_means_extremes_and_seconds_per_update():
    metrics = Metrics()
    assert not metrics
    metrics.start(2)
    metrics.start(9)  # the first counts
    metrics.add_all({"reward": 1.0, "ratio/max": 3.0, "ratio/min": 3.0})
    metrics.add_all({"reward": 2.0, "ratio/max": 5.0, "ratio/min": 5.0})
    metrics.add("time/rollout", 3.0)
    metrics.add("time/rollout", 5.0)
    metrics.samples = 16
    found = metrics.gather(Alone(), step=4)
    assert (found["reward"], found["ratio/max"], found["ratio/min"]) == (1.5, 5.0, 3.0)
    assert found["time/rollout"] == 4.0 and found["time/reward"] == 0.0  # two updates
    assert found["samples_per_second"] == 16 / 8 and found["memory/peak_gib"] > 0
    assert not metrics and metrics.samples == 0
    assert "samples_per_second" not in metrics.gather(Alone(), step=5)


def test_nothing_is_noted_in_a_pause():
    metrics = Metrics()
    with metrics.pause():
        with metrics.pause(False):
            metrics.add("loss", 1.0)
    assert not metrics
    with metrics.pause(False):
        metrics.add("loss", 1.0)
    assert metrics
    metrics.reset()
    assert not metrics


def test_time_is_added_under_its_name():
    metrics = Metrics()
    metrics.start(0)
    with metrics.time("time/update"):
        pass
    assert metrics.gather(Alone(), step=1)["time/update"] > 0
