"""Reward hacking, seen early: what a log says, the warning, the report."""

import numpy as np
import pytest
from run_folders import make_run

from diffusion_grpo.report.page import list_findings
from diffusion_grpo.report.run_folder import WINDOW, find_collapse, read_run, summarise_rollouts
from diffusion_grpo.training.callbacks import CollapseCallback


def run_log(rewards, diversities) -> list[dict[str, float]]:
    pairs = zip(rewards, diversities, strict=True)
    return [{"step": step, "reward": reward, "diversity": spread} for step, (reward, spread) in enumerate(pairs, 1)]


def test_a_collapse_is_named_and_a_healthy_run_is_not() -> None:
    rng, share = np.random.default_rng(1), np.linspace(0, 1, 40)
    jitter = 0.03 * rng.standard_normal(40)
    rising, falling = 0.4 + 0.4 * share + jitter, 0.2 * (1 - 0.9 * share) + jitter / 10
    warning = find_collapse(run_log(rising, falling))
    assert warning.startswith("The trained reward rose from 0.4") and "docs/rewards/hacking.md" in warning
    demo = 0.126 - 0.056 * share  # the most alike of three runs by `make demo`: 0.126 before, 0.070 after
    assert find_collapse(run_log(0.65 + 0.24 * share + jitter, demo)) is None
    assert find_collapse(run_log(0.4 + jitter, falling)) is None  # alike, but nothing was gained by it
    assert find_collapse(run_log(rising[::-1], falling)) is None
    assert find_collapse(run_log(rising[: 2 * WINDOW - 1], falling[: 2 * WINDOW - 1])) is None  # too early to say
    assert find_collapse([{"reward": 1.0}, {"diversity": 0.0}, {"eval_reward": 1.0}] * 20) is None


def test_the_warning_comes_once_and_stands_in_the_report(tmp_path) -> None:
    class State:
        is_world_process_zero, global_step = True, 20
        log_history = run_log(np.linspace(0, 1, 20), np.linspace(0.3, 0.01, 20))

    callback = CollapseCallback()
    with pytest.warns(UserWarning, match="Update 20: The trained reward rose") as warnings:
        callback.on_log(None, State, None)
        callback.on_log(None, State, None)
    assert len(warnings) == 1
    run = read_run(make_run(tmp_path / "run"))
    assert not any("became alike" in sentence for sentence in list_findings(run))
    for number, entry in enumerate(run.train):
        entry["diversity"] = 0.3 / (1 + number)
    assert any("became alike" in sentence for sentence in list_findings(run))


def test_an_evaluation_shows_the_training_since_the_last_one() -> None:
    log = [{"diversity": 0.9}, {"eval_reward": 1.0}, {"diversity": 0.5}, {"kl": 1.0}]
    log += [{"diversity": 0.1, "frac_reward_zero_std": 1.0}]
    expected = {"rollouts/diversity": 0.3, "rollouts/frac_reward_zero_std": 1.0}
    assert summarise_rollouts(log) == pytest.approx(expected) and summarise_rollouts(log[:2]) == {}
