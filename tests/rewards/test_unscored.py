"""A run whose rewards are all None warns once, and stops after a number of such rollouts in a row."""

import functools
import logging

import pytest
import torch
from tiny_runs import brightness, logged, trainer_for

from diffusion_grpo.rewards import RewardError
from diffusion_grpo.rewards.unscored import MOST_IN_A_ROW, UnscoredRollouts

NONE = torch.full((4, 2), float("nan"))
ONE = torch.tensor([[float("nan")] * 2] * 3 + [[float("nan"), 0.5]])


def test_ten_in_a_row_and_one_warning(caplog) -> None:
    rollouts = UnscoredRollouts(["text", "color"], most=3)
    with caplog.at_level(logging.WARNING, "diffusion_grpo"):
        for rewards in (NONE, NONE, ONE, NONE, NONE):
            rollouts.add(rewards)
    (warned,) = [record.message for record in caplog.records]
    assert "(text, color)" in warned and "after 3 such rollouts in a row the run stops" in warned
    with pytest.raises(RewardError, match=r"\(text, color\) of the last 3 rollouts were None.*check") as refusal:
        rollouts.add(NONE)
    silent = UnscoredRollouts(["text"], is_warning=False)  # another process of the same run
    silent.add(NONE)
    assert len(caplog.records) == 1 and silent.in_a_row == 1
    assert "\n" not in str(refusal.value) and MOST_IN_A_ROW == 10


def test_a_run_stops_with_a_checkpoint_and_no_nan_in_its_log(tmp_path, monkeypatch) -> None:
    updates = []

    def fading(images, **columns):
        updates.append(1)
        return brightness(images) if len(updates) == 1 else [None] * len(images)

    monkeypatch.setattr("diffusion_grpo.training.setup.UnscoredRollouts", functools.partial(UnscoredRollouts, most=2))
    trainer = trainer_for(tmp_path, rewards=fading, max_steps=9, overlap_rewards=False, per_device_train_batch_size=8)
    with pytest.raises(RewardError, match=r"All rewards \(fading\) of the last 2 rollouts were None"):
        trainer.train()
    values = logged(trainer, "reward")
    assert values and all(value == value for value in values) and trainer.state.global_step < 9
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()
