"""Defaults that follow from other settings."""

from command_line import make_config


def test_a_reference_is_needed_for_a_divergence_in_loss_or_reward():
    assert [make_config(**given).needs_reference for given in ({}, {"beta": 0.1}, {"kl_reward": 0.1})] == [
        False,
        True,
        True,
    ]


def test_trls_names_and_defaults():
    args = make_config(gradient_checkpointing=False, epsilon=0.1)
    assert args.activation_checkpointing is False and args.epsilon_high == 0.1 and args.bf16 is False
    assert make_config().activation_checkpointing is True and make_config().window == (0, 9)


def test_json_for_dictionaries_as_the_command_line_gives_them():
    assert make_config(pipeline_kwargs='{"max_sequence_length": 1}').pipeline_kwargs == {"max_sequence_length": 1}
