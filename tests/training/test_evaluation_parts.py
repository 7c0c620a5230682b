"""Evaluations in parts: which samples stay in memory, and the same results as when all are scored at the end."""

import gc
import weakref

import pytest
from datasets import Dataset
from tiny_runs import brightness, read_table, trainer_for

from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.rewards import RewardError, batchwise, takes_latents

PROMPTS = list("53142")


@batchwise
def waiting(images, **columns):
    return [0.0] * len(images)


def fails_on_four(images, prompts, **columns):
    return [float("inf") if prompt == "4" else 0.0 for prompt in prompts]


@takes_latents
def latent_mean(latents, **columns):
    return [float(latent.mean()) for latent in latents]


class Brightness:
    """The mean pixel of each image; logs one of two columns. Knows how many samples there were at each call."""

    __name__ = "brightness"

    def __init__(self):
        self.made, self.alive, self.sizes = [], [], []

    def rollout(self, *args, **settings):
        samples, trajectory = rollout(*args, **settings)
        self.made += map(weakref.ref, samples)
        return samples, trajectory

    def __call__(self, images, prompts, log_extra, log_metric, **columns):
        gc.collect()
        self.alive.append(sum(sample() is not None for sample in self.made))
        self.sizes.append(len(images))
        log_metric("size", len(images))
        if "4" in prompts:
            log_extra("has_four", [prompt == "4" for prompt in prompts])
        else:
            log_extra("others", prompts)
        return brightness(images)


def evaluate(folder, *others, shown=1, kept_bytes=1, **settings):
    """The metrics, the table and the reward of an evaluation of five prompts, two samples each."""
    reward = Brightness()
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 2, "num_completions_to_log": shown} | settings
    trainer = trainer_for(folder, rewards=[reward, *others], eval_strategy="steps", eval_steps=2, **settings)
    trainer.eval_dataset = Dataset.from_dict({"prompt": PROMPTS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusion_grpo.training.evaluation.rollout", reward.rollout)
        patch.setattr("diffusion_grpo.training.evaluation.KEPT_BYTES", kept_bytes)
        metrics = trainer.evaluate()
    return metrics, read_table(folder, kind="evaluations"), reward


def test_samples_are_dropped_once_they_are_scored_and_nothing_else_changes(tmp_path):
    metrics, table, parts = evaluate(tmp_path / "parts", latent_mean)
    expected, whole_table, whole = evaluate(tmp_path / "whole", latent_mean, waiting)
    assert parts.alive == [4, 5, 3]  # two prompts in a call, one image that is shown
    assert whole.alive == [10, 10, 10]
    same = [name for name in metrics if not name.endswith(("runtime", "reward", "reward_std_error"))]
    assert {name: metrics[name] for name in same} == {name: expected[name] for name in same}
    assert {"eval_size", "eval_diversity", "eval_watch/sharpness/mean", "eval_rewards/latent_mean/mean"} <= set(same)
    columns = table.keys() - {"file", "image", "reward"}
    assert {name: table[name] for name in columns} == {name: whole_table[name] for name in columns}
    assert table["has_four"] == [None] * 4 + [False, False, True, True] + [None] * 2
    assert table["others"] == [*"5533", *[None] * 4, *"22"]
    assert [name is not None for name in table["file"]] == [True] + [False] * 9
    assert len(list((tmp_path / "parts" / "evaluations" / "step-000000").iterdir())) == 1


@pytest.mark.parametrize(
    ("batch", "count", "calls"), [(3, 1, [(4, 5), (1, 5)]), (2, 3, [(3, 6), (3, 6), (3, 7), (3, 7), (3, 4)])]
)
def test_parts_are_whole_pipeline_calls_and_scored_in_whole_calls_of_the_reward(tmp_path, batch, count, calls):
    """First a single part, two pipeline calls of up to 3 samples, which the reward gets 4 at a time.

    Then parts of three calls of 2 samples, of which the reward gets 3 at a time.
    """
    settings = {"per_device_eval_batch_size": batch, "num_generations_eval": count}
    metrics, table, parts = evaluate(tmp_path / "parts", **settings)
    expected, whole_table, whole = evaluate(tmp_path / "whole", waiting, **settings)
    assert list(zip(parts.sizes, parts.alive, strict=True)) == calls
    assert whole.sizes == parts.sizes and set(whole.alive) == {5 * count}
    assert metrics["eval_rewards/brightness/mean"] == expected["eval_rewards/brightness/mean"]
    assert table["brightness"] == whole_table["brightness"]


@pytest.mark.parametrize(("kept", "calls"), [(8, [4, 7, 7]), (7, [4, 5, 3])])
def test_parts_grow_until_their_samples_take_the_memory_that_they_may(tmp_path, kept, calls):
    """Once the size of a sample is known, 16 pixels wide and high. The first part is as small as it can be."""
    assert evaluate(tmp_path, kept_bytes=kept * 4 * 16 * 16)[2].alive == calls


def test_a_sample_on_which_a_reward_fails_has_its_place_in_the_evaluation(tmp_path):
    with pytest.raises(RewardError, match=r"\(prompt '4'\). The sample is saved as .*/fails_on_four-6.png"):
        evaluate(tmp_path, fails_on_four)
    assert [path.name for path in tmp_path.glob("failures/*.png")] == ["fails_on_four-6.png"]
