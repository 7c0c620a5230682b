"""`make gpu-check`: what it runs on a GPU runs here with tiny networks."""

import pytest

from benchmarks import gpu_cases


def test_a_variant_runs_small_on_a_cpu(tmp_path):
    assert gpu_cases.run("a/model", tmp_path, True)["weights"] == "2.9 M"
    values = gpu_cases.run("a/bf16-sdpa-math", tmp_path, True)
    assert 0 <= values["max error"] <= 0.1 and values["gradient"] > 0


@pytest.mark.slow
def test_a_size_runs_small_and_is_planned(tmp_path):
    planned = gpu_cases.run("c/plan sd35m-lora", tmp_path, True)
    values = gpu_cases.run("c/sd35m-lora", tmp_path, True)
    assert values["plan GiB"] == planned["plan GiB"] > 0
    assert all(values[key] > 0 for key in ("rollout s", "update s", "bare s", "overhead", "rollout GiB", "update GiB"))
