"""The order of a rollout: of any number of processes, the same samples share an update."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.rollout.plan import RolloutOrder, gather_by_position, update_order


def order_of(processes, generation, seed=0, process=0, **sizes):
    """The order of one rollout, a row per position; `accumulation` and `steps` are given for one process."""
    return RolloutOrder(sizes_of(processes, process, **sizes), seed, generation, range(64))


def sizes_of(processes, process=0, best_of_n=None, generations=4, batch=2, accumulation=4, steps=8, batches=1):
    return BatchSizes(
        num_generations=generations,
        best_of_n=best_of_n,
        micro_batch=batch,
        accumulation=accumulation // processes,
        steps_per_generation=steps // processes,
        num_iterations=1,
        data_processes=processes,
        data_process=process,
        num_batches=batches,
    )


def updates(order, positions):
    """The set of positions that each update trains on, all processes together."""
    processes = order.sizes.data_processes
    shares = [order.own(positions, process).view(order.updates, -1) for process in range(processes)]
    return [sorted(torch.cat([share[update] for share in shares]).tolist()) for update in range(order.updates)]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"generations": 16},  # larger than an update: micro-batches one by one
        {"generations": 8, "best_of_n": 2},
        {"steps": 4},
        {"generations": 6, "batch": 3, "accumulation": 4, "steps": 8},
        {"batches": 2},
    ],
    ids=["whole groups", "parts of groups", "best of n", "one update", "uneven", "batches"],
)
def test_updates_do_not_depend_on_the_number_of_processes(processes, case):
    for generation in range(3):
        one, many = (order_of(count, generation, **case) for count in (1, processes))
        assert torch.equal(one.made, many.made)
        assert sorted(many.by_process().tolist()) == list(range(len(one.made)))
        ranking = torch.randn(len(one.made), generator=torch.Generator().manual_seed(generation))
        trained = one.trained(ranking)
        assert torch.equal(trained, many.trained(ranking))
        assert updates(one, trained) == updates(many, trained)
        for process in range(processes):  # each trains on what it made
            assert set(many.own(trained, process).tolist()) <= set(many.own(many.made, process).tolist())


def test_rollouts_of_several_updates_are_mixed_by_seed_and_generation():
    orders = [order_of(1, generation, seed).made for seed, generation in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert torch.equal(orders[0], order_of(1, 0).made)
    whole = orders[0].view(-1, 4) // 4
    assert (whole == whole[:, :1]).all()  # groups stay whole where they fit
    assert torch.equal(order_of(1, 0, steps=4).made, torch.arange(8))  # one update: nothing to mix


@pytest.mark.parametrize("case", [{}, {"generations": 8}, {"generations": 8, "best_of_n": 4}, {"accumulation": 2}])
def test_each_update_takes_one_batch(case):
    """FastVideo's `rl_num_batches_per_step`, whose updates never mix batches."""
    mixed = set()
    for generation in range(4):
        order = order_of(1, generation, batches=2, **case)
        trained = order.trained(torch.zeros(len(order.made)))
        batches = [{position * 2 // len(order.made) for position in update} for update in updates(order, trained)]
        assert all(len(batch) == 1 for batch in batches) and len(batches) == order.updates >= 2
        mixed.add(tuple(order.made.tolist()))
    assert len(mixed) > 1 or order.updates == len(trained) // 8 == 2


def test_best_of_n_of_groups_that_straddle_updates_mixes_all_of_them():
    order = order_of(1, 0, best_of_n=4, generations=6, batch=2, accumulation=1, steps=4)
    ranking = torch.arange(12.0)
    kept = order.trained(ranking)
    assert sorted(kept.tolist()) == [0, 1, 4, 5, 6, 7, 10, 11]
    assert not torch.equal(kept, kept.sort().values)


def test_iterations_after_the_first_make_the_same_updates_in_another_order():
    later = {tuple(update_order(3, iteration, 6).tolist()) for iteration in range(1, 9)}
    assert len(later) > 4 and all(sorted(order) == list(range(6)) for order in later)


def test_best_of_n_needs_whole_groups_in_each_processs_share_of_an_update(monkeypatch):
    monkeypatch.setattr(DiffusionGRPOConfig, "world_size", 2)
    common = {"output_dir": "out", "use_cpu": True, "per_device_train_batch_size": 2, "num_generations": 8}
    args = DiffusionGRPOConfig(**common, gradient_accumulation_steps=2, steps_per_generation=4, best_of_n=4)
    sizes = args.batch_sizes
    assert (sizes.update_share, sizes.samples_per_update, sizes.consecutive_samples) == (4, 8, 8)
    with pytest.raises(ValueError, match="best_of_n=4"):
        DiffusionGRPOConfig(**common, gradient_accumulation_steps=1, steps_per_generation=4, best_of_n=4)


@pytest.mark.parametrize(("processes", "context"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_what_is_gathered_from_processes_lies_where_its_sample_does(processes, context):
    every = [order_of(processes, 0, process=process, steps=16) for process in range(processes)]
    own = [torch.stack([order.own() * 10, order.own() * 10 + 1], dim=1) for order in every]  # (samples, 2)
    # of a context-parallel group only the first process counts
    rows = torch.cat([values if copy == 0 else values - 1000 for values in own for copy in range(context)])
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda tensor: rows)
    for process, order in enumerate(every):
        backend = DistributedBackend(None, ContextGroups(context, processes * context, process * context))
        backend.bind(accelerator, torch.nn.Module(), [])
        found = gather_by_position(backend, own[process], order)
        assert torch.equal(found[:, 0], 10 * torch.arange(32)) and torch.equal(found[:, 1], found[:, 0] + 1)
        assert gather_by_position(backend, None, order) is None
    if processes > 1:
        assert not torch.equal(torch.cat([order.own() for order in every]), every[0].made)  # the order matters
