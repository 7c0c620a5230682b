"""The tests' short runs on a GPU, as a plugin of pytest: `pytest -p gpu_device` trains there in place of the CPU.

TF32 is off, so that the numbers differ from those of the CPU by rounding only. Several workers of pytest-xdist may
share one GPU. The same tests run on a stand-in for a GPU (`stand_in_device.py`).
"""

import pytest
import torch
from stand_in_device import EXPECT_CPU
from transformers.utils import enable_tf32


def pytest_configure() -> None:
    import tiny_runs

    if not torch.cuda.is_available():
        raise pytest.UsageError("gpu_device needs a GPU, and torch sees none.")
    tiny_runs.SETTINGS |= {"use_cpu": False, "bf16": False}  # most expect what float32 gives


def pytest_runtest_setup() -> None:
    enable_tf32(False)  # as a test with `torch_compile` leaves it on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := EXPECT_CPU.get(item.name) or EXPECT_CPU.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))
