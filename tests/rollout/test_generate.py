"""Samples are those of their own rows, however many calls of the pipeline a micro-batch takes."""

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from tiny_runs import PROMPTS, trainer_for

from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.rewards import groupwise

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
