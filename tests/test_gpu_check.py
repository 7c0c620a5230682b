"""`make gpu-check`: what it runs on a GPU runs here with tiny networks."""

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_cases
from benchmarks.gpu_check import ROOT


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


def test_requirements_are_those_that_are_tested():
    def read(name):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        return {canonicalize_name(Requirement(line).name): str(Requirement(line).specifier) for line in lines}

    carried, tested = read("benchmarks/gpu_requirements.txt"), read("constraints.txt")
    assert carried.keys() - tested.keys() <= {"bitsandbytes", "torchao"}  # only tests of GPUs need them
    assert all(carried[name] == tested[name] for name in carried.keys() & tested.keys())
