"""Reward hacking, seen early: limits of metrics, the warning, the report."""

import numpy as np
import pytest
from run_folders import make_run
from transformers import TrainerControl, TrainerState

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.report.page import list_findings
from diffusion_grpo.report.run_folder import find_passed_limit, name_error, read_run, summarise_rollouts
from diffusion_grpo.training.callbacks import GuardCallback


def run_log(diversities) -> list[dict[str, float]]:
    return [{"step": step, "diversity": spread} for step, spread in enumerate(diversities, 1)]


def test_a_passed_limit_is_named_and_a_healthy_run_is_not() -> None:
    rng, share = np.random.default_rng(1), np.linspace(0, 1, 40)
    jitter = 0.03 * rng.standard_normal(40)
    falling = 0.2 * (1 - 0.9 * share) + jitter / 10  # with whatever reward
    assert find_passed_limit(run_log(falling)).startswith("diversity fell from 0.1")
    demo = 0.126 * (1 - 0.49 * share)  # the most alike of three runs by `make demo` ends at 51 %
    assert find_passed_limit(run_log(demo)) is None
    assert find_passed_limit(run_log(falling[:1])) is find_passed_limit([{"loss": 1.0}]) is None  # too early to say
    assert find_passed_limit(run_log(demo), {"diversity": 0.9}) is not None


@pytest.mark.parametrize(
    ("name", "values", "limit", "is_passed"),
    [
        ("eval_reward", [0.7, 0.9, 0.8], 1.0, False),  # the standard error of this fall is 0.1 * sqrt(2)
        ("eval_reward", [0.7, 0.9, 0.7], 1.0, True),
        ("eval_reward", [0.7, 0.9, 0.7], 2.0, False),
        ("eval_reward", [0.7, 0.2, 0.7], 1.0, False),  # has come back
        ("eval_watch/ink/mean", [0.9, 0.7], 1.0, True),
        ("eval_a_reward", [0.9, 0.7], 1.0, True),
        ("eval_diversity/clip", [0.5, 0.21], 0.4, False),
        ("eval_diversity/clip", [0.5, 0.19], 0.4, True),
        ("eval_velocity/ratio_to_ref", [1.2], 1.15, True),
        ("eval_velocity/ratio_to_ref", [1.2, 1.1], 1.15, False),
    ],
)
def test_what_a_limit_means_depends_on_the_metric(name, values, limit, is_passed) -> None:
    errors = {name_error(name): 0.1} if name_error(name) else {}
    log = [{"loss": 1.0}, *({name: value, **errors} for value in values), {"loss": 1.0}]
    assert (find_passed_limit(log, {name: limit}) is not None) == is_passed


def test_the_warning_comes_once_and_stands_in_the_report(tmp_path) -> None:
    log = run_log(np.linspace(0.3, 0.01, 20))
    state, control = TrainerState(global_step=20, log_history=log), TrainerControl()
    callback = GuardCallback(None, {})
    callback.on_train_begin()
    with pytest.warns(UserWarning, match="Update 20: diversity fell") as warnings:
        for _ in range(2):
            callback.on_log(DiffusionGRPOConfig(str(tmp_path), use_cpu=True), state, control)
    assert len(warnings) == 1 and not control.should_training_stop
    run = read_run(make_run(tmp_path / "run"))
    assert not any("diversity fell" in sentence for sentence in list_findings(run))
    for number, entry in enumerate(run.train):
        entry["diversity"] = 0.3 / (1 + number)
    assert any("diversity fell" in sentence for sentence in list_findings(run))


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ({}, True),
        ({"save_strategy": "no"}, False),
        ({"load_best_model_at_end": False}, False),
        ({"save_steps": 10}, True),
        ({"save_steps": 12}, False),  # not after evaluations; transformers would refuse load_best_model_at_end
        ({"eval_steps": None, "logging_steps": 7}, True),
    ],
)
def test_the_best_evaluation_is_kept_unless_the_user_saves_otherwise(given, is_kept) -> None:
    own = {"eval_strategy": "steps", "eval_steps": 5, "stop_when": {"eval_reward": 2}}
    args = DiffusionGRPOConfig("run", use_cpu=True, **own | given)
    assert args.load_best_model_at_end == is_kept and (args.save_steps == 5) == (not given)


def test_limits_act_in_training_alone(tmp_path) -> None:
    state, run = TrainerState(global_step=9, log_history=[{"eval_kl": 2.0}]), {}
    args, control = DiffusionGRPOConfig(str(tmp_path), use_cpu=True), TrainerControl()
    callback = GuardCallback({"eval_kl": 1.0}, run)
    callback.on_log(args, state, control)  # an evaluation before it
    callback.on_train_begin()
    callback.on_train_end()
    callback.on_log(args, state, control)  # and one after it
    assert not run and not control.should_training_stop
    callback.on_train_begin()
    callback.on_log(args, state, control)
    assert "eval_kl rose to 2" in run["stopped"] and control.should_training_stop


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"divresity": 0.4}, "divresity"),
        ({"eval_reward": 2}, "eval_strategy"),
        ({"diversity": "0.4"}, "number above 0"),
        ({"diversity": 0}, "number above 0"),
    ],
)
def test_limits_that_could_never_act_are_refused(limits, message) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionGRPOConfig("run", use_cpu=True, stop_when=limits)


def test_an_evaluation_shows_the_training_since_the_last_one() -> None:
    log = [{"diversity": 0.9}, {"eval_reward": 1.0}, {"diversity": 0.5}, {"kl": 1.0}]
    log += [{"diversity": 0.1, "frac_reward_zero_std": 1.0}]
    expected = {"rollouts/diversity": 0.3, "rollouts/frac_reward_zero_std": 1.0}
    assert summarise_rollouts(log) == pytest.approx(expected) and summarise_rollouts(log[:2]) == {}
