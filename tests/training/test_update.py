"""The passes of an update: how much each sample counts, when weights may move, and what stops a run before they do."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.algorithms.base import Algorithm, PassOutput
from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.failure import ProcessGroupMonitor
from diffusion_grpo.distributed.trained_weights import TrainedWeights
from diffusion_grpo.rollout.runtime import Metrics, Runtime, UpdateProgress
from diffusion_grpo.rollout.value_model import STATE_SIZE, ValueModel, ValueTargets
from diffusion_grpo.training.update import NonFiniteError, Place, PolicyUpdate, count_measured, refuse_non_finite

ONLY = Place(update=1, count=1, is_first=True, is_last=True)


class Squares(Algorithm):
    """Sums (weight x - step)^2 over the samples x of a part; each sample trains on the steps that it names."""

    def passes(self, batch):
        every = [
            (part, step) for part in batch.parts for step in sorted({step for _, steps in part for step in steps})
        ]
        return [[(Part(sample for sample in part if step in sample[1]), step) for part, step in every]]

    def loss(self, policy, reference, part, step):
        chosen = torch.tensor([x for x, _ in part], dtype=torch.float64)
        loss = ((policy.weight * chosen - step) ** 2).sum()
        return PassOutput(loss, {"passes": 1.0, "loss/policy": loss.item() / len(part)}, drift=float(step))

    def check(self, batch, drift):
        return {"drift": drift}


class Policy:
    """One weight, with which an algorithm computes its loss."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.refused = []

    def refuse_step(self, step):
        self.refused.append(step)
        raise RuntimeError(f"step {step} is not trained")


class Part(list):
    """Samples (x, trained steps)."""

    weights = None


@dataclasses.dataclass
class Batch:
    """Parts of samples (x, trained steps)."""

    parts: list

    @property
    def num_trained_steps(self):
        return sum(len(steps) for part in self.parts for _, steps in part)


class Backend(DistributedBackend):
    """One process, whose engine moves nothing; notes what it is asked for."""

    def __init__(self):
        super().__init__(None, ContextGroups())
        self.noted = []
        self.bind(SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu")), torch.nn.Module(), [])

    def accumulate(self, model, is_last):
        self.noted.append(f"pass {is_last}")
        return super().accumulate(model, is_last=True)

    def forward(self, model, method, *args):
        return method(*args)

    def backward(self, loss):
        loss.backward()


class Several(ProcessGroupMonitor):
    """As of one among several processes: what fails is kept until they agree."""

    agreed = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_alone = False

    def agree(self, error=None):
        Several.agreed += 1
        self.is_alone = True  # nobody to exchange errors with
        super().agree(error)


def make_update(policy, folder=".", monitor=ProcessGroupMonitor, **parts):
    """The update of a policy of one weight on one process."""
    backend = parts.pop("backend", None) or Backend()
    metrics, progress = parts.pop("metrics", Metrics()), parts.pop("progress", UpdateProgress())
    learner = {"algorithm": Squares(), "reference": None, "weights": TrainedWeights([policy.weight]), "values": None}
    args = SimpleNamespace(value_clip=None, device=torch.device("cpu"), output_dir=str(folder))
    return PolicyUpdate(
        args,
        SimpleNamespace(**learner | parts),
        policy,
        Runtime(backend, monitor(backend.accelerator, (NonFiniteError,)), metrics, progress),
    )


SAMPLES = [(1.0, [0, 1]), (2.0, [1]), (-3.0, [0, 2]), (4.0, [2])]


@pytest.mark.parametrize("sizes", [[4], [1, 3]])
def test_every_sample_counts_the_same_however_they_are_split(sizes):
    """The reference is the mean over all trained steps of all samples at once."""
    policy, metrics, parts, start = Policy(), Metrics(), [], 0
    metrics.start(0)
    for size in sizes:
        parts.append(SAMPLES[start : start + size])
        start += size
    loss = make_update(policy, metrics=metrics).train_policy(None, Batch(parts), ONLY)
    terms = [(0.5 * x - step) ** 2 for x, steps in SAMPLES for step in steps]
    slopes = [2 * x * (0.5 * x - step) for x, steps in SAMPLES for step in steps]
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)
    assert policy.weight.grad.item() == pytest.approx(sum(slopes) / len(slopes), rel=1e-12)
    assert metrics.gather(Backend(), step=1)["loss/policy"] == pytest.approx(loss.item(), rel=1e-6)


def test_samples_of_weight_0_are_counted_only_where_they_are_measured():
    part = Part(SAMPLES[:3])
    part.weights = torch.tensor([2.0, 0.0, 0.0])
    counts = {name: count_measured(part, name) for name in ("ratio/mean", "loss/policy", "grad_size/step_00")}
    assert counts == {"ratio/mean": 1, "loss/policy": 3, "grad_size/step_00": 3}


def test_a_metric_of_some_samples_counts_as_often_as_it_was_measured():
    """A share of pairs is one over all pairs, and not a mean over calls with more or fewer of them."""

    class Pairs(Squares):
        def loss(self, policy, reference, part, step):
            output = super().loss(policy, reference, part, step)
            return dataclasses.replace(output, metrics={"right": 1.0 / len(part)}, counts={"right": len(part) - 1})

    metrics = Metrics()
    metrics.start(0)
    update = make_update(Policy(), metrics=metrics, algorithm=Pairs())
    update.train_policy(None, Batch([[(1.0, [0])] * 2, [(2.0, [0])] * 4]), ONLY)
    assert metrics.gather(Backend(), step=1)["right"] == pytest.approx((1 * 0.5 + 3 * 0.25) / 4)


