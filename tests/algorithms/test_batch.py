"""Micro-batches and their parts: each sample keeps what belongs to it."""

import pytest
import torch

from diffusion_grpo.algorithms.batch import MicroBatch
from diffusion_grpo.policy.trajectory import Trajectory

STEPS = 2


def samples_of(count, steps=None):
    """One trajectory per sample, whose numbers say which sample it is."""
    samples = []
    for sample, own in enumerate([[0, 1]] * count if steps is None else steps):
        latents = torch.full((1, STEPS, 1, 2, 2), float(sample))
        log_probs = 10.0 * sample + torch.tensor([own])
        seed = torch.tensor([sample])
        samples.append(Trajectory(latents, latents, log_probs, torch.tensor([own]), seed, seed, 4, 1.0))
    return samples


def rows_of(count):
    return [{"prompt": str(number)} for number in range(count)]


def make_inputs(rows):
    return {"prompt": [row["prompt"] for row in rows]}


def batch_of(count, steps=None, calls=None):
    """A micro-batch in which the number of a sample, and of its step, shows in all that belongs to it."""
    samples, numbers = samples_of(count, steps), torch.arange(count)
    by_step = torch.cat([sample.log_probs for sample in samples])
    calls = [list(range(count))] if calls is None else calls
    settings = {"advantages_by_step": True, "log_ratio": numbers.float(), "weights": numbers / 2}
    return MicroBatch(rows_of(count), samples, calls, by_step, by_step, make_inputs, **settings)


def check_part(part, numbers):
    """Everything that the part has belongs to the samples with these numbers, in this order."""
    steps = part.trajectory.steps
    by_step = 10.0 * torch.tensor(numbers)[:, None] + steps
    assert len(part) == len(numbers) and part.inputs["prompt"] == [str(number) for number in numbers]
    assert [row["prompt"] for row in part.rows] == part.inputs["prompt"]
    assert part.trajectory.seeds.tolist() == numbers
    assert part.trajectory.latents[:, 0, 0, 0, 0].tolist() == numbers
    for own in (part.advantages, part.old_log_probs, part.trajectory.log_probs):
        assert torch.equal(own, by_step)
    assert part.log_ratio.tolist() == numbers and part.weights.tolist() == [number / 2 for number in numbers]
    for step in steps.unique().tolist() if (steps == steps[0]).all() else []:
        expected = [10.0 * number + step for number in numbers]
        assert part.advantage(step).tolist() == part.old_log_prob(step).tolist() == expected
        assert part.recorded_log_prob(step).tolist() == expected


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [3, 1], [2]])
def test_a_part_has_what_belongs_to_its_samples(indices):
    check_part(batch_of(4).part(indices), indices)


def test_parts_are_the_samples_of_each_call():
    calls = [[0, 2], [3], [1]]
    parts = batch_of(4, calls=calls).parts
    for part, indices in zip(parts, calls, strict=True):
        check_part(part, indices)


def test_samples_that_train_on_a_step_keep_what_is_theirs():
    steps = [[0, 1], [1, 2], [0, 2], [1, 2]]
    batch = batch_of(4, steps)
    for step in (0, 1, 2):
        own = [number for number, row in enumerate(steps) if step in row]
        found = batch.part([0, 1, 2, 3]).at_step(step)
        check_part(found, own)
        assert found.advantage(step).tolist() == found.old_log_prob(step).tolist() == [10.0 * n + step for n in own]
    check_part(batch.part([3, 0, 1]).at_step(0), [0])


def test_a_step_that_all_train_on_leaves_the_part_as_it_was_rolled_out():
    part = batch_of(3).part([0, 1, 2])
    assert part.at_step(1) is part


def test_the_advantage_of_a_sample_is_that_of_all_its_steps_where_there_is_one():
    batch = batch_of(3)
    own = MicroBatch(batch.rows, batch.samples, batch.calls, torch.arange(3.0), batch.old_log_probs, make_inputs)
    (part,) = own.parts
    assert all(part.advantage(step).tolist() == [0, 1, 2] for step in (0, 1))
    assert part.log_ratio is None and part.weights is None


def test_the_weight_of_a_step_multiplies_the_advantage_of_each_reward():
    part, weights = batch_of(3).part([0, 1, 2]), torch.tensor([2.0, 4.0, 6.0])
    part.advantages_by_step, part.trajectory.step_weights = False, torch.stack([weights + 1, weights], 1)
    for part.advantages in (torch.arange(3.0), torch.arange(6.0).view(3, 2)):
        expected = weights.view(-1, *[1] * (part.advantages.ndim - 1)) * part.advantages
        assert torch.equal(part.advantage(1), expected)


def test_passes_cover_each_call_at_each_of_its_steps():
    batch = batch_of(4, [[0, 1], [1, 2], [0, 2], [1, 2]], calls=[[0, 2], [1, 3]])
    assert batch.num_trained_steps == 8
    assert batch.passes() == [[(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]]
    assert batch.passes(take_turns=True) == [[(0, 0)], [(0, 1), (1, 1)], [(0, 2), (1, 2)]]


def test_the_mean_over_steps_is_of_each_sample():
    batch = batch_of(3)
    assert batch.mean_over_steps(batch.old_log_probs).tolist() == [0.5, 10.5, 20.5]
