"""An advantage function of the user's own: what is refused before it is called, and what it may not return."""

import pytest
import torch

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.advantages import apply_advantage_fn, load_advantage_fn

GROUPS, WEIGHTS, BATCHES = torch.arange(16) // 4, torch.ones(1, dtype=torch.float64), torch.zeros(16).long()


def random_rewards():
    return torch.randn(16, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def first(rewards, groups, *, weights, batches):
    rewards += 0.0  # what it is given is its own
    return rewards[:, 0] * 2


def test_none_stays_none_and_a_path_is_imported():
    assert load_advantage_fn(None) is None
    assert load_advantage_fn(f"{__name__}.first") is first and load_advantage_fn(first) is first


def test_what_no_function_scored_has_the_advantage_0_and_the_rewards_stay_as_they_were():
    rewards = random_rewards()
    rewards[5] = float("nan")
    before = rewards.clone()
    found = apply_advantage_fn(first, rewards, GROUPS, WEIGHTS, BATCHES)
    assert found[5] == 0 and torch.equal(found[:5], 2 * before[:5, 0]) and found.dtype == torch.float64
    assert torch.equal(rewards.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("path", ["no_such.ranks", "math.pi", "json.dumps"])  # the last takes other arguments
def test_what_is_no_advantage_function_is_refused_with_the_settings(path):
    with pytest.raises(ValueError, match=path):
        DiffusionGRPOConfig("out", use_cpu=True, advantage_fn=path)


WRONG = {
    "short": (lambda rewards, *_, **__: rewards[:3, 0], r"wrong.* \(16,\)"),
    "nan": (lambda rewards, *_, **__: rewards[:, 0].log(), "wrong returned nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_advantage_function_may_not_return(name):
    function, match = WRONG[name]
    function.__name__ = "wrong"
    with pytest.raises(ValueError, match=match):
        apply_advantage_fn(function, random_rewards(), GROUPS, WEIGHTS, BATCHES)
