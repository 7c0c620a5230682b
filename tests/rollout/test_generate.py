"""Samples are those of their own rows, and micro-batches come in order; a new rollout is made when one is used up."""

from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from tiny_runs import PROMPTS, trainer_for

from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.rewards import groupwise
from diffusion_grpo.rollout.generate import RolloutLoader

# two prompts per micro-batch, of different sizes: each takes two calls of the pipeline
ROWS = {"negative_prompt": ["grey", "blurred", "text", "noise"], "height": [16, 32, 16, 32]}
SETTINGS = {"columns": ROWS, "height": None, "guidance_scale": 4.0, "num_generations": 2, "shuffle_dataset": False}
SETTINGS |= {"max_steps": 1, "learning_rate": 0.0, "gradient_accumulation_steps": 1}


def test_each_call_of_a_rollout_has_the_columns_of_its_own_samples(tmp_path):
    groups = []

    @groupwise
    def by_group(images, prompts, **columns):
        groups.append(prompts)
        return [0.0, 1.0]

    trainer = trainer_for(tmp_path, rewards=by_group, **SETTINGS)
    trainer.train()
    buffer = trainer.loader.buffer
    assert groups == [[prompt] * 2 for prompt in PROMPTS[:2]]
    assert [row["height"] for row in buffer.rows] == [16, 16, 32, 32]

    def last_latents(row, sample):
        """What the rollout of this sample alone ends in."""
        seeds = {"seeds": sample.seeds, "initial_seeds": sample.initial_seeds}
        return rollout(trainer.policy, trainer.inputs([row]), **seeds, num_inference_steps=4)[1].next_latents[:, -1]

    for row, sample in zip(buffer.rows, buffer.samples, strict=True):
        expected = sample.next_latents[:, -1]
        torch.testing.assert_close(last_latents(row, sample), expected, rtol=0, atol=1e-4)
        for change in ({"prompt": "the sea"}, {"negative_prompt": "the sea"}):
            assert (last_latents(row | change, sample) - expected).abs().max() > 1e-3


def test_each_call_of_an_evaluation_has_the_columns_of_its_own_samples(tmp_path):
    texts, rewards = {"prompt": ["a cat", "a tree", "the sea", "a dog"], **ROWS}, []
    others = texts | {"prompt": ["the sea", "a dog", "a cat", "a tree"]}
    for size, columns in ((1, texts), (4, texts), (4, others)):
        folder = tmp_path / str(len(rewards))
        trainer_for(
            folder, per_device_eval_batch_size=size, eval_dataset=Dataset.from_dict(columns), **SETTINGS
        ).evaluate()
        table = pyarrow.parquet.read_table(next((folder / "evaluations").glob("*.parquet"))).to_pydict()
        assert table["prompt"] == columns["prompt"]
        rewards.append(table["brightness"])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-5)
    assert min(abs(one - other) for one, other in zip(*rewards[1:], strict=True)) > 5e-5


# The loader


class Buffer:
    """Shows which rollout it is of."""

    def __init__(self, generation):
        self.generation = generation

    def micro_batch(self, slot):
        return self.generation, slot


class Generator:
    """Makes a rollout's buffer; keeps what it was asked for."""

    def __init__(self):
        self.calls = []

    def __call__(self, order, read_rows, step, last_step):
        self.calls.append((read_rows(order.row_indices), step, last_step))
        return Buffer(len(self.calls) - 1)


class Backend:
    groups = SimpleNamespace(is_first=True)

    def gather(self, tensor):
        return tensor


def make(accumulation=2, steps_per_generation=4, num_iterations=1):
    sizes = BatchSizes(4, None, 2, accumulation, steps_per_generation, num_iterations)
    generator = Generator()
    args = SimpleNamespace(batch_sizes=sizes, seed=0, device=torch.device("cpu"), trajectory_device="cpu")
    return RolloutLoader(generator, args, Backend(), lambda indices: [f"row {index}" for index in indices]), generator


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        ({"steps_per_generation": 2}, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        ({"steps_per_generation": 2, "num_iterations": 3}, [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
    ],
    ids=["two updates a rollout", "one", "three of the same samples"],
)
def test_the_order_of_three_updates(sizes, expected):
    feed, generator = make(**sizes)
    found, firsts, used_up = [], [], []
    for step in range(3):
        for _ in range(2):
            found.append(feed.next([7, 8], step, last_step=9))
            firsts.append(feed.is_first)
            used_up.append(feed.is_used_up)
    following = [*found[1:], feed.next([7, 8], 3, last_step=9)]
    assert used_up == [rollout != after for (rollout, _), (after, _) in zip(found, following, strict=True)]
    assert found == expected and firsts == [True, False] * 3
    assert generator.calls[0] == (["row 7", "row 8"], 0, 9)


def test_after_a_reset_a_new_rollout_begins():
    feed, generator = make(steps_per_generation=2)
    feed.next([1, 2], 0, 9)
    feed.reset()
    assert feed.buffer is None
    assert feed.next([1, 2], 0, 9) == (1, 0) and len(generator.calls) == 2


def test_a_rollout_is_saved_only_while_it_is_used(tmp_path, monkeypatch):
    saved, (feed, _) = [], make()
    monkeypatch.setattr("diffusion_grpo.rollout.generate.save_buffer", lambda buffer, path: saved.append(path.name))
    feed.save(tmp_path, 0)
    for step in range(2):
        for _ in range(2):
            feed.next([1, 2], step, 9)
        feed.save(tmp_path, step + 1)
    assert saved == ["rollout-rank0.safetensors"]  # after the first of two updates
