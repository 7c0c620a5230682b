"""Rewards that evaluations measure and nobody trains on."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from tiny_runs import brightness, finished_run, logged, read_table, trainer_for

from diffusion_grpo.policy.drivers import UnsupportedPipeline
from diffusion_grpo.policy.rollout import DenoisingPolicy
from diffusion_grpo.report.run_folder import ROLLOUTS
from diffusion_grpo.rewards import RewardError, load_rewards, score
from diffusion_grpo.rewards.models.base import ModelReward
from diffusion_grpo.training.preflight import CHEAP, load_watched_rewards
from tests.rollout.test_score import Embeds, noise


def test_what_is_looked_at_fits_what_is_made_and_is_not_trained_on() -> None:
    names = [reward.name for reward in load_watched_rewards(["auto"], "images", load_rewards("sharpness"))]
    assert names == [name for name in CHEAP["images"] if name != "sharpness"]
    assert load_watched_rewards(["auto"], None, []) == [] == load_watched_rewards(None, "images", [])
    videos = [[noise() for _ in range(3)] for _ in range(2)]
    watched = load_watched_rewards(["auto"], "videos", [])
    assert score(watched, videos=videos, prompts=["a", "a"]).isfinite().all()
    assert {"flicker", "motion"} < {reward.name for reward in watched}
    with pytest.raises(ValueError, match="Did you mean 'sharpness'"):
        load_watched_rewards(["sharpnes"], "images", [])


def test_evaluations_of_a_run_watch(tmp_path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "num_generations_eval": 2}
    trainer = finished_run(tmp_path, rewards=["brightness", Embeds()], num_inference_steps=3, **settings)
    for name in ("sharpness", "colorfulness", "jpeg_compressibility"):
        assert len(logged(trainer, f"eval_watch/{name}/mean")) == 2
    assert logged(trainer, "eval_watch/brightness/mean") == [] and len(logged(trainer, "eval_diversity")) == 2
    assert len(logged(trainer, "eval_diversity/Embeds")) == 2 == len(logged(trainer, "diversity"))
    for name in ROLLOUTS:  # also of one sample a prompt: the training has groups
        assert logged(trainer, f"eval_rollouts/{name}") == [sum(logged(trainer, name)) / 2], name
    (distance,) = logged(trainer, "eval_kl")  # before the first rollout there is nothing to measure it at
    divergences, compared = trainer.learner.run_passes(trainer.passes.compare, trainer.loader.buffer.micro_batch(0))
    assert distance == pytest.approx(divergences.mean().item()) and distance > 0 and logged(trainer, "kl") == []
    assert logged(trainer, "eval_velocity/ratio_to_ref") == [pytest.approx(compared["velocity/ratio_to_ref"])] != [1.0]
    assert logged(trainer, "ratio/max_error") == [0.0, 0.0] and logged(trainer, "frac_advantage_clipped") == [0.0, 0.0]
    trainer.args.watch_rewards, trainer.args.num_generations_eval = None, 1
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert not [key for key in metrics if "watch" in key or "diversity" in key or "kl" in key]


PLACES = []  # where the network of `Network` went, after each time that it was loaded


@dataclasses.dataclass(eq=False)
class Network(ModelReward):
    """A reward with a network, as `watch_rewards` names it."""

    model: str = "owner/name"
    device: str | None = "cpu:0"

    def sources(self):
        return []

    def load(self):
        network, places = torch.nn.Linear(1, 1), []
        PLACES.append(places)
        network.to = lambda device: places.append(str(device)) or network
        return network

    def __call__(self, images):
        return self.in_batches(lambda network, own: brightness(own), images)


def test_a_watched_network_is_loaded_once_and_in_cpu_memory_between_its_calls(tmp_path) -> None:
    PLACES.clear()
    trainer = trainer_for(tmp_path, rewards="sharpness", watch_rewards=["auto", f"{__name__}.Network"])
    datasets = {name: Dataset.from_dict({"prompt": [name]}) for name in ("cats", "dogs")}
    found = [trainer.evaluate(datasets, metric_key_prefix="test") for _ in range(2)]
    assert found[0]["test_watch/Network/mean"] == found[0]["test_watch/brightness/mean"] > 0
    assert found[0]["test_cats_watch/Network/mean"] == found[1]["test_cats_watch/Network/mean"]
    assert PLACES == [["cpu:0", "cpu"] * 4]


def test_a_watched_reward_may_take_latents(tmp_path, monkeypatch) -> None:
    trainer = trainer_for(tmp_path, watch_rewards=["tiny_runs.latent_mean"])
    assert trainer.evaluate(metric_key_prefix="test")["test_watch/latent_mean/mean"] != 0

    def refuse(policy):
        raise UnsupportedPipeline("none here")

    monkeypatch.setattr(DenoisingPolicy, "check_latents", refuse)
    with pytest.raises(UnsupportedPipeline, match="none here"):
        trainer_for(tmp_path / "other", watch_rewards=["tiny_runs.latent_mean"])


def test_a_logged_column_stays_beside_a_watched_reward_of_its_name(tmp_path) -> None:
    def talkative(images, log_extra):
        log_extra("sharpness", list(range(len(images))))
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=talkative)
    metrics = trainer.evaluate()
    table = read_table(tmp_path, kind="evaluations")
    assert table["sharpness"] == [0, 1]
    assert sum(table["watch/sharpness"]) / 2 == pytest.approx(metrics["eval_watch/sharpness/mean"])
    trainer = trainer_for(tmp_path / "other", rewards=talkative, eval_reward_funcs="sharpness")
    with pytest.raises(RewardError, match="log_extra.'sharpness'"):
        trainer.evaluate()
