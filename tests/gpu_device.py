"""The tests' short runs on a GPU, as a plugin of pytest: `pytest -p gpu_device` trains there in place of the CPU.

TF32 is off, so that the numbers differ from those of the CPU by rounding only. Several workers of pytest-xdist may
share one GPU. The same tests run on a stand-in for a GPU (`stand_in_device.py`).
"""

import pytest
import torch
from stand_in_device import LEFT_OUT as FOR_EITHER_DEVICE
from transformers.utils import enable_tf32

# Tests that are left out, by name, beside those that expect something of the CPU
LEFT_OUT = {name: reason for name, reason in FOR_EITHER_DEVICE.items() if "stream" not in reason}


def pytest_configure() -> None:
    import tiny_runs

    if not torch.cuda.is_available():
        raise pytest.UsageError("gpu_device needs a GPU, and torch sees none.")
    tiny_runs.SETTINGS |= {"use_cpu": False, "bf16": False}  # most expect what float32 gives


def pytest_runtest_setup() -> None:
    enable_tf32(False)  # as a test with `torch_compile` leaves it on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := LEFT_OUT.get(item.name) or LEFT_OUT.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))
