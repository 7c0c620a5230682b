"""Held-out evaluation: what is left out, several datasets, columns that rewards add, schedules that follow it."""

import json
import math
import statistics

import pyarrow.parquet
import pytest
from datasets import Dataset
from fresh import load_again
from PIL import Image
from tiny_runs import are_equal, brightness, finished_run, logged, read_table, trained_weights, trainer_for
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.policy.rollout import rollout
from diffusion_grpo.report.gallery import list_rollout_samples, make_gallery
from diffusion_grpo.report.run_folder import read_run
from diffusion_grpo.rewards import batchwise

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}


def table_of(folder, step=0):
    return read_table(folder, step, kind="evaluations")


def test_what_one_reward_leaves_out_counts_as_its_mean(tmp_path):
    """A judge that fails more often after training must not look like a lower reward."""
    held_out = Dataset.from_dict({"prompt": ["one", "two", "three", "none"]})

    def judge(images, prompts, **columns):
        return [{"one": 0.2, "two": None, "three": 0.6}.get(prompt) for prompt in prompts]

    def always(images, prompts, **columns):
        return [None if prompt == "none" else 1.0 for prompt in prompts]

    weights = {"reward_weights": [2.0, 0.5]}
    trainer = trainer_for(tmp_path, rewards=[judge, always], eval_dataset=held_out, **weights)
    found = trainer.evaluate()
    assert found["eval_rewards/judge/mean"] == pytest.approx(0.4)
    assert found["eval_reward"] == pytest.approx(2 * 0.4 + 0.5 * 1.0)
    assert table_of(tmp_path)["reward"] == pytest.approx([0.9, 1.3, 1.7, math.nan], nan_ok=True)


def test_where_nothing_is_scored_nothing_moves_and_it_warns_once(tmp_path, capsys, monkeypatch):
    def silent(images, **columns):
        return [None] * len(images)

    again = load_again("diffusion_grpo.rewards.call")  # warns once per process
    monkeypatch.setattr("diffusion_grpo.rewards.executor.collect_values", again.collect_values)
    trainer = trainer_for(tmp_path, rewards=silent, **EVALUATED)
    with pytest.warns(UserWarning, match="None from every reward") as warnings:
        trainer.train()
    assert len([entry for entry in warnings if "None from every reward" in str(entry.message)]) == 1
    assert logged(trainer, "grad_norm") == [0.0, 0.0] and logged(trainer, "eval_reward") == []
    assert "Reward " not in capsys.readouterr().out


