"""What lies between rollout and update: which samples a micro-batch has, and that each keeps what belongs to it."""

from types import SimpleNamespace

import pytest
import torch

from diffusion_grpo.rollout.buffer import RolloutBuffer
from diffusion_grpo.rollout.estimator import SampleAdvantages
from diffusion_grpo.rollout.plan import update_order
from diffusion_grpo.rollout.value_model import STATE_SIZE, ValueTargets
from tests.algorithms.test_batch import check_part, rows_of, samples_of


class OneCall:
    """Inputs of a pipeline that takes all samples of a micro-batch in one call."""

    def __call__(self, rows):
        return {"prompt": [row["prompt"] for row in rows]}

    def parts(self, rows):
        return [list(range(len(rows)))]


def buffer_of(count, updates=1, **settings):
    """A buffer of micro-batches of two in which all that belongs to a sample shows its number and its step."""
    samples, numbers = samples_of(count), torch.arange(count)
    by_step = torch.cat([sample.log_probs for sample in samples])
    targets = ValueTargets(by_step[..., None].expand(-1, -1, STATE_SIZE), by_step, by_step + 1)
    sizes = {"micro_batch": 2, "accumulation": count // 2, "num_generations": 1, "trained_per_prompt": 1}
    order = SimpleNamespace(seed=5, updates=updates, sizes=SimpleNamespace(**sizes | settings))
    advantages = SampleAdvantages(by_step, targets, numbers / 2)
    return RolloutBuffer(rows_of(count), samples, advantages, OneCall(), order, numbers)


def numbers_of(batch):
    return [int(sample.seeds) for sample in batch.samples]


@pytest.mark.parametrize("updates", [1, 3, 6])
def test_each_slot_has_its_samples_and_each_iteration_its_order(updates):
    buffer = buffer_of(12, updates=updates)
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
        batch, targets = buffer.micro_batch(slot), buffer.advantages.targets[buffer.range_of(slot)]
        numbers = numbers_of(batch)
        batch.log_ratio = torch.tensor(numbers, dtype=torch.float32)
        (part,) = batch.parts
        check_part(part, numbers)
        assert torch.equal(targets.values, part.old_log_probs) and torch.equal(targets.returns, targets.values + 1)
        assert torch.equal(targets.states[..., 0], targets.values)


def test_only_the_first_update_is_on_policy():
    buffer = buffer_of(12, updates=3, accumulation=2)
    assert [buffer.micro_batch(slot).is_on_policy for slot in range(8)] == [True] * 2 + [False] * 6
    assert all(buffer_of(12).micro_batch(slot).is_on_policy for slot in range(6))
