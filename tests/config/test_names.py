"""Names that go into file names and metrics, and settings that a user mistyped."""

import pytest

from diffusion_grpo.config.names import LONGEST, check_name, refuse_unknown


@pytest.mark.parametrize("name", ["text", "two words", "好", "a.b", "x" * LONGEST])
def test_names_that_fit(name):
    check_name(name, "The reward", "rename it")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (3, "The reward 3 is of type int, but it is used in file names and metrics; rename it."),
        ("", "is empty"),
        (" .. ", "consists only of dots and spaces"),
        ("a/b", "must not contain '/'"),
        ("a\\b", r"must not contain '\\\\'"),
        ("a\tb", "unprintable character"),
        ("x" * (LONGEST + 1), "takes 151 bytes, more than 150"),
    ],
)
def test_names_that_do_not(name, message):
    with pytest.raises(ValueError, match=message):
        check_name(name, "The reward", "rename it")


def test_an_unknown_setting_names_the_nearest_and_a_renamed_one_its_new_name():
    refuse_unknown({"beta": 1}, ["beta", "epsilon"])
    with pytest.raises(ValueError, match="unknown setting `epsilom`; did you mean `epsilon`"):
        refuse_unknown({"beta": 1, "epsilom": 2}, ["beta", "epsilon"])
    with pytest.raises(ValueError, match="`warmup_ratio`; write it as `warmup_steps`"):
        refuse_unknown({"warmup_ratio": 0.1}, ["warmup_steps"])
    for name in ("use_vllm", "vllm_mode"):
        with pytest.raises(ValueError, match=f"`{name}`; leave it out, the diffusers pipeline makes the samples.$"):
            refuse_unknown({name: True}, ["use_cpu", "save_only_model"])
    with pytest.raises(ValueError, match="`cast_lm_head`; `diffusion-grpo train --list-settings` lists"):
        refuse_unknown({"cast_lm_head": True}, ["beta", "epsilon"])