def test_several_datasets_are_measured_each_and_together(tmp_path):
    trainer = trainer_for(tmp_path, **EVALUATED, num_completions_to_log=2)
    trainer.eval_dataset = {
        "cats": Dataset.from_dict({"prompt": ["a cat", "two cats"], "mood": ["calm", "wild"]}),
        "dogs": Dataset.from_dict({"prompt": ["a dog"]}),
    }
    trainer.train()
    cats, dogs, both = (logged(trainer, f"eval_{name}reward")[-1] for name in ("cats_", "dogs_", ""))
    assert both == pytest.approx((2 * cats + dogs) / 3)
    table = table_of(tmp_path, 2)
    assert table["dataset"] == ["cats", "cats", "dogs"] and table["prompt"] == ["a cat", "two cats", "a dog"]
    images = sorted(path.name for path in (tmp_path / "evaluations" / "step-000002").iterdir())
    assert images == ["cats-0000.png", "dogs-0000.png"] and (tmp_path / "grid.png").is_file()
    assert table["row"] == [0, 1, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_after"] == both
    found = {name: rewards["reward"]["after"] for name, rewards in summary["datasets"].items()}
    assert found == {"cats": cats, "dogs": dogs}


def test_the_images_that_samples_were_made_from_are_shown_beside_them(tmp_path):
    sources = [Image.new("RGBA", (32, 32), color) for color in ("red", "blue")]
    data = Dataset.from_dict({"prompt": ["make it darker"] * 2, "image": sources})
    settings = {"columns": {"image": sources * 2}, "eval_dataset": data, "trained_steps": [0, 2]}
    settings |= {"log_samples_steps": 1}
    finished_run(tmp_path, "sd15_img2img", **settings, **EVALUATED)
    table = table_of(tmp_path, 2)
    assert table["row"] == [0, 1] and table["input"] == [f"evaluations/inputs/000{row}.png" for row in range(2)]
    for path, source in zip(table["input"], sources, strict=True):
        with Image.open(tmp_path / path) as shown:
            assert shown.getpixel((5, 5)) == source.getpixel((5, 5))[:3]
    rollout = pyarrow.parquet.read_table(tmp_path / "samples" / "step-000000.parquet").to_pylist()
    kept = [row for row in rollout if row["image"]]
    assert kept and all((tmp_path / row["input"]).is_file() for row in kept)
    assert {row["input"] for row in kept} == {row["image"].replace(".png", "-input.png") for row in kept}
    shown = read_run(tmp_path)
    cards = make_gallery(shown)["cards"]
    cards += [card for rollout in list_rollout_samples(shown) for card in rollout["cards"]]
    assert len(cards) > 2 and all(card["input"].startswith("data:image/png") for card in cards)


def test_diversity_is_a_mean_over_the_prompts_of_all_datasets(tmp_path):
    """A dataset of two prompts counts twice as much as one of a single prompt."""
    trainer = trainer_for(tmp_path, num_generations_eval=2, num_inference_steps=2)
    cats, dogs = Dataset.from_dict({"prompt": ["a cat", "two cats"]}), Dataset.from_dict({"prompt": ["a dog"]})
    of_cats, of_dogs = (
        trainer.evaluate(dataset, metric_key_prefix="test")["test_diversity"] for dataset in (cats, dogs)
    )
    both = trainer.evaluate({"cats": cats, "dogs": dogs}, metric_key_prefix="test")
    assert of_cats != pytest.approx(of_dogs, rel=1e-3)
    assert both["test_diversity"] == pytest.approx((2 * of_cats + of_dogs) / 3)
    assert (both["test_cats_diversity"], both["test_dogs_diversity"]) == pytest.approx((of_cats, of_dogs))


@pytest.mark.parametrize(("prefix", "is_logged"), [("eval_hard", True), ("hard", False)])
def test_an_evaluation_under_another_prefix_keeps_no_samples(tmp_path, prefix, is_logged):
    """What starts with "eval" is logged and shown to the callbacks."""
    seen = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append(sorted(metrics))

    trainer, dataset = trainer_for(tmp_path, max_steps=1, num_inference_steps=2), Dataset.from_dict({"prompt": ["a"]})
    trainer.evaluate()
    trainer.train()
    trainer.add_callback(Watch())
    metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
    assert trainer.state.global_step == 1 and 0 <= metrics[f"{prefix}_reward"] <= 1
    assert logged(trainer, f"{prefix}_reward") == ([metrics[f"{prefix}_reward"]] if is_logged else [])
    assert seen == ([sorted(metrics)] if is_logged else [])
    assert {path.stem for path in (tmp_path / "evaluations").glob("step-*")} == {"step-000000"}


def test_rewards_score_an_evaluation_in_calls_no_larger_than_in_a_rollout(tmp_path):
    """Except for one that compares all samples; what they return and log is put back in the order of the prompts."""
    calls = {"number": [], "ranked": []}

    def number(images, prompts, log_extra, log_metric, **columns):
        calls["number"].append(list(prompts))
        log_extra("doubled", [2.0 * int(prompt) for prompt in prompts])
        log_metric("size", len(prompts))
        return [float(prompt) for prompt in prompts]

    @batchwise
    def ranked(images, prompts, **columns):
        calls["ranked"].append(list(prompts))
        return [sorted(prompts).index(prompt) / len(prompts) for prompt in prompts]

    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 2}
    trainer = trainer_for(tmp_path, rewards=[number, ranked], **EVALUATED, **settings)
    assert trainer.args.num_generations == 4  # so many samples a reward gets in a rollout
    trainer.eval_dataset = Dataset.from_dict({"prompt": list("53142")})
    metrics = trainer.evaluate()
    assert calls["number"] == [list("5533"), list("1144"), list("22")]
    assert calls["ranked"] == [list("5533114422")]
    assert metrics["eval_rewards/number/mean"] == 3.0 and metrics["eval_size"] == pytest.approx(10 / 3)
    table = table_of(tmp_path)
    assert table["number"] == [5, 5, 3, 3, 1, 1, 4, 4, 2, 2] == [value / 2 for value in table["doubled"]]
    assert table["ranked"] == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.0, 0.0, 0.6, 0.6, 0.2, 0.2])


def test_learning_rate_schedules(tmp_path):
    trainer = finished_run(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", **EVALUATED)
    assert len(logged(trainer, "learning_rate")) == 2
    assert trainer.lr_scheduler.mode == "max"  # a reward that rises is no plateau
    assert trainer.args.metric_for_best_model == "eval_reward"


@pytest.mark.parametrize(("own", "mode"), [({}, "max"), ({"greater_is_better": False}, "min")])
def test_a_schedule_watches_its_metric_in_the_right_direction(own, mode, tmp_path):
    given = EVALUATED | {"lr_scheduler_type": "greedy", "metric_for_best_model": "eval_kl"} | own
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given)
    assert args.lr_scheduler_kwargs["mode"] == mode


def test_arguments_that_an_evaluation_cannot_take_are_refused(tmp_path):
    trainer = trainer_for(tmp_path)
    for name in ("num_inference_steps", "num_images_per_prompt", "guidance"):
        with pytest.raises(ValueError, match=name):
            trainer.evaluate(pipeline_kwargs={name: 2})
    with pytest.raises(ValueError, match="eval_dataset={} has nothing to evaluate"):
        trainer.evaluate({})


def test_an_evaluation_lacks_no_column_of_a_reward(tmp_path):
    def spelling(images, word):
        raise AssertionError("it is refused before anything is sampled")

    words = Dataset.from_dict({"prompt": ["a"], "word": ["b"]})
    trainer = trainer_for(tmp_path, rewards=spelling, columns={"word": list("abcd")}, eval_dataset=words)
    with pytest.raises(ValueError, match="^The reward 'spelling' needs the column 'word', which signs lacks"):
        trainer.evaluate({"signs": words.remove_columns("word")})


