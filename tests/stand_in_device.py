"""A stand-in for a GPU, as a plugin of pytest: `pytest -p stand_in_device` trains on a device that is not the CPU.

Tensors of the device lie in CPU memory, but torch refuses to mix them with tensors of the CPU, as on a GPU
(`stand_in_device.cpp`). So a tensor that was left on the wrong device is found without a GPU. Its numbers are those of
the CPU. The device is compiled once, into `build/`: this takes half a minute, a C++ compiler and Python's headers.
"""

import contextlib
import os
import shutil
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

NAME = "standin"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = SOURCE.parents[1] / "build" / SOURCE.stem
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja comes with DeepSpeed
HAS_HEADERS = Path(sysconfig.get_path("include"), "Python.h").is_file()
CAN_COMPILE = HAS_HEADERS and None not in [
    shutil.which(name, path=PATH) for name in ("ninja", cpp_extension.get_cxx_compiler())
]
# Tests that are left out, by name: those that expect something of the CPU on any accelerator, ...
EXPECT_CPU = {
    "test_runs_are_the_same_beside_reference_average_and_frozen_parts": "only pretends to move weights",
    "test_two_processes_train_what_one_trains[context]": "expects the attention of the CPU to the last bit",
    "test_sigkill_and_resume": "its process does not know the device",
    "test_each_of_two_processes_encodes_its_share": "its processes do not know the device",
    "test_an_error_of_one_process_is_told_to_the_other": "its processes do not know the device",
    "test_trainer_leaves_the_network_where_it_is": "expects weights on the CPU",
    "test_a_run_encodes_while_its_quantised_network_waits": "expects weights on the CPU",
    "test_a_pipeline_is_trained_twice_and_stays_usable": "compares with a sample made on the CPU",
    "test_a_resumed_run_has_the_same_value_model": "compares with weights on the CPU",
    "test_each_call_of_a_rollout_has_the_columns_of_its_own_samples": "compares with latents on the CPU",
}
# ... and those that need what this device lacks
LEFT_OUT = EXPECT_CPU | {
    "test_two_processes_train_what_one_trains[swapped]": "needs streams, and those of the device do nothing",
}


class Stream:
    """A stream or event of a device that computes at once, so that there is nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any):
        pass

    def record_event(self) -> "Stream":
        return self

    def _wait(self, other: Any = None) -> None:
        pass

    record = wait = wait_stream = wait_event = synchronize = _wait


def register() -> None:
    """Compile the device if necessary, and make it the accelerator of this process."""
    BUILD.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = PATH
    native = cpp_extension.load(NAME, [str(SOURCE)], build_directory=str(BUILD), extra_cflags=["-O1", "-w"])
    native.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    generator = native.default_generator()
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.set_device = module.synchronize = module.empty_cache = lambda device=None: None
    module.Stream = module.Event = Stream
    module.current_stream = Stream
    module.stream = module.device = lambda one: contextlib.nullcontext()
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{NAME}:0"


def use_in_runs() -> None:
    """Let the runs of `tiny_runs.py` use the device."""
    import tiny_runs
    import transformers.training_args

    tiny_runs.SETTINGS["use_cpu"] = False
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # it knows only its own accelerators


def pytest_configure() -> None:
    register()
    use_in_runs()
    os.environ["ON_STAND_IN_DEVICE"] = "1"  # for the processes of `ranks_server.py`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := LEFT_OUT.get(item.name) or LEFT_OUT.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))
