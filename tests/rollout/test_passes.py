"""Replays without a gradient: the values of each sample at each of its steps."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.algorithms.base import Recording
from diffusion_grpo.algorithms.batch import MicroBatch
from diffusion_grpo.policy.trajectory import StepDistribution, StepScale
from diffusion_grpo.rollout.buffer import RolloutBuffer
from diffusion_grpo.rollout.estimator import SampleAdvantages
from diffusion_grpo.rollout.passes import Passes
from tests.algorithms.test_batch import batch_of, make_inputs, rows_of, samples_of
from tests.renoised_parts import mean, problem, squares
from tests.rollout.test_buffer import OneCall, buffer_of


class Network:
    """Its log-probability of a step is the recorded one and a shift; its mean is as many as its name says."""

    component = ("transformer",)

    def __init__(self, shift=0.5, mean=0.0):
        self.shift, self.mean, self.passes = shift, mean, []

    def replay(self, inputs, trajectory, step):
        assert not torch.is_grad_enabled()
        self.passes.append(([int(seed) for seed in trajectory.seeds], step))
        recorded = trajectory.log_probs[trajectory.steps == step]
        mean = torch.full((len(recorded), 4), self.mean)
        return StepDistribution(mean, torch.tensor(0.5), recorded + self.shift, velocity=mean)


class Backend:
    """Of a process that makes one pass more, as others make."""

    def equalize(self, passes):
        return [(one, True) for one in passes] + [(passes[-1], False)]


def make(policy, reference=None, anchor="own", old_policy=None, beta=1.0, metrics=None, **recording):
    args = SimpleNamespace(rollout_call_size=2, beta=beta, recording=Recording(**recording), anchor=anchor)
    runtime = SimpleNamespace(backend=Backend(), metrics=metrics)
    return Passes(args, policy, OneCall(), runtime, reference=reference, old_policy=old_policy)


STEPS = [[0, 1], [1, 2], [0, 2], [1, 2]]


def test_each_sample_is_replayed_at_its_own_steps():
    policy, batch = Network(), batch_of(4, STEPS, calls=[[0, 2], [3, 1]])
    found = make(policy).anchor(batch)[0]
    torch.testing.assert_close(found, batch.old_log_probs + 0.5)
    expected = [([0, 2], 0), ([0], 1), ([2], 2), ([3, 1], 1), ([3, 1], 2)]
    assert policy.passes == [*expected, expected[-1]]  # repeated beside the other processes
    assert torch.is_grad_enabled()


def test_networks_that_share_the_steps_take_turns():
    policy = Network()
    policy.component = ("transformer", "transformer_2")
    make(policy).anchor(batch_of(4, STEPS, calls=[[0, 2], [3, 1]]))
    assert [step for _, step in policy.passes] == [0, 0, 1, 1, 1, 2, 2, 2]


def test_the_ratio_of_a_trajectory_is_the_mean_over_its_steps():
    batch = batch_of(3)
    assert make(Network(shift=0.25)).sequence_log_ratio(batch).tolist() == pytest.approx([0.25] * 3)


def test_divergences_are_averaged_over_the_numbers_that_move():
    """Of four numbers one is held fixed: its mean is the reference's."""

    class Holding(Network):
        def replay(self, inputs, trajectory, step):
            now = super().replay(inputs, trajectory, step)
            now.mean[:, 0] = 0.0
            count = torch.ones(len(now.mean))
            return dataclasses.replace(now, scale=StepScale(0.5 * count, count, 3 * count))

    found = make(Holding(mean=1.0), Holding(mean=3.0)).compare(batch_of(3, STEPS[:3]))[0]
    assert found.tolist() == [[pytest.approx((3 - 1) ** 2 / (2 * 0.5**2))] * 2] * 3


def test_predictions_on_renoised_samples_are_compared_too():
    given = problem(is_masked=True)
    rows, samples = rows_of(6), [given.part.trajectory[[row]] for row in range(6)]
    batch = MicroBatch(rows, samples, [[0, 2, 5], [4, 3, 1]], given.advantages, given.part.old_log_probs, make_inputs)
    distances, others = make(given.policy, given.reference).compare(batch)
    both = (given.clean, given.reference.clean)
    expected = squares(given, *both)[:, None].expand(6, 2)
    torch.testing.assert_close(distances, expected.detach())
    sizes = [mean(given, ((given.origin - clean) / given.sigma) ** 2).sqrt() for clean in both]
    assert others == {"velocity/ratio_to_ref": pytest.approx((sizes[0] / sizes[1]).mean().item())}
    assert given.policy.calls == given.reference.calls  # also in the pass that is repeated beside other processes


