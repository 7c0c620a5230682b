"""Names that go into file names and metrics, and settings that a user mistyped."""

import pytest

from diffusion_grpo.config.fields import OF_TRANSFORMERS, own_fields
from diffusion_grpo.config.names import ADVICE, LONGEST, OURS, check_name, refuse_unknown

KNOWN = [*own_fields(), *OF_TRANSFORMERS]


@pytest.mark.parametrize("name", [3, "", " .. ", "a/b", "a\\b", "a\tb", "x" * (LONGEST + 1)])
def test_names_that_become_file_names(name):
    for fine in ("two words", "好", "a.b", "x" * LONGEST):
        check_name(fine, "The reward", "rename it")
    with pytest.raises(ValueError, match="The reward .*rename it"):
        check_name(name, "The reward", "rename it")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("epsilom", "epsilon"),  # the nearest
        ("sample.num_steps", "num_inference_steps"),
        ("rollout.only", "diffusion-grpo sample"),
        ("rl_dataset_type", "leave it out"),
        ("reward.grpo.kl_coef", "beta"),
        ("batch_size", "per_device_train_batch_size"),
        ("logging_dir", "TENSORBOARD_LOGGING_DIR"),
        ("cast_lm_head", "list-settings"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_is_meant(name, expected):
    refuse_unknown({"beta": 1}, KNOWN)
    with pytest.raises(ValueError, match=f"`{name}`; .*{expected}"):
        refuse_unknown({"beta": 1, name: 2}, KNOWN)


def test_a_section_of_another_file_is_answered_by_its_settings():
    with pytest.raises(ValueError, match="`sample.num_steps`; use `num_inference_steps`"):
        refuse_unknown({"sample": {"num_steps": 10}}, KNOWN)
    with pytest.raises(ValueError, match="`reward.grpo.kl_coef`; use `beta`"):
        refuse_unknown({"reward": {"grpo": {"kl_coef": 0.05}}}, KNOWN)


def test_the_tables_name_settings_that_there_are():
    assert set(OURS.values()) <= set(KNOWN)
    assert not set(KNOWN) & (OURS.keys() | ADVICE.keys())
