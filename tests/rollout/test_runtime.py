"""What is measured between two lines of the log, and the peak of a process's memory."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffusion_grpo.rollout.runtime import Metrics, measure_peak_memory

STATUS = Path("/proc/self/status")


@pytest.mark.skipif(not STATUS.is_file(), reason="Linux tells a process's peak there")
def test_without_a_gpu_it_is_that_of_the_process_in_gib():
    np.ones(2**24).sum()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())[1])
    assert measure_peak_memory("cpu") == pytest.approx(kib / 2**20, rel=0.02)


class Alone:
    """What `Metrics.gather` asks of the backend of one process."""

    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"))


def test_means_extremes_and_seconds_per_update():
    metrics = Metrics()
    assert not metrics.values
    metrics.start(2)
    metrics.start(9)  # the first counts
    metrics.add_all({"reward": 1.0, "ratio/max": 3.0, "ratio/min": 3.0})
    metrics.add_all({"reward": 2.0, "ratio/max": 5.0, "ratio/min": 5.0})
    for value in (4.0, 1.0):
        metrics.add("sampling/sampling_logp_difference/max", value)
    metrics.add("time/rollout", 3.0)
    metrics.add("time/rollout", 5.0)
    metrics.samples = 16
    metrics.finish_rollout()
    found = metrics.gather(Alone(), step=4)
    assert (found["reward"], found["ratio/max"], found["ratio/min"]) == (1.5, 5.0, 3.0)
    assert found["sampling/sampling_logp_difference/max"] == 4.0
    assert found["time/rollout"] == 4.0 and found["time/reward"] == 0.0  # two updates
    assert found["samples_per_second"] == 16 / 8 and found["memory/peak_gib"] > 0
    assert not metrics.values and metrics.samples == 0
    assert "samples_per_second" not in metrics.gather(Alone(), step=5)


def speeds(updates, made_at, used_up_at, logging_steps=1):
    """The speeds that are logged where a rollout of 100 samples takes 10 s, and each update on it 10 s."""
    metrics, logged = Metrics(), []
    metrics.start(0)
    for step in range(1, updates + 1):
        if step in made_at:
            metrics.samples += 100
            metrics.add("time/rollout", 8.0)
            metrics.add("time/reward", 2.0)
        metrics.add("time/update", 10.0)
        if step in used_up_at:
            metrics.finish_rollout()
        if step % logging_steps == 0:
            logged.append(metrics.gather(Alone(), step).get("samples_per_second"))
    return logged


def test_the_speed_is_that_of_a_rollout_and_all_its_updates():
    assert speeds(2, made_at=(1, 2), used_up_at=(1, 2)) == [5.0, 5.0]
    assert speeds(9, made_at=(1, 5, 9), used_up_at=(4, 8)) == [None, None, None, 2.0, None, None, None, 2.0, None]
    assert speeds(9, made_at=(1, 5, 9), used_up_at=(4, 8), logging_steps=3) == [None, 2.0, 2.0]
    assert speeds(8, made_at=(1, 5), used_up_at=(4, 8), logging_steps=8) == [2.0]


def test_the_samples_of_a_rollout_that_is_resumed_are_not_counted():
    assert speeds(6, made_at=(3,), used_up_at=(2, 6)) == [None] * 5 + [2.0]


def test_a_reset_forgets_the_rollout_too():
    metrics = Metrics()
    metrics.samples = 7
    metrics.add("time/rollout", 5.0)
    metrics.reset()
    metrics.start(0)
    metrics.add("time/update", 1.0)
    metrics.samples = 2
    metrics.finish_rollout()
    assert metrics.gather(Alone(), step=1)["samples_per_second"] == 2.0
