"""Settings that have no effect because another one is off."""

import logging

import pytest
from tiny_runs import trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.idle import list_idle

GAE = ("advantage_estimator: gae", {"advantage_estimator": "gae"})
SYNC = ("sync_ref_model: true", {"sync_ref_model": True, "beta": 0.1})
CASES = [
    ({"gamma": 0.9}, *GAE),
    ({"gae_lambda": 0.9}, *GAE),
    ({"value_clip": 0.1}, *GAE),
    ({"value_learning_rate": 0.1}, *GAE),
    ({"ref_model_sync_steps": 1}, *SYNC),
    ({"ref_model_mixup_alpha": 0.5}, *SYNC),
    ({"offload_ref_model": True}, "beta above 0", {"beta": 0.1}),
    ({"ema_update_interval": 2}, "ema_decay", {"ema_decay": 0.9}),
    ({"eval_steps": 3}, "eval_strategy: steps", {"eval_strategy": "steps"}),
    ({"validation_steps": 3}, "validation_prompts", {"validation_prompts": ["a cat"]}),
]


def idle(**settings):
    return list_idle(DiffusionGRPOConfig("runs", use_cpu=True, report_to="none", **settings))


@pytest.mark.parametrize(("setting", "need", "needed"), CASES, ids=lambda value: str(value)[:40])
def test_a_setting_without_effect_names_what_it_needs(setting, need, needed):
    [name] = setting
    assert idle(**setting) == [f"{name} (needs {need})"]
    assert idle(**setting, **needed) == idle() == []


def test_ranks_are_not_clipped():
    clipped = {"advantage_clip": 2.0}
    assert idle(**clipped) == [] == idle(**clipped, loss_type="nft")
    assert idle(**clipped, loss_type="dpo", per_device_train_batch_size=16) == [
        "advantage_clip (needs an algorithm other than dpo, which only ranks samples)"
    ]


def test_a_run_warns_of_them_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, gamma=0.9, ema_update_interval=3)
    found = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert found == [
        "Settings without effect: gamma (needs advantage_estimator: gae), ema_update_interval (needs ema_decay)."
    ]
