"""Reward hacking, seen early: diversity, what is looked at and never trained on, the warning, the report."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import brightness, logged, trainer_for

from diffusion_grpo.rewards import load_rewards, score
from diffusion_grpo.run.folder import read_run
from diffusion_grpo.run.report import findings, write_report
from diffusion_grpo.run.watch import (
    CHEAP,
    FRAMES,
    ROLLOUTS,
    SIDE,
    WINDOW,
    collapse,
    cosine_distance,
    diversity,
    embedders,
    embeddings,
    kind_of,
    since_evaluation,
    thumbnails,
    watched_rewards,
)
from diffusion_grpo.training.callbacks import CollapseCallback
from tests.run.test_report import make_run

RNG = np.random.default_rng(0)


def grey(shade: int, size=(64, 40)) -> Image.Image:
    return Image.new("RGB", size, (shade,) * 3)


def noise(size=64) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (size, size, 3), dtype=np.uint8))


def test_diversity_is_the_mean_distance_of_pairs_within_groups() -> None:
    pictures = [grey(0), grey(255), grey(51), grey(102), grey(102), grey(255)]
    groups = torch.tensor([7, 7, 3, 3, 3, 1])  # of the last nothing can be said
    expected = (1.0 + (0.2 + 0.2 + 0.0) / 3) / 2
    assert diversity(thumbnails(pictures), groups) == pytest.approx(expected, abs=1e-6)
    assert diversity(thumbnails(pictures), torch.arange(6)) is None
    vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert diversity(vectors, torch.zeros(3), cosine_distance) == pytest.approx(2 / 3)


def test_grain_is_no_diversity_but_composition_is() -> None:
    """What the eye takes for the same picture is close, whatever its pixels do."""
    grains = diversity(thumbnails([noise(512) for _ in range(4)]), torch.zeros(4))
    halves = [Image.new("RGB", (512, 512), "black"), Image.new("RGB", (512, 512), "black")]
    halves[0].paste("white", (0, 0, 256, 512))
    halves[1].paste("white", (256, 0, 512, 512))
    assert grains < 0.03 and diversity(thumbnails(halves), torch.zeros(2)) == pytest.approx(1)


def test_videos_and_what_is_neither() -> None:
    videos = [[grey(0)] * 7, [grey(0)] * 2, [grey(255)]]
    assert [kind_of(part) for part in (videos, [grey(1)], [np.zeros(5)], [torch.zeros(4, 8, 8)])] == [
        "videos",
        "images",
        None,
        None,
    ]
    points = thumbnails(videos[:2])
    assert points.shape == (2, FRAMES * SIDE * SIDE * 3) and points.dtype == torch.uint8
    moves = [[grey(0), grey(0), grey(0), grey(255)], [grey(0)] * 4]
    assert diversity(thumbnails(moves), torch.zeros(2)) == pytest.approx(math.sqrt(1 / 4))
    assert thumbnails([np.zeros(5)]) is None


def test_what_is_looked_at_fits_what_is_made_and_is_not_trained_on() -> None:
    names = [reward.name for reward in watched_rewards(["auto"], "images", load_rewards("sharpness"))]
    assert names == [name for name in CHEAP["images"] if name != "sharpness"]
    assert watched_rewards(["auto"], None, []) == [] == watched_rewards(None, "images", [])
    assert [reward.name for reward in watched_rewards(["auto", "text", "motion"], "images", [])][-2:] == [
        "text",
        "motion",
    ]
    videos = [[noise() for _ in range(3)] for _ in range(2)]
    watched = watched_rewards(["auto"], "videos", [])
    assert score(watched, videos=videos, prompts=["a", "a"]).isfinite().all()
    assert {"flicker", "motion"} < {reward.name for reward in watched}
    with pytest.raises(ValueError, match="Did you mean 'sharpness'"):
        watched_rewards(["sharpnes"], "images", [])


class Embeds:
    """A reward whose network embeds pictures: here by their mean colour."""

    def __call__(self, images, **columns):
        return brightness(images)

    def embed(self, images):
        return [np.asarray(image, dtype=float).mean((0, 1)).tolist() for image in images]


def test_rewards_that_embed_pictures() -> None:
    rewards = load_rewards([Embeds(), "brightness"])
    assert [reward.name for reward in embedders(rewards)] == ["Embeds"]
    colours = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "red")]
    points = embeddings(rewards[0], colours)
    assert diversity(points, torch.zeros(3), cosine_distance) == pytest.approx(2 / 3)
    assert torch.equal(embeddings(rewards[0], [[colours[0], colours[1]]]), points[:2].mean(0, keepdim=True))


def run_log(rewards, diversities) -> list[dict[str, float]]:
    pairs = zip(rewards, diversities, strict=True)
    return [{"step": step, "reward": reward, "diversity": spread} for step, (reward, spread) in enumerate(pairs, 1)]


def test_a_collapse_is_named_and_a_healthy_run_is_not() -> None:
    rng, share = np.random.default_rng(1), np.linspace(0, 1, 40)
    jitter = 0.03 * rng.standard_normal(40)
    rising, falling = 0.4 + 0.4 * share + jitter, 0.2 * (1 - 0.9 * share) + jitter / 10
    said = collapse(run_log(rising, falling))
    assert said.startswith("The trained reward rose from 0.4") and "docs/rewards.md" in said
    demo = 0.126 - 0.056 * share  # the most alike of three trainings by `make demo`: 0.126 before, 0.070 after
    assert collapse(run_log(0.65 + 0.24 * share + jitter, demo)) is None
    assert collapse(run_log(0.4 + jitter, falling)) is None  # alike, but nothing was gained by it
    assert collapse(run_log(rising[::-1], falling)) is None
    assert collapse(run_log(rising[: 2 * WINDOW - 1], falling[: 2 * WINDOW - 1])) is None  # too early to say
    assert collapse([{"reward": 1.0}, {"diversity": 0.0}, {"eval_reward": 1.0}] * 20) is None


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
    assert not any("became alike" in sentence for sentence in findings(run))
    for number, entry in enumerate(run.train):
        entry["diversity"] = 0.3 / (1 + number)
    assert any("became alike" in sentence for sentence in findings(run))


def test_evaluations_of_a_training_watch(tmp_path) -> None:
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
    again = trainer.run_passes(trainer.replays.divergences, trainer.feed.buffer.micro_batch(0)).mean().item()
    assert distance == pytest.approx(again) and distance > 0 and logged(trainer, "kl") == []
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0] and logged(trainer, "frac_advantage_clipped") == [0.0, 0.0]
    page = write_report(tmp_path).read_text()
    assert "Watched, never trained on" in page and "colorfulness" in page
    trainer.args.watch_rewards, trainer.args.num_generations_eval = None, 1
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert not [key for key in metrics if "watch" in key or "diversity" in key or "kl" in key]


def test_an_evaluation_shows_the_training_since_the_last_one() -> None:
    log = [{"diversity": 0.9}, {"eval_reward": 1.0}, {"diversity": 0.5}, {"kl": 1.0}]
    log += [{"diversity": 0.1, "frac_reward_zero_std": 1.0}]
    expected = {"rollouts/diversity": 0.3, "rollouts/frac_reward_zero_std": 1.0}
    assert since_evaluation(log) == pytest.approx(expected) and since_evaluation(log[:2]) == {}


def test_the_share_of_advantages_that_the_clip_cuts_off(tmp_path) -> None:
    trainer = trainer_for(tmp_path, advantage_clip=0.5, max_steps=1, num_inference_steps=3, watch_rewards=[])
    trainer.train()
    (share,) = logged(trainer, "frac_advantage_clipped")
    assert 0 < share <= 1
