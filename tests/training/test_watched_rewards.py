"""Rewards that evaluations measure and nobody trains on."""

import pytest
from tiny_runs import logged, trainer_for

from diffusion_grpo.rewards import load_rewards, score
from diffusion_grpo.run.report import write_report
from diffusion_grpo.run.watch import ROLLOUTS
from diffusion_grpo.training.watched_rewards import CHEAP, load_watched_rewards
from tests.rollout.test_diversity import Embeds, noise


def test_what_is_looked_at_fits_what_is_made_and_is_not_trained_on() -> None:
    names = [reward.name for reward in load_watched_rewards(["auto"], "images", load_rewards("sharpness"))]
    assert names == [name for name in CHEAP["images"] if name != "sharpness"]
    assert load_watched_rewards(["auto"], None, []) == [] == load_watched_rewards(None, "images", [])
    assert [reward.name for reward in load_watched_rewards(["auto", "text", "motion"], "images", [])][-2:] == [
        "text",
        "motion",
    ]
    videos = [[noise() for _ in range(3)] for _ in range(2)]
    watched = load_watched_rewards(["auto"], "videos", [])
    assert score(watched, videos=videos, prompts=["a", "a"]).isfinite().all()
    assert {"flicker", "motion"} < {reward.name for reward in watched}
    with pytest.raises(ValueError, match="Did you mean 'sharpness'"):
        load_watched_rewards(["sharpnes"], "images", [])


def test_evaluations_of_a_run_watch(tmp_path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "num_generations_eval": 2}
    trainer = trainer_for(tmp_path, rewards=["brightness", Embeds()], num_inference_steps=3, **settings)
    trainer.train()
    for name in ("sharpness", "colorfulness", "jpeg_compressibility"):
        assert len(logged(trainer, f"eval_watch/{name}/mean")) == 2
    assert logged(trainer, "eval_watch/brightness/mean") == [] and len(logged(trainer, "eval_diversity")) == 2
    assert len(logged(trainer, "eval_diversity/Embeds")) == 2 == len(logged(trainer, "diversity"))
    for name in ROLLOUTS:  # also of one sample a prompt: the training has groups
        assert logged(trainer, f"eval_rollouts/{name}") == [sum(logged(trainer, name)) / 2], name
    (distance,) = logged(trainer, "eval_kl")  # before the first rollout there is nothing to measure it at
    again = trainer.learner.run_passes(trainer.replays.divergences, trainer.feed.buffer.micro_batch(0)).mean().item()
    assert distance == pytest.approx(again) and distance > 0 and logged(trainer, "kl") == []
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0] and logged(trainer, "frac_advantage_clipped") == [0.0, 0.0]
    page = write_report(tmp_path).read_text()
    assert "Watched, never trained on" in page and "colorfulness" in page
    trainer.args.watch_rewards, trainer.args.num_generations_eval = None, 1
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert not [key for key in metrics if "watch" in key or "diversity" in key or "kl" in key]
