"""A run that has nothing to learn from says so in its first such rollout, and stops after many without a reward."""

import functools

import pytest
import torch
from tiny_runs import brightness, logged, train_and_compare, trainer_for

from diffusion_grpo.rewards import RewardError
from diffusion_grpo.rollout.score import SignalCheck

NONE = torch.full((4, 2), float("nan"))
ONE = torch.tensor([[float("nan")] * 2] * 3 + [[float("nan"), 0.5]])
USEFUL = {"frac_reward_zero_std": 0.5, "frac_advantage_zero": 0.5, "frac_advantage_clipped": 0.5, "diversity": 0.1}


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "diffusion_grpo.rollout.score"]


def test_rollouts_without_a_reward_warn_once_and_then_stop(caplog) -> None:
    check = SignalCheck(["text", "color"], most=3)
    for rewards in (NONE, NONE, ONE, NONE, NONE):
        check.add(rewards, USEFUL)
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(RewardError, match=r"\(text, color\) of the last 3 rollouts"):
        check.add(NONE, USEFUL)
    silent = SignalCheck(["text"], warns=False)  # another process of the same run
    silent.add(NONE, USEFUL)
    assert len(caplog.records) == 1 and silent.in_a_row == 1


def test_each_useless_rollout_names_what_to_change_once(caplog) -> None:
    check, rewards = SignalCheck(["text"]), torch.ones(4, 1)
    cases = [
        ({}, None),
        ({"frac_reward_zero_std": 1.0}, None),  # other groups are compared with
        ({"frac_advantage_zero": 1.0}, "reward_threshold"),
        ({"frac_advantage_zero": 1.0, "frac_reward_zero_std": 1.0}, "text: 1)"),
        ({"frac_advantage_clipped": 1.0}, "advantage_clip"),
        ({"diversity": 0.0}, "noise_level"),
    ]
    for _ in range(2):
        for changed, _ in cases:
            check.add(rewards, USEFUL | changed)
    warned = warnings_of(caplog)
    named = [name for _, name in cases if name is not None]
    assert len(warned) == len(named) and all(name in text for name, text in zip(named, warned, strict=True))


@pytest.mark.parametrize("drops", [False, True])
def test_a_run_with_equal_rewards_warns_in_its_first_rollout_and_moves_nothing(tmp_path, caplog, drops) -> None:
    settings = {"drop_zero_advantages": drops, "weight_decay": 0.0}
    trainer = trainer_for(tmp_path, rewards=lambda images, **columns: [1.0] * len(images), **settings)
    assert not train_and_compare(trainer)
    assert logged(trainer, "grad_norm") == logged(trainer, "loss") == [0.0, 0.0] and len(warnings_of(caplog)) == 1


def test_a_run_stops_with_a_checkpoint_and_no_nan_in_its_log(tmp_path, monkeypatch) -> None:
    updates = []

    def fading(images, **columns):
        updates.append(1)
        return brightness(images) if len(updates) == 1 else [None] * len(images)

    monkeypatch.setattr("diffusion_grpo.rollout.generate.SignalCheck", functools.partial(SignalCheck, most=2))
    trainer = trainer_for(tmp_path, rewards=fading, max_steps=9, overlap_rewards=False, per_device_train_batch_size=8)
    with pytest.raises(RewardError, match=r"All rewards \(fading\) of the last 2 rollouts were None"):
        trainer.train()
    values = logged(trainer, "reward")
    assert values and all(value == value for value in values) and trainer.state.global_step < 9
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()
