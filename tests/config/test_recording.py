"""What an algorithm needs recorded, and what follows for the settings: which fit it, and which are refused."""

import pytest
from tiny_runs import RENOISED, logged, train_and_compare, trainer_for

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.base import Algorithm, PassOutput, Recording
from diffusion_grpo.algorithms.losses import dppo
from diffusion_grpo.algorithms.registry import find_recording
from diffusion_grpo.config.validate import check_token_settings

WHOLE_GROUPS = ("fdfo", "dgpo", "dpo")


def config(**settings):
    return DiffusionGRPOConfig("out", **{"use_cpu": True, "per_device_train_batch_size": 16, **settings})


# A user's own algorithm, from finished samples: regression on those that are better than their group


class BestOnly(Algorithm):
    """Denoises the samples of each group whose advantage is above `least` (reward-filtered fine-tuning)."""

    recording = Recording(keeps="clean")

    def __init__(self, *, least: float = 0.0):
        self.least = least

    def passes(self, batch):
        return batch.part_passes()

    def loss(self, policy, reference, part, step):
        found = policy.denoise(part.inputs, part.trajectory, step)
        is_better = (part.advantage(step) > self.least).double()
        return PassOutput((is_better * found.error()).sum().float(), {"own/share": is_better.mean().item()})


def test_an_algorithm_of_ones_own_trains(tmp_path):
    settings = {"loss_type": f"{__name__}.BestOnly", "loss_kwargs": {"least": 0.1}, "weight_decay": 0.0}
    trainer = trainer_for(tmp_path, **settings)
    assert train_and_compare(trainer)
    assert trainer.state.global_step == 2 and all(0 < share < 1 for share in logged(trainer, "own/share"))
    trainer = trainer_for(tmp_path / "none", **settings | {"loss_kwargs": {"least": 100.0}})
    assert not train_and_compare(trainer)  # its settings arrive


class Comparing(BestOnly):
    recording = Recording(keeps="clean", reference=True, whole_groups=True, shares_noise=True)


def test_the_settings_follow_what_a_class_of_ones_own_asks_for():
    args = config(loss_type=f"{__name__}.BestOnly", num_inference_steps=6)
    assert args.recording == Recording(keeps="clean")
    assert args.trainable_steps == range(1, 6) and not args.needs_reference
    args = config(loss_type=f"{__name__}.Comparing")
    assert args.recording is Comparing.recording and args.needs_reference
    with pytest.raises(ValueError, match="must be a multiple of num_generations"):
        config(loss_type=f"{__name__}.Comparing", per_device_train_batch_size=2)


def test_a_loss_of_a_step_asks_for_means_if_it_is_marked():
    assert find_recording("dppo").old == find_recording(f"{dppo.__module__}.dppo").old == "mean"
    assert find_recording("grpo") == Recording()


TWO = {"steps_per_generation": 64}  # updates on a rollout


@pytest.mark.parametrize(
    ("settings", "anchor"),
    [
        ({}, "own"),
        ({"old_log_prob": "replay"}, "own"),
        ({"old_log_prob": "rollout"}, "rollout"),
        (TWO, "rollout"),
        (TWO | {"old_log_prob": "replay"}, "replay"),
        (TWO | {"loss_type": "dppo"}, "replay"),
        (TWO | {"loss_type": "dppo", "old_log_prob": "rollout"}, "rollout"),
        (TWO | {"loss_type": "awm"}, "replay"),
        (TWO | {"loss_type": "nft"}, "rollout"),
        ({"loss_type": "awm"}, "own"),
    ],
)
def test_where_old_values_come_from(settings, anchor):
    assert config(**settings).anchor == anchor


# Refusals

# of each setting that means something for recorded steps alone, a value that grpo takes
RECORDED = {
    "sde_type": "cps",
    "noise_level": 0.5,
    "noisy_steps": "all",
    "log_prob_type": "squared_error",
    "epsilon": 1e-3,
    "epsilon_high": 1e-3,
    "old_log_prob": "replay",
    "importance_sampling_level": "sequence",
    "kl_reward": 0.1,
    "advantage_estimator": "gae",
}


@pytest.mark.parametrize("setting", RECORDED)
def test_settings_of_recorded_steps_are_refused(setting):
    assert RECORDED[setting] != getattr(DiffusionGRPOConfig, setting)
    config(loss_type="grpo", **{setting: RECORDED[setting]})
    for name in RENOISED:
        with pytest.raises(ValueError, match=f"{setting}=.*loss_type='{name}'"):
            config(loss_type=name, **{setting: RECORDED[setting]})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("trained_steps", [0, 4]),
        ("trained_steps", [1, 11]),
        ("num_trained_steps", 10),
        ("samples_per_latent", "group"),
        ("multi_objective_aggregation", "loss_per_reward"),
        ("loss_kwargs", {"decay": 1.0}),
    ],
)
def test_what_does_not_fit_is_refused(setting, value):
    for name in RENOISED:
        with pytest.raises(ValueError, match=setting):
            config(loss_type=name, **{setting: value})
        # the last step may be trained
        assert config(loss_type=name, trained_steps=[1, 10]).trainable_steps == range(1, 10)


@pytest.mark.parametrize(
    ("given", "batch", "accumulation"),
    [
        ({}, 16, 8),
        ({"num_generations": 4}, 4, 32),
        ({"num_generations": 2}, 4, 32),
        ({"best_of_n": 8}, 8, 16),
        ({"gradient_accumulation_steps": 2}, 16, 2),
        ({"per_device_train_batch_size": 32}, 32, 32),
    ],
)
def test_batches_hold_whole_groups_by_default(given, batch, accumulation):
    for name in WHOLE_GROUPS:
        args = DiffusionGRPOConfig("out", use_cpu=True, loss_type=name, **given)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (batch, accumulation)


@pytest.mark.parametrize("name", WHOLE_GROUPS)
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"per_device_train_batch_size": 8}, "num_generations"),
        ({"per_device_train_batch_size": 24}, "set it to 32, or best_of_n=2"),
        ({"num_generations": 1, "reward_baseline": "batch"}, "num_generations"),
        ({"per_device_train_batch_size": 3, "best_of_n": 2}, "best_of_n; set it to 4[.]"),
    ],
)
def test_groups_that_are_compared_must_be_whole(name, settings, advice):
    settings = {"num_generations": 16, "gradient_accumulation_steps": 2, **settings}
    with pytest.raises(ValueError, match=advice):
        config(loss_type=name, **settings)
    wider = settings | {"per_device_train_batch_size": 32, "num_generations": 16}
    assert config(loss_type=name, **wider).needs_reference == (name != "fdfo")
    if settings.get("per_device_train_batch_size") == 8:
        config(loss_type="nft", **settings)  # which compares none


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("step_selection", "sliding"),
        ("num_trained_steps", 2),
        ("noisy_steps", "all"),
        ("loss_type", "nft"),
        ("loss_type", f"{__name__}.BestOnly"),
        ("loss_type", "diffusion_grpo.losses.dppo"),
    ],
)
def test_tokens_have_no_denoising_steps(setting, value):
    with pytest.raises(ValueError, match=f"{setting}=.* is for denoising steps"):
        check_token_settings(config(**{setting: value}))


@pytest.mark.parametrize("epsilon", [1e-4, 0.2])
def test_a_clip_range_for_latents_is_too_small_for_tokens(epsilon, caplog):
    check_token_settings(config(epsilon=epsilon))
    assert ("Set epsilon to about 0.2" in caplog.text) == (epsilon < 0.2)
