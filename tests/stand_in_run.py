"""What `test_stand_in_device.py` runs in a process of its own: checks of the device, and a short training on it."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stand_in_device import NAME, register


def check_refusals() -> None:
    """Mix the CPU and the device in ways that a GPU refuses, and in those that it allows."""
    here, there = torch.ones(3), torch.ones(3, device=NAME)
    assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1)  # a single number may be on the CPU
    assert torch.equal(there[torch.tensor([0, 2])].cpu(), here[:2])  # so may the indices
    mixed = [
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here[torch.tensor([0], device=NAME)],
        lambda: torch.nn.functional.linear(there, torch.ones(2, 3)),
        lambda: torch.nn.functional.conv1d(there[None, None], torch.ones(1, 1, 1)),
        lambda: torch.randn(3, device=NAME, generator=torch.Generator()),
        lambda: there.numpy(),
    ]
    for operation in mixed:
        with pytest.raises((RuntimeError, TypeError)):
            operation()


def check_training(folder: Path) -> None:
    """Train on the device, and write the trained weights."""
    import tiny_runs

    trainer = tiny_runs.trainer_for(folder, use_cpu=False)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {NAME}
    trainer.train()
    assert max(tiny_runs.logged(trainer, "ratio/max_error")) == 0
    trained = {name: value.detach().cpu() for name, value in trainer.model.named_parameters() if value.requires_grad}
    save_file(trained, folder / "trained.safetensors")


register()
check_refusals()
check_training(Path(sys.argv[1]))
