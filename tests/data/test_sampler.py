"""The order of rows: whole groups, every prompt, and the same for one seed and epoch."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from transformers.trainer_pt_utils import AcceleratorConfig
from trl.trainer.utils import RepeatSampler

from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.data.sampler import GroupSampler, check_accelerator_config


def make(num_rows, num_generations, prompts, repeat_count, processes=1, **options):
    """A sampler of rollouts of `prompts` prompts, each of which is repeated."""
    samples = num_generations * prompts // processes
    sizes = BatchSizes(num_generations, None, samples, 1, 1, repeat_count, data_processes=processes)
    return GroupSampler(num_rows, sizes, **options)


def test_a_shuffled_epoch_is_a_permutation_set_by_seed_and_epoch():
    def order(seed, epoch):
        sampler = make(50, 1, 5, 1, seed=seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(sampler)
        return list(sampler)

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(rows) == list(range(50)) != rows for rows in orders)
    assert len({tuple(rows) for rows in orders}) == 4
    assert order(1, 1) == orders[3]


def test_layout_of_a_shuffled_epoch_is_trls():
    ours = list(make(12, 4, 3, repeat_count=2, seed=5))
    distinct = list(dict.fromkeys(ours))
    theirs = RepeatSampler(distinct, 4, batch_size=3, repeat_count=2, shuffle=False)
    assert ours == [distinct[i] for i in theirs]


@pytest.mark.parametrize(("processes", "copies"), [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_each_process_gets_its_part_of_a_rollout_as_often_as_it_has_copies(processes, copies):
    plain = np.array(list(make(10, 4, 3, repeat_count=2, seed=5)))
    rollouts = plain.reshape(-1, processes, 4 * 3 // processes)
    expected = rollouts.repeat(copies, axis=1).flatten().tolist()
    assert list(make(10, 4, 3, 2, seed=5, processes=processes, copies=copies)) == expected


def test_an_epoch_is_not_built_before_it_begins():
    sampler = make(50_000, 16, 8, repeat_count=32)
    tracemalloc.start()
    next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22 < 8 * len(sampler)


@pytest.mark.parametrize(("num_rows", "prompts"), [(7, 3), (5, 4), (1, 4), (2, 5), (3, 3), (9, 1)])
@pytest.mark.parametrize("repeat_count", [1, 3])
def test_no_prompt_is_left_out_and_no_dataset_too_small(num_rows, prompts, repeat_count):
    sampler = make(num_rows, 2, prompts, repeat_count, seed=3)
    rows = list(sampler)
    size = 2 * prompts
    assert len(rows) == len(sampler) and len(rows) % (size * repeat_count) == 0
    assert set(rows) == set(range(num_rows))
    counts = Counter(rows).values()
    assert max(counts) - min(counts) <= 2 * repeat_count  # nobody comes more than once oftener than another
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        assert chunk[::2] == chunk[1::2]  # groups of two
        assert len(set(chunk)) == min(prompts, num_rows)
        repetition = start // size % repeat_count
        assert repetition == 0 or chunk == rows[start - size : start]


def test_settings_of_accelerates_data_loader_are_refused():
    fine = {"sync_each_batch": True}
    check_accelerator_config(AcceleratorConfig(even_batches=False, gradient_accumulation_kwargs=fine))
    steps = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    for name, given in {
        "split_batches": {"split_batches": True},
        "dispatch": {"dispatch_batches": True},
        "num_steps": steps,
    }.items():
        with pytest.raises(ValueError, match=f"accelerator_config: {name}"):
            check_accelerator_config(AcceleratorConfig(**given))
