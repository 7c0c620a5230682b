"""The tests' short runs on a GPU, as a plugin of pytest: `pytest -p gpu_device` trains there in place of the CPU.

TF32 is off, so that the numbers differ from those of the CPU by rounding only. Several workers of pytest-xdist may
share one GPU. The same tests run on a stand-in for a GPU (`stand_in_device.py`).
"""

import pytest
import torch
from stand_in_device import EXPECT_CPU
from transformers.utils import enable_tf32

SIZES = "expects that a call of another size rounds alike, as on the CPU"
# Tests that are left out, by name, beside those of `stand_in_device.py`
EXPECT_SAME_ROUNDING = {
    "test_each_call_of_an_evaluation_has_the_columns_of_its_own_samples": SIZES,
    "test_runs_and_evaluations_are_the_same": SIZES,
    "test_the_best_and_the_worst_of_each_group": SIZES,
    "test_evaluations_and_validation_prompts_are_drawn_with_the_average": "compares with a sample made on the CPU",
    "test_sharing_calls_changes_nothing_but_their_number[two iterations]": "its bound is for the rounding of the CPU",
    "test_sharing_calls_changes_nothing_but_their_number[dppo]": "its bound is for the rounding of the CPU",
}
LEFT_OUT = EXPECT_CPU | EXPECT_SAME_ROUNDING


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
