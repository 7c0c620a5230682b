"""Micro-batches come in order, and a new rollout is made when the last one is used up."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.rollout.generate import RolloutLoader


class Buffer:
    """Shows which rollout it is of."""

    def __init__(self, generation):
        self.generation = generation

    def micro_batch(self, slot):
        return self.generation, slot


class Generator:
    """Makes a rollout's buffer; keeps what it was asked for."""

    def __init__(self):
        self.calls = []

    def __call__(self, order, read_rows, step, last_step):
        self.calls.append((read_rows(order.row_indices), step, last_step))
        return Buffer(len(self.calls) - 1)


class Backend:
    groups = SimpleNamespace(is_first=True)

    def gather(self, tensor):
        return tensor


def make(accumulation=2, steps_per_generation=4, num_iterations=1):
    sizes = BatchSizes(4, None, 2, accumulation, steps_per_generation, num_iterations)
    generator = Generator()
    args = SimpleNamespace(batch_sizes=sizes, seed=0, device=torch.device("cpu"), trajectory_device="cpu")
    return RolloutLoader(generator, args, Backend(), lambda indices: [f"row {index}" for index in indices]), generator


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        ({"steps_per_generation": 2}, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        ({"steps_per_generation": 2, "num_iterations": 3}, [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
    ],
    ids=["two updates a rollout", "one", "three of the same samples"],
)
def test_the_order_of_three_updates(sizes, expected):
    feed, generator = make(**sizes)
    found, firsts, used_up = [], [], []
    for step in range(3):
        for _ in range(2):
            found.append(feed.next([7, 8], step, last_step=9))
            firsts.append(feed.is_first)
            used_up.append(feed.is_used_up)
    following = [*found[1:], feed.next([7, 8], 3, last_step=9)]
    assert used_up == [rollout != after for (rollout, _), (after, _) in zip(found, following, strict=True)]
    assert found == expected and firsts == [True, False] * 3
    assert generator.calls[0] == (["row 7", "row 8"], 0, 9)


def test_after_a_reset_a_new_rollout_begins():
    feed, generator = make(steps_per_generation=2)
    feed.next([1, 2], 0, 9)
    feed.reset()
    assert feed.buffer is None
    assert feed.next([1, 2], 0, 9) == (1, 0) and len(generator.calls) == 2


def test_a_rollout_is_saved_only_while_it_is_used(tmp_path, monkeypatch):
    saved, (feed, _) = [], make()
    monkeypatch.setattr("diffusion_grpo.rollout.generate.save_buffer", lambda buffer, path: saved.append(path.name))
    feed.save(tmp_path, 0)
    for step in range(2):
        for _ in range(2):
            feed.next([1, 2], step, 9)
        feed.save(tmp_path, step + 1)
    assert saved == ["rollout-rank0.safetensors"]  # after the first of two updates
