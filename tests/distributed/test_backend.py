"""What all backends share: passes that processes must make equally often."""

import types

import torch

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups


class Sharded(DistributedBackend):
    """One in which every pass is a collective."""

    passes_together = reduces_every_pass = True


def test_a_process_with_fewer_passes_repeats_its_last():
    """Where each pass is a collective, and nowhere else."""
    accelerator = types.SimpleNamespace(device="cpu", gather=lambda count: torch.tensor([3, 1]))
    plain = DistributedBackend(None, ContextGroups())
    plain.bind(accelerator, [])
    assert plain.equalize(["a"]) == plain.equalize_outside_updates(["a"]) == [("a", True)]
    sharded = Sharded(None, ContextGroups())
    sharded.bind(accelerator, [])
    expected = [("a", True), ("a", False), ("a", False)]
    assert sharded.equalize(["a"]) == sharded.equalize_outside_updates(["a"]) == expected