def test_no_updates_where_none_are_asked_for(tmp_path):
    trainer = trainer_for(tmp_path, **(EVALUATED | {"max_steps": 0, "eval_on_start": True}))
    before = trained_weights(trainer)
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 0 and len(logged(trainer, "eval_reward")) == 1
    assert before and are_equal(before, trained_weights(trainer))


@pytest.mark.parametrize(("steps", "first"), [(2, [0.0, 0.5, 1.0, 1.0]), (0, [1.0] * 4)])
def test_the_default_schedule_warms_up(tmp_path, steps, first):
    trainer = trainer_for(tmp_path, warmup_steps=steps, max_steps=4, learning_rate=1e-3)
    trainer.create_optimizer_and_scheduler(4)
    rates = [trainer.lr_scheduler.lr_lambdas[0](step) for step in range(4)]
    assert rates == pytest.approx(first)
    assert trainer.args.lr_scheduler_type == ("constant_with_warmup" if steps else "constant")


def test_the_run_is_read_without_the_extra_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("diffusion_grpo.report.page.PACKAGES", ("no_such_package",))
    finished_run(tmp_path, max_steps=1)
    assert (tmp_path / "summary.json").is_file() and not (tmp_path / "report.html").exists()
    assert "no_such_package not installed" in capsys.readouterr().out and read_run(tmp_path).updates == 1


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("diffusion_grpo.report.page.write_report", lambda folder: 1 / 0)
    trainer = finished_run(tmp_path, max_steps=1)
    assert trainer.state.global_step == 1 and not (tmp_path / "report.html").exists()
    assert f"diffusion-grpo report {tmp_path}" in caplog.text


def test_the_evaluated_reward_is_weighted_as_in_training_and_errors_are_those_of_the_mean(tmp_path):
    def constant(images, **columns):
        return [3.0] * len(images)

    metrics = trainer_for(tmp_path, rewards={brightness: 2.0, constant: 0.5}, num_generations_eval=3).evaluate()
    table = table_of(tmp_path)
    assert table["reward"] == pytest.approx([2 * value + 0.5 * 3 for value in table["brightness"]])
    assert metrics["eval_reward"] == pytest.approx(2 * metrics["eval_rewards/brightness/mean"] + 1.5)
    for key, values in (("eval_rewards/brightness/std_error", "brightness"), ("eval_reward_std_error", "reward")):
        prompts = [statistics.mean(table[values][start : start + 3]) for start in (0, 3)]
        expected = statistics.stdev(prompts) / math.sqrt(2)
        assert metrics[key] == pytest.approx(expected, rel=1e-4) and expected > 0
    assert metrics["eval_rewards/constant/std_error"] == 0


def test_evaluations_draw_no_noise_in_their_steps(tmp_path, monkeypatch):
    """The images are those of the pipeline's own scheduler from the same initial latents, at any noise_level."""
    levels, rewards = [], []

    def watched(*arguments, noise_level, **keywords):
        levels.append(noise_level)
        return rollout(*arguments, noise_level=noise_level, **keywords)

    monkeypatch.setattr("diffusion_grpo.training.evaluation.rollout", watched)
    for level in (0.2, 1.5):
        trainer_for(tmp_path / str(level), noise_level=level).evaluate()
        rewards.append(table_of(tmp_path / str(level))["brightness"])
    assert rewards[0] == rewards[1] and set(levels) == {0.0}


def test_what_is_evaluated_besides_is_no_part_of_the_report(tmp_path):
    """The report and the card compare evaluations of the same prompts with the same settings."""
    trainer = finished_run(tmp_path, **EVALUATED, max_steps=2)
    table, log = (tmp_path / "evaluations/step-000002.parquet").read_bytes(), list(trainer.state.log_history)
    other = Dataset.from_dict({"prompt": ["something else", "and more", "a third"]})
    assert trainer.evaluate(other)["eval_reward"] != log[-2].get("eval_reward")
    trainer.evaluate(pipeline_kwargs={"guidance_scale": 3.0})
    assert trainer.state.log_history == log
    assert (tmp_path / "evaluations/step-000002.parquet").read_bytes() == table
    trainer.evaluate(trainer.eval_dataset)
    assert len(trainer.state.log_history) == len(log) + 1


def test_an_evaluation_of_the_best_weights_does_not_replace_that_of_the_last(tmp_path, capsys):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": False}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = finished_run(tmp_path, **settings, **best, max_steps=2, learning_rate=1e-2)
    assert trainer.run["published_after"] == 1
    assert "best evaluation, after 1 update" in capsys.readouterr().out
    table, log = (tmp_path / "evaluations/step-000002.parquet").read_bytes(), list(trainer.state.log_history)
    trainer.evaluate()
    assert trainer.state.log_history == log
    assert (tmp_path / "evaluations/step-000002.parquet").read_bytes() == table