def test_micro_batches_of_an_update_share_its_weight():
    policies, parts = (Policy(), Policy()), [[SAMPLES[0]], [(5.0, [1, 2])]]
    make_update(policies[0]).train_policy(None, Batch(parts), ONLY)
    update = make_update(policies[1])
    for number, part in enumerate(parts):
        update.train_policy(None, Batch([part]), Place(1, count=2, is_first=number == 0, is_last=number == 1))
    assert policies[1].weight.grad.item() == pytest.approx(policies[0].weight.grad.item(), rel=1e-12)


def test_gradients_are_accumulated_until_the_last_pass_of_a_micro_batch():
    backend, metrics, progress = Backend(), Metrics(), UpdateProgress()
    update = make_update(Policy(), backend=backend, metrics=metrics, progress=progress)
    update.train_policy(None, Batch([SAMPLES]), Place(1, count=3, is_first=True, is_last=False))
    assert backend.noted == ["pass False", "pass False", "pass True"]
    assert (progress.stage, progress.done, progress.total) == ("training", 3, 9)
    assert metrics.values.keys() == {"passes", "loss/policy", "drift"}
    assert metrics.values["passes"] == [1.0] * 3 and metrics.values["drift"] == [2.0]


class Repeating(Backend):
    """One whose process makes two passes more, because another has as many."""

    def equalize(self, passes, in_update=False):
        return [*((one, True) for one in passes), (passes[-1], False), (passes[-1], False)]


def test_a_repeated_pass_counts_nothing():
    policies, metrics = (Policy(), Policy()), Metrics()
    losses = [
        make_update(policies[0]).train_policy(None, Batch([SAMPLES]), ONLY),
        make_update(policies[1], backend=Repeating(), metrics=metrics).train_policy(None, Batch([SAMPLES]), ONLY),
    ]
    assert losses[0] == losses[1] and policies[0].weight.grad == policies[1].weight.grad
    assert metrics.values["passes"] == [1.0] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_a_loss_that_is_not_finite_names_the_update_and_gives_no_gradient(tmp_path, value):
    policy = Policy()
    with pytest.raises(NonFiniteError, match="The loss of update 7 is (nan|inf)"):
        update = make_update(policy, tmp_path)
        update.train_policy(None, Batch([[(value, [0])]]), Place(7, count=1, is_first=True, is_last=True))
    assert policy.weight.grad is None


def test_several_processes_agree_before_their_gradients_meet():
    """One that fails makes its passes all the same, or the others would wait for it."""
    backend = Backend()
    update, before = make_update(Policy(), backend=backend, monitor=Several), Several.agreed
    bad = Batch([[(math.nan, [0, 1])]])
    update.train_policy(None, bad, Place(1, count=2, is_first=True, is_last=False))
    assert backend.noted.count("pass True") == 1 and Several.agreed == before
    with pytest.raises(NonFiniteError, match="loss of update 1"):
        update.train_policy(None, Batch([SAMPLES]), Place(1, count=2, is_first=False, is_last=True))
    assert Several.agreed == before + 1


def test_a_step_without_gradient_is_refused_by_the_policy():
    policy = Policy()
    policy.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="step 0 is not trained"):
        make_update(policy).train_policy(None, Batch([SAMPLES]), ONLY)
    assert policy.refused == [0]


def targets(returns: float) -> ValueTargets:
    states = torch.randn(3, 2, STATE_SIZE, generator=torch.Generator().manual_seed(0))
    return ValueTargets(states, torch.zeros(3, 2), torch.full((3, 2), returns))


def test_the_value_model_gets_its_own_gradient_and_the_policy_none():
    policy, values, metrics = Policy(), ValueModel(0), Metrics()
    update = make_update(policy, values=values, metrics=metrics)
    update.train_values(targets(1.0), Place(1, count=4, is_first=True, is_last=False))
    found = [parameter.grad.clone() for parameter in values.parameters()]
    values.zero_grad()
    loss = values.loss(targets(1.0), None)
    (loss / 4).backward()
    assert any(gradient.abs().sum() > 0 for gradient in found) and policy.weight.grad is None
    torch.testing.assert_close(found, [parameter.grad for parameter in values.parameters()])
    assert metrics.values == {"value/loss": [pytest.approx(loss.item())]}


def test_a_value_loss_that_is_not_finite_is_refused():
    values = ValueModel(0)
    torch.nn.init.constant_(next(values.parameters()), math.nan)
    with pytest.raises(NonFiniteError, match="value loss of update 1 is nan"):
        make_update(Policy(), values=values).train_values(targets(1.0), ONLY)
    assert all(parameter.grad is None for parameter in values.parameters())


def test_only_finite_values_pass(tmp_path):
    value = torch.tensor(-3e38)
    refuse_non_finite(value, "loss", 1, str(tmp_path))
    value *= 10  # beyond float32
    with pytest.raises(NonFiniteError, match="loss of update 1 is -inf.*checkpoint: none"):
        refuse_non_finite(value, "loss", 1, str(tmp_path))
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(NonFiniteError, match="is nan.*checkpoint-2"):
        refuse_non_finite(torch.tensor(math.nan), "gradient norm", 3, str(tmp_path))
