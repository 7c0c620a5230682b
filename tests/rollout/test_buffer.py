"""What lies between rollout and update: which samples a micro-batch has, and that each keeps what belongs to it."""

import pytest
import torch

from diffusion_grpo.policy.trajectory import Trajectory
from diffusion_grpo.rollout.buffer import MicroBatch, Recorded, RolloutBuffer
from diffusion_grpo.rollout.order import update_order
from diffusion_grpo.rollout.value_model import STATE_SIZE, ValueTargets

STEPS = 2


def recorded(count, steps=None):
    """Trajectories whose numbers say of which sample they are."""
    steps = [[0, 1]] * count if steps is None else steps
    samples = []
    for sample, own in enumerate(steps):
        latents = torch.full((1, STEPS, 1, 2, 2), float(sample))
        log_probs = 10.0 * sample + torch.tensor([own])
        seed = torch.tensor([sample])
        samples.append(Trajectory(latents, latents, log_probs, torch.tensor([own]), seed, seed, 4, 1.0))
    return Recorded(samples)


def batch_of(count, steps=None):
    """A micro-batch in which all that belongs to a sample is told from its number, and of a step from that too."""
    trajectory, numbers = recorded(count, steps), torch.arange(count)
    of_steps = 10.0 * numbers[:, None] + trajectory.steps
    targets = ValueTargets(of_steps[..., None].expand(-1, -1, STATE_SIZE), of_steps, of_steps)
    rows = [{"prompt": str(number)} for number in range(count)]
    return MicroBatch(rows, trajectory, of_steps, trajectory.log_probs, targets, numbers.float())


def check(batch, numbers):
    """All that the batch has is of the samples of these numbers, in this order."""
    steps = batch.trajectory.steps
    of_steps = 10.0 * torch.tensor(numbers)[:, None] + steps
    assert [row["prompt"] for row in batch.rows] == [str(number) for number in numbers]
    assert batch.trajectory.seeds.tolist() == numbers
    assert batch.trajectory.latents[:, 0, 0, 0, 0].tolist() == numbers
    for own in (batch.advantages, batch.old_log_probs, batch.targets.values, batch.targets.returns):
        assert torch.equal(own, of_steps)
    assert torch.equal(batch.targets.states[..., 0], of_steps)
    assert batch.log_ratio.tolist() == numbers
    for step in steps.unique().tolist() if (steps == steps[0]).all() else []:
        expected = [10.0 * number + step for number in numbers]
        assert batch.advantage(step).tolist() == batch.old_log_prob(step).tolist() == expected


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [3, 1], [2]])
def test_a_part_has_what_belongs_to_its_samples(places):
    check(batch_of(4).part(places), places)


def test_samples_that_train_on_a_step_keep_what_is_theirs():
    steps = [[0, 1], [1, 2], [0, 2], [1, 2]]
    batch = batch_of(4, steps)
    for step in (0, 1, 2):
        own = [number for number, row in enumerate(steps) if step in row]
        found = batch.at_step(step)
        check(found, own)
        assert found.advantage(step).tolist() == found.old_log_prob(step).tolist() == [10.0 * n + step for n in own]
    check(batch.part([3, 0, 1]).at_step(0), [0])


def test_the_advantage_of_a_sample_is_that_of_all_its_steps_where_there_is_one():
    batch = batch_of(3)
    one = MicroBatch(batch.rows, batch.trajectory, torch.arange(3.0), batch.old_log_probs)
    assert all(one.advantage(step).tolist() == [0, 1, 2] for step in (0, 1))


def numbers_of(batch):
    return batch.trajectory.seeds.tolist()


@pytest.mark.parametrize("updates", [1, 3, 6])
def test_each_slot_has_its_samples_and_each_iteration_its_order(updates):
    whole = batch_of(12)
    buffer = RolloutBuffer(whole.rows, whole.trajectory, whole.advantages, 2, 5, whole.targets, updates=updates)
    assert buffer.micro_batches == 6
    first = [numbers_of(buffer.micro_batch(slot)) for slot in range(6)]
    assert first == [[2 * slot, 2 * slot + 1] for slot in range(6)]
    per_update = 6 // updates
    shares = [first[update * per_update : (update + 1) * per_update] for update in range(updates)]
    orders = []
    for iteration in range(1, 5):
        order = update_order(5, iteration, updates).tolist()
        slots = range(6 * iteration, 6 * (iteration + 1))
        assert [numbers_of(buffer.micro_batch(slot)) for slot in slots] == [own for n in order for own in shares[n]]
        orders.append(order)
    assert updates == 1 or len(set(map(tuple, orders))) > 1
    for slot in (0, 7, 23):
        batch = buffer.micro_batch(slot)
        batch.log_ratio = torch.tensor(numbers_of(batch), dtype=torch.float32)
        check(batch, numbers_of(batch))
