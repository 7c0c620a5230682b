"""What all backends share: equally many passes, networks that take turns, calls inside a wrapper and with weights."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.distributed.backend import DistributedBackend, NetworkPasses, redirect
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.zero import DeepSpeedBackend


class Sharded(DistributedBackend):
    """One in which every pass is a collective."""

    passes_together = _reduces_every_pass = True


def test_a_process_with_fewer_passes_repeats_its_last():
    """Where each pass is a collective, and nowhere else."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda count: torch.tensor([3, 1]))
    plain = DistributedBackend(None, ContextGroups())
    plain.bind(accelerator, torch.nn.Module(), [])
    assert plain.equalize(["a"], in_update=True) == plain.equalize(["a"]) == [("a", True)]
    sharded = Sharded(None, ContextGroups())
    sharded.bind(accelerator, torch.nn.Module(), [])
    expected = [("a", True), ("a", False), ("a", False)]
    assert sharded.equalize(["a"], in_update=True) == sharded.equalize(["a"]) == expected


def make_experts():
    """Two networks of one weight each, which take turns."""
    return torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("transformer", "transformer_2")})


@pytest.mark.parametrize("is_scaled", [False, True], ids=["float32", "float16"])
def test_an_idle_expert_stays_as_it_is(is_scaled):
    """Its gradients are 0, as DDP makes them, and Adam's momentum would move it; a scaler needs some gradients."""
    experts = make_experts()
    optimizer = torch.optim.Adam(experts.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    DistributedBackend(None, ContextGroups()).prepare_optimizer(optimizer, experts)
    moved = []
    for trained in ("transformer", "transformer_2", "transformer_2", ""):
        before = {name: expert.weight.item() for name, expert in experts.items()}
        optimizer.zero_grad()
        outputs = {name: expert(torch.ones(1, 1)).sum() for name, expert in experts.items()}
        scaler.scale(sum(output * (name == trained) for name, output in outputs.items())).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append({name for name, expert in experts.items() if expert.weight.item() != before[name]})
    assert moved == [{"transformer"}, {"transformer_2"}, {"transformer_2"}, set()]


def test_a_network_alone_is_never_skipped():
    network = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    DistributedBackend(None, ContextGroups()).prepare_optimizer(optimizer, network)
    for gradient in (1.0, 0.0):
        before = network.weight.item()
        network.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert network.weight.item() != before


@pytest.mark.parametrize(("stage", "is_cleared"), [(2, False), (3, True)])
def test_zero3_begins_each_update_without_the_gradients_of_the_last(stage, is_cleared):
    """Its first backward pass overwrites those of the parameters that it reaches, and no others'."""
    config = SimpleNamespace(is_true=lambda name: False)
    backend = DeepSpeedBackend(None, ContextGroups(), SimpleNamespace(zero_stage=stage, hf_ds_config=config))
    gradients = torch.ones(4)
    backend.begin_update(SimpleNamespace(optimizer=SimpleNamespace(grad_partitions_flat_buffer=gradients)))
    assert (gradients == 0).all().item() is is_cleared


# A method inside the forward of what wraps a model


class Model(torch.nn.Module):
    def forward(self, value):
        return value + 1


class Wrapper(torch.nn.Module):
    """Counts its forwards, as DDP has its hooks there."""

    def __init__(self, model):
        super().__init__()
        self.model, self.forwards = model, 0

    def forward(self, *args):
        self.forwards += 1
        return self.model(*args)


def test_a_method_runs_in_the_wrappers_forward_and_sees_the_models_own_which_returns_after_an_error():
    wrapper = Wrapper(Model())
    assert redirect(wrapper, wrapper.model, lambda value: 10 * wrapper.model(value), 2) == 30
    assert wrapper.forwards == 1 and wrapper(2) == 3
    with pytest.raises(ZeroDivisionError):
        redirect(wrapper, wrapper.model, lambda: 1 / 0)
    assert wrapper(2) == 3 and "forward" not in vars(wrapper.model)


# Outside an update, with weights gathered


def make_passes(log, meets):
    @contextlib.contextmanager
    def gather_for_passes(networks, reference):
        log.append(("gather", networks, reference))
        yield lambda method, *args: method(*args)
        log.append("release")

    @contextlib.contextmanager
    def propagate_errors():
        log.append("meet")
        yield

    groups = SimpleNamespace(size=1)
    backend = SimpleNamespace(gather_for_passes=gather_for_passes, passes_together=meets, groups=groups)
    reference = ["first", "second"]
    return NetworkPasses(
        backend, SimpleNamespace(propagate_errors=propagate_errors), ["net"], lambda: reference.pop(0)
    )


@pytest.mark.parametrize("meets", [False, True])
def test_a_method_runs_between_gathering_and_releasing(meets):
    log = []
    passes = make_passes(log, meets)
    assert passes(lambda one, two: log.append("method") or one - two, 5, 3) == 2
    meeting = ["meet"] if meets else []
    assert log == [*meeting, ("gather", ["net"], "first"), "method", "release"]
    passes(lambda: None)
    assert ("gather", ["net"], "second") in log  # the reference of now, not of the construction
