"""How different the samples of a prompt are, and a run that has nothing to learn from."""

import functools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import brightness, logged, train_and_compare, trainer_for

from diffusion_grpo.media.samples import kind_of
from diffusion_grpo.rewards import RewardError, load_rewards
from diffusion_grpo.rollout.score import (
    FRAMES,
    SIDE,
    SignalCheck,
    batch_groups,
    cosine_distance,
    embed_samples,
    find_embedders,
    make_thumbnails,
    measure_diversity,
)

RNG = np.random.default_rng(0)


def grey(shade: int, size=(64, 40)) -> Image.Image:
    return Image.new("RGB", size, (shade,) * 3)


def noise(size=64) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (size, size, 3), dtype=np.uint8))


def test_diversity_is_the_mean_distance_of_pairs_within_groups() -> None:
    images = [grey(0), grey(255), grey(51), grey(102), grey(102), grey(255)]
    groups = torch.tensor([7, 7, 3, 3, 3, 1])  # of the last nothing can be said
    expected = (1.0 + (0.2 + 0.2 + 0.0) / 3) / 2
    assert measure_diversity(make_thumbnails(images), groups) == pytest.approx(expected, abs=1e-6)
    assert measure_diversity(make_thumbnails(images), torch.arange(6)) is None
    vectors = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert measure_diversity(vectors, torch.zeros(3), cosine_distance) == pytest.approx(2 / 3)


def test_grain_is_no_diversity_but_composition_is() -> None:
    """What the eye takes for the same image is close, whatever its pixels do."""
    grains = measure_diversity(make_thumbnails([noise(512) for _ in range(4)]), torch.zeros(4))
    halves = [Image.new("RGB", (512, 512), "black"), Image.new("RGB", (512, 512), "black")]
    halves[0].paste("white", (0, 0, 256, 512))
    halves[1].paste("white", (256, 0, 512, 512))
    assert grains < 0.03 and measure_diversity(make_thumbnails(halves), torch.zeros(2)) == pytest.approx(1)


def test_videos_and_what_is_neither() -> None:
    videos = [[grey(0)] * 7, [grey(0)] * 2, [grey(255)]]
    assert [kind_of(part) for part in (videos, [grey(1)], [np.zeros(5)], [torch.zeros(4, 8, 8)])] == [
        "videos",
        "images",
        None,
        None,
    ]
    points = make_thumbnails(videos[:2])
    assert points.shape == (2, FRAMES * SIDE * SIDE * 3) and points.dtype == torch.uint8
    assert make_thumbnails([[grey(0), grey(255)]]).view(FRAMES, -1)[:, 0].tolist() == [0, 255, 255, 255]
    moves = [[grey(0), grey(0), grey(0), grey(255)], [grey(0)] * 4]
    assert measure_diversity(make_thumbnails(moves), torch.zeros(2)) == pytest.approx(math.sqrt(1 / 4))
    assert make_thumbnails([np.zeros(5)]) is None and make_thumbnails(videos[2]).shape == (1, SIDE * SIDE * 3)


class Embeds:
    """A reward whose network embeds images: here by their mean colour."""

    def __call__(self, images, **columns):
        return brightness(images)

    def embed(self, images):
        return [np.asarray(image, dtype=float).mean((0, 1)).tolist() for image in images]


def test_rewards_that_embed_images() -> None:
    rewards = load_rewards([Embeds(), "brightness"])
    assert [reward.name for reward in find_embedders(rewards)] == ["Embeds"]
    colours = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "red")]
    points = embed_samples(rewards[0], colours)
    assert measure_diversity(points, torch.zeros(3), cosine_distance) == pytest.approx(2 / 3)
    assert torch.equal(embed_samples(rewards[0], [[colours[0], colours[1]]]), points[:2].mean(0, keepdim=True))


def test_samples_that_are_scored_in_parts_stay_with_their_group() -> None:
    assert batch_groups([0, 0, 1, 1, 2, 2], batch_size=4) == [[0, 1, 2, 3], [4, 5]]
    assert batch_groups([7, 3, 7, 3, 3], batch_size=2) == [[0, 2], [1, 3, 4]]  # a group that is larger


# A run that has nothing to learn from says so in its first such rollout, and stops after many without a reward


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
