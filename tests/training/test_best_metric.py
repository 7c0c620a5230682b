"""What chooses the best checkpoint is known before the run: a typing error must not wait for the first evaluation."""

import pytest
from command_line import make_config
from tiny_runs import brightness, logged, trainer_for

from diffusion_grpo.rewards import load_rewards
from diffusion_grpo.training.best_metric import check_best_metric


def plain(images):
    return [0.0] * len(images)


def logging(images, log_metric):
    return [0.0] * len(images)


MEASURED, WATCHED = load_rewards([plain]), load_rewards(["sharpness"])


def check(metric, measured=MEASURED, datasets=(), **settings):
    given = {"eval_strategy": "steps", "metric_for_best_model": metric, "watch_rewards": ["sharpness"], **settings}
    args = make_config(**given)
    check_best_metric(args, measured, WATCHED, datasets)


@pytest.mark.parametrize(
    "metric",
    ["reward", "eval_reward", "rewards/plain/mean", "eval_watch/sharpness/std_error", "eval_kl"]
    + ["velocity/ratio_to_ref", "diversity/clip"],
)
def test_what_evaluations_log_is_taken(metric):
    check(metric)


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("eval_rewards/plane/mean", "eval_rewards/plain/mean"),
        ("watch/sharpnes/mean", "eval_watch/sharpness/mean"),
        ("eval_rewards/plain", "eval_rewards/plain/mean"),
        ("rewrd", "eval_reward"),
        ("eval_signs_reward", "eval_reward"),
    ],
)
def test_anything_else_names_the_nearest(metric, nearest):
    with pytest.raises(
        ValueError, match=f"metric_for_best_model='{metric}' is not logged by any .* did you mean '{nearest}'"
    ):
        check(metric)


def test_several_datasets_have_metrics_of_their_own():
    check("eval_signs_reward", datasets=("signs", "lamps"))
    check("eval_signs_rewards/plain/mean", datasets=("signs", "lamps"))
    with pytest.raises(ValueError, match="did you mean 'eval_signs_reward'"):
        check("eval_sign_reward", datasets=("signs", "lamps"))


@pytest.mark.parametrize("reward", [logging, brightness], ids=["log_metric", "keywords"])
def test_rewards_may_log_any_other_name(reward):
    check("score", load_rewards([reward]))
    with pytest.raises(ValueError, match="is not logged by any evaluation"):
        check("eval_rewards/another/mean", load_rewards([reward]))
    with pytest.raises(ValueError, match="'eval_loss' is not logged by any evaluation"):
        check("eval_loss", load_rewards([reward]))


def test_a_reward_that_takes_any_column_does_not_hide_a_misspelling():
    rewards = load_rewards([brightness])
    with pytest.raises(ValueError, match="did you mean 'eval_rewards/brightness/mean'"):
        check("eval_rewards/brightnes/mean", rewards)
    with pytest.raises(ValueError, match="did you mean 'eval_reward'"):
        check("eval_rewar", rewards)
    check("eval_rewar", load_rewards([logging]))  # it may log a metric of this name


def test_the_kind_of_samples_decides_what_auto_watches():
    check("eval_watch/motion/mean", watch_rewards=["auto"])


def test_without_evaluations_it_has_no_use():
    check("anything", eval_strategy="no")


def test_all_that_a_run_logs_is_known(tmp_path):
    """Each metric of an evaluation may be chosen."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "num_generations_eval": 2}
    trainer = trainer_for(tmp_path, rewards=[plain], watch_rewards=["sharpness"], **settings)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "eval_reward" in entry)
    assert logged(trainer, "eval_watch/sharpness/mean")
    for metric in entry.keys() - {"epoch", "step"}:
        check(metric)
