"""`make test-gpu`: without a GPU it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_device import LEFT_OUT

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "gpu_device",
        "-p",
        "no:cacheprovider",
        str(TESTS / "test_breadth.py"),
    ]
    done = subprocess.run(words, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 4 and "gpu_device needs a GPU, and torch sees none." in done.stderr


def test_what_is_left_out_is_there():
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    missing = [name for name in LEFT_OUT if f"def {name.partition('[')[0]}(" not in text]
    assert not missing
