"""Settings of a run: unknown ones, launchers, and what is imported to check them."""

import subprocess
import sys

import pytest
import torch
from command_line import make_config

from diffusion_grpo.config.settings import check_launched, computes_in_bf16, count_launched_processes


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    assert count_launched_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert count_launched_processes() == 1  # some schedulers of jobs set it everywhere
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert count_launched_processes() == 2
    check_launched(2, 2)
    with pytest.raises(ValueError, match="2 processes were started, but each would be a run of its own.*use_cpu=True"):
        check_launched(2, 1)


@pytest.mark.parametrize(
    ("is_there", "is_its_own", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_emulated_bf16_is_no_default(monkeypatch, is_there, is_its_own, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    supported = lambda including_emulation=True: including_emulation or is_its_own  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert computes_in_bf16() == expected


def test_a_setting_of_older_versions_is_explained():
    with pytest.raises(TypeError, match="no setting 'warmup_ratio'; write it as `warmup_steps`, below 1 a share"):
        make_config(warmup_ratio=0.1)


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(TypeError, match="no setting 'num_generation'; did you mean 'num_generations'"):
        make_config(num_generation=8)


def test_config_errors_in_python_do_not_wait_for_diffusers():
    code = (
        "import sys\nfrom diffusion_grpo import DiffusionGRPOConfig\n"
        "try:\n    DiffusionGRPOConfig('out', num_generations=1)\nexcept ValueError as error:\n    print(error)\n"
        "print('diffusers' in sys.modules, 'datasets' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "num_generations must be at least 2" in result.stdout and result.stdout.endswith("False False\n")
