"""Training on a device that is not the CPU: no tensor is left on the wrong one, and the weights are the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stand_in_device import CAN_COMPILE
from tiny_runs import trainer_for

TESTS = Path(__file__).parent
# Of `make test-device`, which takes some minutes; a test that is renamed ends pytest with an error
SAMPLE = [f"test_breadth.py::test_it_replays_and_trains[{name}]" for name in ("sd15", "glm_image")]
SAMPLE += [
    "distributed/test_renoised.py::test_an_old_policy_and_an_average_go_on_where_two_processes_left_them[ddp-settings0]",
]

pytestmark = pytest.mark.skipif(
    not CAN_COMPILE, reason="the stand-in device needs a C++ compiler, ninja and Python's headers"
)


def run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_a_run_ends_with_the_weights_of_the_cpu(tmp_path):
    run(str(TESTS / "stand_in_run.py"), str(tmp_path))
    trainer = trainer_for(tmp_path / "cpu")
    trainer.train()
    found = load_file(tmp_path / "trained.safetensors")
    expected = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6)


def test_a_sample_of_the_tests_on_the_device():
    words = ["-m", "pytest", "-q", "-p", "stand_in_device", "-p", "no:cacheprovider", "-m", ""]
    assert f"{len(SAMPLE)} passed" in run(*words, *(str(TESTS / name) for name in SAMPLE))
