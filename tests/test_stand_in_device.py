"""Training on a device that is not the CPU: no tensor is left on the wrong one, and the weights are the same."""

import os
import subprocess
import sys
from pathlib import Path

import gpu_device
import pytest
import stand_in_device
import torch
from safetensors.torch import load_file
from tiny_runs import trainer_for

TESTS = Path(__file__).parent
# Of `make test-device`, which takes some minutes; a test that is renamed ends pytest with an error
SAMPLE = [f"test_breadth.py::test_it_replays_and_trains[{name}]" for name in ("sd15", "glm_image")]
SAMPLE += [
    "distributed/test_renoised.py::test_an_old_policy_and_an_average_go_on_where_two_processes_left_them[ddp-settings0]",
    "training/test_block_swap.py::test_a_swapped_network_is_saved_with_its_lora_merged",
]

compiled = pytest.mark.skipif(
    not stand_in_device.CAN_COMPILE, reason="the stand-in device needs a C++ compiler, ninja and Python's headers"
)


@pytest.mark.parametrize("left_out", [stand_in_device.LEFT_OUT, gpu_device.LEFT_OUT], ids=["stand-in", "GPU"])
def test_what_is_left_out_is_there(left_out):
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert not [name for name in left_out if f"def {name.partition('[')[0]}(" not in text]


def run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@compiled
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


@compiled
def test_a_sample_of_the_tests_on_the_device():
    words = ["-m", "pytest", "-q", "-p", "stand_in_device", "-p", "no:cacheprovider", "-m", ""]
    assert f"{len(SAMPLE)} passed" in run(*words, *(str(TESTS / name) for name in SAMPLE))
