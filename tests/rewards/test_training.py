"""Rewards inside a run: weights, groups, extra columns, combinations, and a reward that fails on the way."""

import json

import pytest
import torch
from tiny_runs import are_equal, brightness, finished_run, logged, read_table, trained_weights, trainer_for

from diffusion_grpo.data.prompts import load_prompts
from diffusion_grpo.rewards import RewardError, groupwise, takes_tensors
from diffusion_grpo.rewards.geneval import Detection, GenEval


def test_weights_groups_tensors_and_extra_columns_in_a_run(tmp_path):
    seen = []

    @groupwise
    def rank(images, prompts, log_extra, log_metric):
        seen.append(prompts)
        log_extra("message", [f"{len(prompts)} of {prompts[0]}" for _ in prompts])
        log_metric("groups", 1)
        shades = brightness(images)
        return [sum(shade > other for other in shades) / (len(shades) - 1) for shade in shades]

    @takes_tensors
    def mean(images):
        assert images.shape[1:3] == (1, 3) and not torch.is_grad_enabled()
        return images.mean((1, 2, 3, 4))

    trainer = finished_run(tmp_path, rewards={rank: 0.5, mean: {"weight": 2.0, "mean": 0.5}}, max_steps=1)
    assert [len(set(prompts)) for prompts in seen] == [1, 1] and [len(prompts) for prompts in seen] == [4, 4]
    assert trainer.rewards.weights == [0.5, 2.0] and trainer.run["reward_options"]["mean"] == {"mean": 0.5}
    table = read_table(tmp_path)
    assert table["message"] == [f"4 of {prompt}" for prompt in table["prompt"]]
    weighted = [0.5 * a + 2 * b for a, b in zip(table["rank"], table["mean"], strict=True)]
    assert table["reward"] == pytest.approx(weighted, abs=1e-6)
    assert sorted(table["rank"][:4]) == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(("order", "value"), [("min_then_normalize", 0.2), ("product_then_normalize", 0.25 * 0.16)])
def test_min_and_product_reach_logs_and_evaluation(order, value, tmp_path):
    def low(images):
        return [0.4] * len(images)

    def high(images):
        return [0.25] * len(images)

    trainer = finished_run(
        tmp_path,
        rewards={low: 0.5 if "min" in order else 2.0, high: 1},
        multi_objective_aggregation=order,
        max_steps=1,
    )
    assert logged(trainer, "reward") == pytest.approx([value])
    assert trainer.evaluate()["eval_reward"] == pytest.approx(value)


def test_a_reward_that_fails_leaves_a_checkpoint_to_go_on_from(tmp_path):
    is_gone = []

    def shaky(images, trainer_state):
        if is_gone and trainer_state.global_step == 2:
            raise ConnectionError("no server left")
        return brightness(images)

    unbroken = finished_run(tmp_path / "unbroken", rewards=shaky, max_steps=4)
    is_gone.append(True)
    trainer = trainer_for(tmp_path / "broken", rewards=shaky, max_steps=4)
    with pytest.raises(RewardError, match="no server left"):
        trainer.train()
    assert [path.name for path in (tmp_path / "broken").glob("checkpoint-*")] == ["checkpoint-2"]
    is_gone.clear()
    resumed = trainer_for(tmp_path / "broken", rewards=shaky, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert are_equal(trained_weights(unbroken), trained_weights(resumed))


def test_geneval_prompts_from_a_file_in_a_run(tmp_path):
    """Nested metadata goes from the file to the reward of the very sample that its prompt made."""
    rows = [
        {"tag": "position", "prompt": "a dog right of a cat", "include": [{"class": "cat", "count": 1}]},
        {"tag": "colors", "prompt": "two red cars", "include": [{"class": "car", "count": 2, "color": "red"}]},
    ]
    rows[0]["include"].append({"class": "dog", "count": 1, "position": ["right of", 0]})
    (tmp_path / "geneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def detector(images, labels):
        """Finds what was asked for, side by side in the order of the alphabet, in the first of the images."""
        places = [(label, 0.9, (40.0 * place, 0.0, 40.0 * place + 8, 8.0)) for place, label in enumerate(labels)]
        return [[Detection(*place) for place in places] if number == 0 else [] for number in range(len(images))]

    trainer = trainer_for(tmp_path / "run", rewards=GenEval(detector), max_steps=1)
    trainer.train_dataset = load_prompts(str(tmp_path / "geneval.jsonl"))
    trainer.train()
    table = read_table(tmp_path / "run")
    right = {(prompt, value) for prompt, value in zip(table["prompt"], table["GenEval"], strict=True)}
    # one dog right of one cat in the first of four; one car where two were asked for
    assert right == {("a dog right of a cat", 1.0), ("a dog right of a cat", 0.0), ("two red cars", 0.0)}
    assert table["GenEval"].count(1.0) == 1 and logged(trainer, "ratio/max_error") == [0.0]
