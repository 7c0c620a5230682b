"""Defaults that follow from other settings."""

import dataclasses

import pytest
from command_line import make_config


def test_a_reference_is_needed_for_a_divergence_in_loss_or_reward():
    assert [make_config(**given).needs_reference for given in ({}, {"beta": 0.1}, {"kl_reward": 0.1})] == [
        False,
        True,
        True,
    ]


def test_trls_names_and_defaults():
    args = make_config(gradient_checkpointing=False, epsilon=0.1)
    assert args.activation_checkpointing is False and args.upper_epsilon == 0.1 and args.bf16 is False
    assert make_config().activation_checkpointing is True and make_config(epsilon_high=0.3).upper_epsilon == 0.3


@pytest.mark.parametrize("checkpointing", [{"gradient_checkpointing": True}, {}])
def test_a_copy_takes_its_own_values_and_not_what_followed_from_others(checkpointing):
    base = make_config(**checkpointing)
    copy = dataclasses.replace(
        base, epsilon=0.1, gradient_accumulation_steps=64, activation_checkpointing=False, report_to="none"
    )
    assert copy.upper_epsilon == 0.1 and base.upper_epsilon == base.epsilon
    assert copy.batch_sizes.updates_per_rollout == 1 and copy.micro_batches_per_rollout == 64
    assert copy.activation_checkpointing is False and base.activation_checkpointing is True


def test_json_for_dictionaries_as_the_command_line_gives_them():
    assert make_config(pipeline_kwargs='{"max_sequence_length": 1}').pipeline_kwargs == {"max_sequence_length": 1}


@pytest.mark.parametrize(
    ("given", "window", "size", "is_silent", "is_shared"),
    [
        ({}, (0, 5), 1, True, True),
        ({"num_inference_steps": 3}, (0, 1), 1, True, True),
        ({"num_inference_steps": 2}, (0, 1), 1, True, True),
        ({"sde_window_size": 2}, (0, 5), 2, True, True),
        ({"sde_window": [2, 6]}, (2, 6), 4, True, True),
        ({"sde_window": [2, 6], "sde_window_size": 1}, (2, 6), 1, True, True),
        ({"sde_window_order": "per_prompt"}, (0, 5), 1, True, True),
        ({"branches": 4}, (0, 5), 1, True, False),
        ({"same_initial_noise": False, "deterministic_outside_window": False}, (0, 5), 1, False, False),
        # settings that choose among all steps, or need all of them
        ({"timestep_fraction": 0.6}, (0, 9), 9, True, True),
        ({"permute_steps": True}, (0, 9), 9, True, True),
        ({"noise_in_last_step": True}, (0, 9), 9, False, True),
        ({"advantage_estimator": "gae"}, (0, 9), 9, True, False),
        ({"loss_type": "nft"}, (1, 10), 9, False, False),
    ],
)
def test_one_step_of_the_first_half_is_trained_unless_something_asks_for_more(
    given, window, size, is_silent, is_shared
):
    args = make_config(**given)
    assert (args.window, args.window_size) == (window, size)
    assert (args.silent_outside_window, args.shares_initial_noise) == (is_silent, is_shared)
