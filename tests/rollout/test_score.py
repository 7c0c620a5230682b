"""What every process has of a rollout, by position."""

import types

import pytest
import torch

from diffusion_grpo.config.batch_sizes import BatchSizes
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.rollout.order import RolloutOrder
from diffusion_grpo.rollout.score import gather_by_position

SIZES = {"num_generations": 4, "best_of_n": None, "micro_batch": 2, "num_iterations": 1}


def orders(processes, **sizes):
    """The order of one rollout, as each process has it; several updates, so that processes have no block of it."""
    share = {"accumulation": 4 // processes, "steps_per_generation": 16 // processes} | sizes
    return [
        RolloutOrder(BatchSizes(**SIZES, **share, data_processes=processes, data_process=process), 3, 0)
        for process in range(processes)
    ]


@pytest.mark.parametrize(("processes", "context"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_what_processes_have_lies_where_its_sample_does(processes, context):
    every = orders(processes)
    own = [torch.stack([order.own() * 10, order.own() * 10 + 1], dim=1) for order in every]  # (samples, 2)
    # of a context-parallel group only the first process counts
    rows = torch.cat([values if copy == 0 else values - 1000 for values in own for copy in range(context)])
    for process, order in enumerate(every):
        backend = DistributedBackend(None, ContextGroups(context, processes * context, process * context))
        backend.bind(
            types.SimpleNamespace(device=torch.device("cpu"), gather=lambda tensor: rows), torch.nn.Module(), []
        )
        found = gather_by_position(backend, own[process], order)
        assert torch.equal(found[:, 0], 10 * torch.arange(32)) and torch.equal(found[:, 1], found[:, 0] + 1)
        assert gather_by_position(backend, None, order) is None
    if processes > 1:
        assert not torch.equal(torch.cat([order.own() for order in every]), every[0].made)  # the order matters


def test_processes_share_a_rollout_without_overlap():
    for processes in (2, 4):
        shares = [order.own().tolist() for order in orders(processes)]
        assert sorted(sum(shares, [])) == list(range(32)) and {len(share) for share in shares} == {32 // processes}
        assert orders(processes)[0].by_process().tolist() == sum(shares, [])