def test_divergences_of_a_rollout_come_in_its_batches():
    policy, reference, added = Network(mean=1.0), Network(mean=2.0), []
    metrics = SimpleNamespace(add=lambda *measured: added.append(measured))
    found = make(policy, reference, beta=0.0, metrics=metrics).rollout_divergences(rows_of(4), samples_of(4))
    assert found.shape == (4, 2) and (found == 2.0).all()
    assert [seeds for seeds, _ in policy.passes] == [[0, 1]] * 3 + [[2, 3]] * 3 and policy.passes == reference.passes
    assert added == [("velocity/ratio_to_ref", 0.5, 2)] * 2  # with a beta, updates measure it
    make(policy, reference).rollout_divergences(rows_of(4), samples_of(4))


def test_a_replayed_anchor_is_the_denominator_of_every_slot():
    buffer, policy = buffer_of(8), Network(shift=0.5, mean=3.0)
    recorded = buffer.old_log_probs
    make(policy, anchor="replay", old="mean").record_old(buffer)
    assert [seeds for seeds, _ in policy.passes] == [[n, n + 1] for n in (0, 2, 4, 6) for _ in range(3)]
    assert torch.equal(buffer.old_log_probs, recorded + 0.5)
    assert all((sample.means == 3.0).all() and sample.means.shape == (1, 2, 1, 2, 2) for sample in buffer.samples)


# Re-noised samples


def clean_buffer():
    """Six re-noised samples in micro-batches of two, and what the network takes them for."""
    given = problem()
    samples = [given.part.trajectory[[row]] for row in range(6)]
    sizes = SimpleNamespace(micro_batch=2, accumulation=3, num_generations=1, trained_per_prompt=1)
    order = SimpleNamespace(seed=5, updates=1, sizes=sizes)
    return RolloutBuffer(
        rows_of(6), samples, SampleAdvantages(given.advantages), OneCall(), order, torch.arange(6)
    ), given


FIRST = [([0, 1], 1), ([0, 1], 3), ([0, 1], 3)]  # the passes of a micro-batch; the last is repeated beside others


def test_errors_are_measured_before_the_first_update_and_the_first_pass_is_kept():
    buffer, given = clean_buffer()
    make(given.policy, anchor="replay", keeps="clean", old="error").record_old(buffer)
    expected = -squares(given, given.clean)[:, None].expand(6, 2).detach()
    torch.testing.assert_close(buffer.old_log_probs, expected)
    assert given.policy.calls == [([row + first for row in rows], step) for first in (0, 2, 4) for rows, step in FIRST]
    assert buffer.recorded_clean.keys() == {(0, 1), (1, 1)} and not buffer.has_current_old
    assert torch.equal(buffer.recorded_clean[1, 1], given.clean[1].detach())
    assert [len(buffer.micro_batch(slot).recorded_clean) for slot in range(3)] == [2, 0, 0]


def test_of_an_anchor_of_the_rollout_only_the_first_pass_is_made():
    buffer, given = clean_buffer()
    make(given.policy, anchor="rollout", keeps="clean").record_old(buffer)
    assert given.policy.calls == FIRST[:1] and buffer.recorded_clean.keys() == {(0, 1), (1, 1)}


@pytest.mark.parametrize("has_moved", [False, True])
def test_the_old_policy_predicts_each_sample_with_its_own_weights(has_moved):
    buffer, given = clean_buffer()
    shown = []

    def place(is_shown):
        shown.append(is_shown)
        return contextlib.nullcontext()

    old_policy = SimpleNamespace(has_moved=has_moved, place=place)
    make(given.policy, anchor="rollout", keeps="clean", old_policy=old_policy).record_old(buffer)
    assert shown == [True] and buffer.has_current_old is not has_moved
    for row, sample in enumerate(buffer.samples):
        assert torch.equal(sample.old_clean, given.clean[row].detach().expand(1, 2, 3, 4))
    assert bool(buffer.recorded_clean) == has_moved  # the old policy's own prediction is checked instead
