"""Micro-batches: which passes they ask for, and in which order."""

import types

import torch

from diffusion_grpo.algorithms.batch import MicroBatch


def test_passes_of_experts_come_step_by_step():
    samples = [types.SimpleNamespace(steps=torch.tensor([[2, 5]])) for _ in range(2)]
    nothing = torch.zeros(2)
    batch = MicroBatch([{}, {}], samples, [[0], [1]], nothing, nothing, lambda rows: {})
    assert batch.passes(take_turns=True) == [[(0, 2), (1, 2)], [(0, 5), (1, 5)]]
    assert batch.passes() == [[(0, 2), (0, 5), (1, 2), (1, 5)]]
