"""The peak of a process's memory."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusion_grpo.training.memory import measure_peak_memory

STATUS = Path("/proc/self/status")


@pytest.mark.skipif(not STATUS.is_file(), reason="Linux tells a process's peak there")
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_without_a_gpu_it_is_that_of_the_process_in_gib(device):
    np.ones(2**24).sum()
    kib = int(re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())[1])
    assert measure_peak_memory(device) == pytest.approx(kib / 2**20, rel=0.02)
