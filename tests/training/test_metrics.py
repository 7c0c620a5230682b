"""What is measured between two lines of the log."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_runs import finished_run, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.rollout import runtime
from diffusion_grpo.rollout.runtime import TOTALS


@pytest.mark.parametrize(
    "settings",
    [{"old_log_prob": "replay"}, {"importance_sampling_level": "sequence"}, {"loss_type": "awm"}],
    ids=lambda settings: next(iter(settings.values())),
)
def test_every_pass_of_the_network_is_in_one_stage(tmp_path, monkeypatch, settings):
    """By a clock that each pass moves by a second; the rest takes no time."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(runtime, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    short = {"gradient_accumulation_steps": 1, "num_inference_steps": 3, "num_iterations": 2, "max_steps": 3}
    trainer = trainer_for(tmp_path, **short, **settings)
    seconds = []

    def tick(module, args):
        clock.now += 1

    class Updates(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seconds.append(-clock.now)

        def on_step_end(self, args, state, control, **kwargs):
            seconds[-1] += clock.now

    trainer.pipe.transformer.register_forward_pre_hook(tick)
    trainer.add_callback(Updates())
    trainer.train()
    logged = [sum(entry[name] for name in TOTALS) for entry in trainer.state.log_history if TOTALS[0] in entry]
    assert logged == pytest.approx(seconds) and min(seconds) > 0


def test_an_evaluation_adds_nothing_to_the_log_of_training(tmp_path):
    """It compares the average with the reference, and the next update's log would show that as the policy's."""
    settings = {"gradient_accumulation_steps": 1, "num_inference_steps": 3, "max_steps": 2}
    settings |= {"ema_decay": 0.9, "ema_update_interval": 1}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1}
    plain, watched = (trainer_for(tmp_path / str(n), **settings, **more) for n, more in enumerate(({}, evaluated)))
    plain.train()
    watched.train()
    names = [[entry.keys() for entry in trainer.state.log_history if "loss" in entry] for trainer in (plain, watched)]
    assert names[0] == names[1] and "velocity/ratio_to_ref" not in names[0][-1]
    assert [entry["eval_kl"] for entry in watched.state.log_history if "eval_kl" in entry][-1] > 0


ALWAYS = {"loss", "grad_norm", "learning_rate", "loss/policy", "reward", "reward_std", "frac_reward_zero_std"}
ALWAYS |= {f"spread/{name}" for name in ("reward_min", "reward_max", "reward_std")}
ALWAYS |= {f"spread/{name}" for name in ("advantage_mean", "advantage_min", "advantage_max", "advantage_std")}
ALWAYS |= {"frac_advantage_zero", "frac_advantage_clipped"}
ALWAYS |= {"rewards/brightness/mean", "rewards/brightness/std", "diversity", *TOTALS}
ALWAYS |= {"samples_per_second", "memory/peak_gib"}
WITH_REFERENCE = {"loss/kl", "kl", "velocity/ratio_to_ref"}  # with beta above 0
RATIO, CLIPPED = {"ratio/mean", "ratio/min", "ratio/max"}, {f"clip_ratio/{x}_mean" for x in ("low", "high", "region")}
RENOISED = {"denoising_error", "old/distance", "prediction/max_error"}
OF_ALGORITHM = {
    "grpo": RATIO | CLIPPED | {"ratio/max_error"},
    "grpo_guard": RATIO | CLIPPED | {"ratio/max_error", "kl/old"},
    "dppo": RATIO | CLIPPED | {"ratio/max_error", "kl/old"},
    "nft": RENOISED,
    "awm": RENOISED | RATIO | {"loss/ema"},
    "dgpo": RENOISED | RATIO | {"dgpo/gate", "clip_ratio/region_mean"},
    "dpo": {"denoising_error", "dpo/accuracy"},  # no old policy
}


@pytest.mark.parametrize("loss", OF_ALGORITHM)
def test_what_every_algorithm_logs(tmp_path, loss):
    """Neither more nor less than docs/metrics.md says, and the terms of the loss add up to it."""
    settings = {"gradient_accumulation_steps": 1, "num_inference_steps": 4, "max_steps": 2, "learning_rate": 3e-3}
    trainer = finished_run(tmp_path, **settings, loss_type=loss, beta=0.5)
    first, second = trainer.state.log_history[:2]
    steps = (0, 1, 2) if loss in ("grpo", "grpo_guard", "dppo") else (1, 2, 3)
    sizes = {f"grad_size/step_{step:02d}" for step in steps}
    expected = ALWAYS | WITH_REFERENCE | OF_ALGORITHM[loss] | sizes
    expected -= {"frac_advantage_clipped"} if loss == "dpo" else set()  # it only ranks, and nothing is clipped
    assert first.keys() - {"step", "epoch"} == expected
    assert expected - second.keys() <= {"prediction/max_error"}  # of an old policy that has moved
    for entry in (first, second):
        assert np.isfinite([entry[name] for name in expected & entry.keys()]).all()
        terms = [value for name, value in entry.items() if name.startswith("loss/")]
        assert entry["loss"] == pytest.approx(sum(terms), rel=1e-3, abs=2e-7)  # the log rounds the loss
        assert min(entry[name] for name in sizes) > 0 < entry["memory/peak_gib"]
        assert entry["spread/reward_min"] <= entry["reward"] <= entry["spread/reward_max"]
        assert entry["spread/advantage_min"] < entry["spread/advantage_mean"] < entry["spread/advantage_max"]
        assert min(entry["spread/reward_std"], entry["spread/advantage_std"]) > 0
    assert (first["loss/kl"], first["kl"], first["velocity/ratio_to_ref"]) == (0.0, 0.0, 1.0)
    assert second["loss/kl"] == pytest.approx(0.5 * second["kl"]) and second["kl"] > 0
    assert second["velocity/ratio_to_ref"] != 1.0
    if RATIO <= expected:
        assert first["ratio/min"] == first["ratio/max"] == 1.0
        assert second["ratio/min"] <= second["ratio/mean"] <= second["ratio/max"]
    if loss == "awm":
        assert first["loss/ema"] == 0.0 < second["loss/ema"]
        assert second["loss/ema"] == pytest.approx(second["old/distance"])  # ema_beta is 1
