"""What a user may write as `reward_funcs`, and what is refused before a model is loaded."""

import math

import pytest
import torch
from own_rewards import scaled
from plain_images import FOUR, FOUR_PROMPTS

from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    load_rewards,
    reward_weights,
    score,
)


@pytest.mark.parametrize(
    "written",
    [
        {"brightness": 0.6, scaled: {"factor": 2.0, "weight": 0.4}},
        [{"brightness": 0.6}, {scaled: {"factor": 2.0, "weight": 0.4}}],
        [{"brightness": {"weight": 0.6}, "own_rewards.scaled": {"factor": 2, "weight": 0.4}}],
    ],
    ids=["mapping", "list", "dotted"],
)
def test_forms_of_the_same_two_rewards(written) -> None:
    rewards = load_rewards(written)
    assert [reward.name for reward in rewards] == ["brightness", "scaled"]
    assert reward_weights(rewards, None) == [0.6, 0.4]
    table = score(rewards, images=FOUR, prompts=FOUR_PROMPTS)
    torch.testing.assert_close(table, torch.tensor([[0, 0], [0.2, 0.4], [0.4, 0.8], [1, 2.0]]))


def test_plain_forms() -> None:
    assert load_rewards(None) == [] and load_rewards([]) == []
    assert load_rewards("brightness")[0].function is REWARDS["brightness"]
    assert [reward.name for reward in load_rewards(["brightness", scaled])] == ["brightness", "scaled"]
    assert load_rewards({"brightness": None})[0].weight is None
    reward = Reward(scaled, "mine", {"factor": 2.0})
    assert load_rewards([reward]) == [reward]


def test_a_class_is_made_with_its_arguments() -> None:
    (reward,) = load_rewards({"own_rewards.Scorer": {"model": "some/model", "size": 5, "weight": 2}})
    assert (reward.name, reward.weight, reward.function.model) == ("Scorer", 2, "some/model")
    assert reward.options() == {"model": "some/model", "size": 5}
    assert score([reward], images=FOUR, prompts=FOUR_PROMPTS).tolist() == [[5.0]] * 4


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"brightness": {"wieght": 1}}, "no argument 'wieght'.*Did you mean 'weight'"),
        ({"ssim": {"target_colum": "x"}}, "no argument 'target_colum'; it has target_column, name, weight"),
        ({"ssim": {"target_column": 3}}, "target_column=3; expected str"),
        ({scaled: {"factor": "two"}}, "factor='two'; expected float"),
        ({scaled: {"images": []}}, "no argument 'images'"),
        ({"remote": {"url": "http://a", "columns": "word"}}, "columns='word'; expected list"),
        ({"brigthness": 1}, "Did you mean 'brightness'"),
        ({"brightness": "high"}, "'brightness' has 'high'; give its weight"),
        ({"brightness": True}, "give its weight"),
        ([["brightness", 1]], "in a list"),
        (["brightness", "brightness"], "two rewards called 'brightness'"),
        ({"brightness": {"name": "reward"}}, "'reward' is a column of every table of samples"),
        ({"brightness": {"name": "a/b"}}, "'a/b' is used in file names"),
        ({"brightness": {"clip": [1, 0]}}, "low must be below high"),
        ({"brightness": {"clip": 1}}, "two numbers"),
        ({"brightness": {"std": 0}}, "above 0"),
        ({"brightness": {"mean": math.nan}}, "finite"),
        ({"brightness": {"frames": 0}}, "1 or more, or 'all'"),
        ({"motion": {"frames": 1}}, "has frames=1, but gets whole videos"),
        ({"own_rewards.Scorer": {"size": 3}}, "needs the argument 'model'"),
        ({"own_rewards.Scorer": {"model": "m", "size": 0.5}}, "size=0.5; expected int"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:60],
)
def test_what_is_wrong_is_refused(written, message) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        load_rewards(written)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["two words", "<lambda>", "Schärfe", "好"])
def test_names_of_other_scripts_stay(name) -> None:
    assert load_rewards({"brightness": {"name": name}})[0].name == name


def test_the_same_reward_twice_under_two_names() -> None:
    rewards = load_rewards([{scaled: {"factor": 2.0}}, {scaled: {"name": "half", "factor": 0.5}}])
    table = score(rewards, images=FOUR[-1:], prompts=["a"])
    assert [reward.name for reward in rewards] == ["scaled", "half"] and table.tolist() == [[2.0, 0.5]]
