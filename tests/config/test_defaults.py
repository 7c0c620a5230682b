"""Defaults that follow from other settings, and how prompts, samples, micro-batches and updates relate."""

import dataclasses

import pytest
from command_line import make_config

from diffusion_grpo.config.defaults import BatchSizes


def test_a_reference_is_needed_for_a_divergence_in_loss_or_reward():
    made = [make_config(**given).needs_reference for given in ({}, {"beta": 0.1}, {"kl_reward": 0.1})]
    assert made == [False, True, True]


def test_trls_names_and_defaults():
    args = make_config(gradient_checkpointing=False, epsilon=0.1)
    assert args.activation_checkpointing is False and args.upper_epsilon == 0.1 and args.bf16 is False
    assert make_config().activation_checkpointing is True and make_config(epsilon_high=0.3).upper_epsilon == 0.3


@pytest.mark.parametrize("checkpointing", [{"gradient_checkpointing": True}, {}])
def test_a_copy_takes_its_own_values_and_not_what_followed_from_others(checkpointing):
    base = make_config(**checkpointing)
    given = {"gradient_accumulation_steps": 64, "activation_checkpointing": False}
    copy = dataclasses.replace(base, epsilon=0.1, report_to="none", **given)
    assert copy.upper_epsilon == 0.1 and base.upper_epsilon == base.epsilon
    assert copy.batch_sizes.updates_per_rollout == 1 and copy.micro_batches_per_rollout == 64
    assert copy.activation_checkpointing is False and base.activation_checkpointing is True


@pytest.mark.parametrize(
    ("given", "steps", "count", "is_limited", "sharing"),
    [
        ({}, range(5), 1, True, 16),
        ({"num_inference_steps": 2}, range(1), 1, True, 16),
        ({"num_trained_steps": 2}, range(5), 2, True, 16),
        ({"trained_steps": [2, 6]}, range(2, 6), 4, True, 16),
        ({"trained_steps": [2, 6], "num_trained_steps": 1}, range(2, 6), 1, True, 16),
        ({"trained_steps": "all"}, range(9), 9, True, 16),
        ({"step_selection": "prompt"}, range(5), 1, True, 16),
        ({"samples_per_latent": 4}, range(5), 1, True, 4),
        ({"samples_per_latent": 1, "noisy_steps": "all"}, range(5), 1, False, 1),
        ({"noisy_steps": "all_and_last"}, range(5), 1, False, 16),
        # of which all steps are trained
        ({"advantage_estimator": "gae"}, range(9), 9, True, 1),
        ({"advantage_estimator": "gae", "samples_per_latent": "group"}, range(9), 9, True, 16),
        ({"loss_type": "nft"}, range(1, 10), 9, False, 1),
    ],
)
def test_one_step_of_the_first_half_is_trained_unless_something_asks_for_more(
    given, steps, count, is_limited, sharing
):
    args = make_config(**given)
    assert (args.trainable_steps, args.trained_count) == (steps, count)
    assert (args.is_noise_limited, args.latent_sharing) == (is_limited, sharing)


def test_sizes_of_a_rollout():
    args = make_config(num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=4, best_of_n=4)
    sizes = args.batch_sizes  # 16 of 32 samples are trained on
    assert (args.micro_batches_per_rollout, sizes.prompts_per_rollout, sizes.rollout_share) == (4, 4, 32)
    for alone in ({"reward_baseline": "batch"}, {"advantage_estimator": "gae"}):
        args = make_config(num_generations=1, num_batches_per_step=64, **alone)  # of two samples each
        assert args.batch_sizes.prompts_per_rollout == 128


def test_two_processes_share_a_rollout():
    """4 x 2 x 6 = 48 samples are trained, 8 of each prompt's 16: 6 prompts, 96 samples, 48 per process."""
    sizes = BatchSizes(16, 8, 4, 3, 6, 2, data_processes=2, data_process=1)  # in the order of its fields
    assert (sizes.prompts_per_rollout, sizes.samples_per_rollout, sizes.rollout_share) == (6, 96, 48)
    assert (sizes.update_share, sizes.samples_per_update) == (12, 24)
    assert (sizes.slots, sizes.updates_per_rollout) == (12, 4)
    assert sizes.consecutive_samples == 24  # of which best_of_n leaves the 12 of an update
    assert dataclasses.replace(sizes, data_processes=1).consecutive_samples == 48
    assert dataclasses.replace(sizes, best_of_n=None).trained_per_prompt == 16
