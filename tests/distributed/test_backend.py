"""What all backends share: passes that processes make equally often, and gradients of networks that take turns."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.deepspeed import DeepSpeedBackend
from diffusion_grpo.distributed.fsdp import FSDP2Backend
from diffusion_grpo.distributed.weights import TrainedWeights


class Sharded(DistributedBackend):
    """One in which every pass is a collective."""

    passes_together = reduces_every_pass = True


def test_a_process_with_fewer_passes_repeats_its_last():
    """Where each pass is a collective, and nowhere else."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda count: torch.tensor([3, 1]))
    plain = DistributedBackend(None, ContextGroups())
    plain.bind(accelerator, [])
    assert plain.equalize(["a"]) == plain.equalize_outside_updates(["a"]) == [("a", True)]
    sharded = Sharded(None, ContextGroups())
    sharded.bind(accelerator, [])
    expected = [("a", True), ("a", False), ("a", False)]
    assert sharded.equalize(["a"]) == sharded.equalize_outside_updates(["a"]) == expected


@pytest.mark.parametrize("kind", [DeepSpeedBackend, FSDP2Backend])
def test_engines_that_move_weights_themselves_refuse_swapped_blocks(kind):
    DistributedBackend(None, ContextGroups()).check_group_offload()
    backend = kind.__new__(kind)  # without a launcher; the check asks for nothing else
    with pytest.raises(ValueError, match="group_offload moves weights that.*leave it out.*or start without"):
        backend.check_group_offload()


class Experts(torch.nn.ModuleDict):
    """Two networks of one weight each, which take turns."""

    def __init__(self):
        super().__init__({name: torch.nn.Linear(1, 1, bias=False) for name in ("transformer", "transformer_2")})


class TakesTurns(TrainedWeights):
    """As of several processes, where each pass gives every expert a gradient, if only of zero."""

    leave_some_without_gradient = True


def test_an_idle_expert_stays_as_it_is():
    """Adam would move it by what it remembers, where its gradient of zero were kept."""
    experts = Experts()
    optimizer = torch.optim.Adam(experts.parameters(), lr=0.1)
    weights = TakesTurns(list(experts.parameters()), take_turns=True)
    backend = DistributedBackend(None, ContextGroups())
    backend.bind(SimpleNamespace(unwrap_model=lambda model: model), [])
    moved = []
    for trained in ("transformer", "transformer_2", "transformer_2"):
        before = {name: expert.weight.item() for name, expert in experts.items()}
        optimizer.zero_grad()
        (experts[trained](torch.ones(1, 1)).sum() + weights.zero()).backward()
        backend.finish_micro_batch(experts, weights)
        optimizer.step()
        moved.append({name for name, expert in experts.items() if expert.weight.item() != before[name]})
    assert moved == [{"transformer"}, {"transformer_2"}, {"transformer_2"}]


@pytest.mark.parametrize(("stage", "is_cleared"), [(2, False), (3, True)])
def test_zero3_begins_each_update_without_the_gradients_of_the_last(stage, is_cleared):
    """Its first backward pass overwrites those of the parameters that it reaches, and no others'."""
    config = SimpleNamespace(is_true=lambda name: False)
    backend = DeepSpeedBackend(None, ContextGroups(), SimpleNamespace(zero_stage=stage, hf_ds_config=config))
    gradients = torch.ones(4)
    backend.begin_update(SimpleNamespace(optimizer=SimpleNamespace(grad_partitions_flat_buffer=gradients)))
    assert (gradients == 0).all().item() is is_cleared
