"""Advantages: the worked example, equal rewards and missing ones, every option, own functions, and GAE."""

import math

import pytest
import torch

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.algorithms.advantages import (
    apply_advantage_fn,
    best_of_n,
    combine,
    compute_advantages,
    estimate_advantages,
    load_advantage_fn,
)

NAN, ORDERS = float("nan"), ["sum_then_normalize", "normalize_then_sum"]
EXAMPLE = [3.2, 4.1, 3.8, 2.9, 4.3, 3.5, 3.0, 3.7]


def compute(columns, groups=None, weights=None, **options):
    """Compute the advantages of rewards that are given as one list per function."""
    rewards = torch.tensor(columns).T
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    weights = torch.ones(len(columns)) if weights is None else torch.tensor(weights)
    return compute_advantages(rewards, groups, weights, **options)


def z_scores(values):
    """With the unbiased standard deviation."""
    values = torch.tensor(values, dtype=torch.float64)
    return ((values - values.mean()) / values.std(correction=1)).float()


def assert_close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_worked_example_has_the_unbiased_standard_deviation():
    result = compute([EXAMPLE])
    assert_close(result.advantages, (torch.tensor(EXAMPLE) - 3.5625) / 0.50692)
    assert_close(result.group_std, torch.full((8,), 0.50692))
    assert_close(result.rewards, EXAMPLE)
    assert result.frac_reward_zero_std == 0
    assert {t.dtype for t in (result.advantages, result.rewards, result.group_std)} == {torch.float32}


@pytest.mark.parametrize(("value", "size"), [(0.0, 2), (0.1, 3), (1 / 3, 7), (-7.3, 24), (1e6, 3)])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ORDERS)
def test_equal_rewards_give_exactly_zero(value, size, scale_rewards, aggregation):
    columns = [[value] * size + [0.0, 1.0], [value / 3] * size + [0.0, 1.0]]
    groups = [0] * size + [1, 1]
    options = {"scale_rewards": scale_rewards, "multi_objective_aggregation": aggregation}
    result = compute(columns, groups, [0.6, 0.4], **options)
    assert result.advantages[:size].eq(0).all() and result.group_std[:size].eq(0).all()
    assert result.advantages[size:].ne(0).all()
    assert result.frac_reward_zero_std == pytest.approx(size / (size + 2))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_rounding_is_not_a_difference_but_a_small_difference_is(scale):
    value = torch.tensor(0.7 * scale)
    rounded = value.nextafter(2 * value).item()
    assert compute([[value.item(), rounded, value.item()]]).advantages.eq(0).all()
    result = compute([[0.7 * scale, 0.701 * scale, 0.7 * scale]])
    torch.testing.assert_close(result.advantages, z_scores([0.0, 1.0, 0.0]), rtol=0.02, atol=0)


def test_groups_are_known_by_number_in_any_order():
    result = compute([[1.0, 10.0, 2.0, 30.0, 6.0]], groups=[7, -1, 7, -1, 7])
    assert_close(result.advantages[[0, 2, 4]], z_scores([1.0, 2.0, 6.0]))
    assert_close(result.advantages[[1, 3]], z_scores([10.0, 30.0]))
    assert_close(result.group_std[1], torch.tensor([10.0, 30.0]).std())


def test_scales():
    rewards, groups = [1.0, 2.0, 10.0, 14.0], [0, 0, 1, 1]
    assert_close(compute([rewards], groups, scale_rewards="none").advantages, [-0.5, 0.5, -2.0, 2.0])
    batch_std = torch.tensor(rewards).std()
    found = compute([rewards], groups, scale_rewards="batch").advantages
    assert_close(found, torch.tensor([-0.5, 0.5, -2.0, 2.0]) / batch_std)
    half = 0.5**0.5
    assert_close(compute([rewards], groups, scale_rewards="group").advantages, [-half, half, -half, half])


def test_normalize_then_sum_makes_the_scale_of_a_reward_immaterial():
    first, second = [0.0, 1.0, 2.0, 0.0], [30.0, 0.0, 10.0, 0.0]
    options = {"multi_objective_aggregation": "normalize_then_sum", "weights": [1.0, 0.5]}
    result = compute([first, second], **options)
    assert_close(result.advantages, z_scores(first) + 0.5 * z_scores(second))
    assert_close(result.rewards, [15.0, 1.0, 7.0, 0.0])
    assert_close(compute([first, [1000 * r for r in second]], **options).advantages, result.advantages)


@pytest.mark.parametrize("aggregation", ORDERS)
def test_sample_that_no_function_scores_has_no_part(aggregation):
    result = compute([[1.0, NAN, 2.0, 6.0]], multi_objective_aggregation=aggregation)
    assert_close(result.advantages[[0, 2, 3]], z_scores([1.0, 2.0, 6.0]))
    assert result.advantages[1] == 0
    assert_close(result.rewards, [1.0, NAN, 2.0, 6.0])
    assert_close(result.group_std[1], torch.tensor([1.0, 2.0, 6.0]).std())


def test_function_that_leaves_a_sample_out_contributes_nothing_to_it():
    first, second = [1.0, 2.0, 6.0, 3.0], [5.0, NAN, 7.0, NAN]
    summed = compute([first, second])
    assert_close(summed.rewards, [6.0, 8.0, 13.0, 9.0])  # 6 is the mean of the second function
    assert_close(summed.advantages, z_scores([6.0, 8.0, 13.0, 9.0]))
    assert_close(summed.group_std, torch.tensor([6.0, 8.0, 13.0, 9.0]).std().expand(4))  # of the sum
    apart = compute([first, second], multi_objective_aggregation="normalize_then_sum")
    expected = z_scores(first)
    expected[[0, 2]] += z_scores([5.0, 7.0])
    assert_close(apart.advantages, expected)


def test_what_is_missing_is_the_mean_of_the_samples_compared():
    """A judge that failed to answer says nothing about the sample."""
    judged, groups = [0.9, NAN, 0.7, NAN, NAN, NAN, NAN, 0.5], [0] * 3 + [1] * 5
    plain = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    result = compute([judged, plain], groups, weights=[2.0, 1.0])
    assert_close(result.rewards, [1.8, 1.6, 1.4, 1.0, 1.0, 2.0, 1.0, 1.0])
    assert result.advantages[1].abs() < 1e-6 and result.advantages[3] == result.advantages[7]
    result = compute([judged, plain], groups, weights=[2.0, 1.0], reward_baseline="batch", scale_rewards="batch")
    assert_close(result.rewards, [1.8, 1.4, 1.4, 1.4, 1.4, 2.4, 1.4, 1.0])
    none = compute([[NAN] * 4, [1.0, 2.0, 3.0, NAN]])  # a function for other prompts
    assert_close(none.rewards, [1.0, 2.0, 3.0, NAN])
    assert none.advantages[3] == 0


@pytest.mark.parametrize("aggregation", ORDERS)
@pytest.mark.parametrize("column", [[NAN, NAN, NAN], [NAN, 3.0, NAN]])
def test_fewer_than_two_scores_teach_nothing(column, aggregation):
    columns = [[*column, 0.0, 1.0]]
    result = compute(columns, [0, 0, 0, 1, 1], multi_objective_aggregation=aggregation, reward_threshold=-9.0)
    assert result.advantages[:3].eq(0).all() and result.group_std[:3].eq(0).all()
    assert result.advantages[3:].ne(0).all()
    assert result.frac_reward_zero_std == 0.6


def test_threshold_drops_groups_by_their_mean_reward():
    rewards, groups = [0.0, 1.0, 0.2, 0.6, 1.0, 2.0], [0, 0, 1, 1, 2, 2]
    result = compute([rewards], groups, weights=[2.0], reward_threshold=0.9)
    assert result.advantages.ne(0).tolist() == [True, True, False, False, True, True]
    exactly = compute([rewards], groups, weights=[2.0], reward_threshold=1.0)
    assert exactly.advantages.ne(0).tolist() == [True, True, False, False, True, True]
    # whatever they are compared with
    rewards, groups = [0.0, 1.0, 4.0, 6.0], [0, 0, 1, 1]
    result = compute([rewards], groups, reward_baseline="batch", reward_threshold=0.9)
    assert_close(result.advantages, [0, 0, *((torch.tensor(rewards[2:]) - 2.75) / torch.tensor(rewards).std())])
    assert result.is_dropped.tolist() == [True, True, False, False]


def test_clip_comes_last():
    outlier = [0.0] * 63 + [1.0]
    free = compute([outlier, outlier], multi_objective_aggregation="normalize_then_sum")
    assert free.advantages.max() > 15
    clipped = compute([outlier, outlier], multi_objective_aggregation="normalize_then_sum", advantage_clip=5.0)
    assert torch.equal(clipped.advantages, free.advantages.clamp(-5, 5))


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([0, 0, 5], {}, "Group 5"),
        ([0, 0], {}, r"shapes .* not \(3, 1\), \(2,\) and \(1,\)"),
        ([0, 0, 0], {"scale_rewards": "std"}, "scale_rewards"),
        ([0, 0, 0], {"reward_baseline": "prompt"}, "reward_baseline"),
        ([0, 0, 0], {"multi_objective_aggregation": "gdpo"}, "multi_objective_aggregation"),
    ],
)
def test_refusals(groups, options, message):
    with pytest.raises(ValueError, match=message):
        compute([[1.0, 2.0, 3.0]], groups, **options)


def test_best_of_n_keeps_both_ends_of_each_group():
    advantages = torch.tensor([5.0, -1.0, 0.1, 9.0, 0.0, -3.0, 1.0, 2.0, 3.0, 4.0, 0.2, -9.0])
    groups = torch.tensor([0] * 6 + [1] * 6)
    kept = best_of_n(advantages, groups, 4, torch.Generator().manual_seed(0))
    assert sorted(kept.tolist()) == [0, 1, 3, 5, 8, 9, 10, 11]
    assert kept.dtype == torch.int64


def test_best_of_n_takes_unscored_samples_last():
    ranking = torch.tensor([1.0, NAN, 0.5, -1.0, NAN, 0.2])
    for n, expected in ((2, [0, 3]), (4, [0, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5])):
        kept = best_of_n(ranking, torch.zeros(6, dtype=torch.int64), n, torch.Generator())
        assert sorted(kept.tolist()) == expected
    # compared with the batch, all scored samples of a prompt may lie above the mean, which is the rank of no reward
    rewards, groups = [0.9, 0.8, 0.7, NAN, 0.3, 0.2, 0.1, NAN], [0, 0, 0, 0, 1, 1, 1, 1]
    ranking = compute([rewards], groups, reward_baseline="batch").ranking
    assert sorted(best_of_n(ranking, torch.tensor(groups), 2, torch.Generator()).tolist()) == [0, 2, 4, 6]


def test_best_of_n_is_shuffled_by_the_generator():
    advantages, groups = torch.randn(64), torch.arange(8).repeat_interleave(8)
    orders = [best_of_n(advantages, groups, 8, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(64)) != orders[0]


@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_best_of_n_refuses(n):
    with pytest.raises(ValueError, match=f"even, at least 2 .* 4, not {n}"):
        best_of_n(torch.zeros(9), torch.tensor([0] * 5 + [1] * 4), n, torch.Generator())


def test_min_and_product_of_known_rewards():
    rewards, weights = torch.tensor([[0.5, 0.2], [0.9, NAN], [NAN, NAN], [0.0, 0.6]]), torch.tensor([1.0, 2.0])
    # the missing value counts as the mean of the others, 0.4, where any sample is compared with this one
    for compared, second in ((None, (0.8, 0.9 * 0.4**2)), (torch.arange(4), (0.9, 0.9))):
        least, product = (combine(rewards, weights, f"{name}_then_normalize", compared) for name in ("min", "product"))
        assert_close(least, [0.4, second[0], NAN, 0.0])
        assert_close(product, [0.02, second[1], NAN, 0.0])
    for reward, weight in ((-1.0, 1.0), (0.0, -1.0)):  # the second is infinite
        with pytest.raises(ValueError, match="product_then_normalize"):
            combine(torch.tensor([[reward, 1.0]]), torch.tensor([weight, 1.0]), "product_then_normalize")


@pytest.mark.parametrize("order", ["min_then_normalize", "product_then_normalize"])
def test_what_must_all_be_good_is_normalised_after_it_is_combined(order):
    rewards = [[0.9, 0.5, 0.1, 0.6], [0.1, 0.5, 0.9, 0.6]]
    result = compute(rewards, multi_objective_aggregation=order)
    total = combine(torch.tensor(rewards).T, torch.ones(2), order)
    torch.testing.assert_close(result.advantages, (total - total.mean()) / total.std())
    assert result.advantages.argmax() == 3 and result.advantages[0] < 0


def test_a_reward_that_scored_no_sample_of_a_prompt_does_not_lower_its_total():
    rewards = [[0.9, 0.7, 0.9, 0.7], [0.8, 1.0, NAN, NAN]]
    found = compute(rewards, [0, 0, 1, 1], reward_threshold=1.5)
    assert_close(found.rewards, [1.7, 1.7, 1.8, 1.6])  # 0.9 is the mean of what it gave to others
    assert not found.is_dropped.any()
    nobody = compute([[0.9, 0.7], [NAN, NAN]], [0, 0])
    assert_close(nobody.rewards, [0.9, 0.7])


def test_advantages_of_each_reward_by_itself():
    """Where nothing is clipped their weighted sum is what normalize_then_sum gives; clipped, it need not be."""
    first, second = [0.0, 1.0, 2.0, NAN, 9.0, 9.0, 8.0, 7.0], [30.0, 0.0, 10.0, 0.0, 1.0, 2.0, 3.0, 9.0]
    groups, weights = [0, 0, 0, 0, 1, 1, 1, 1], [0.3, 2.0]
    apart = compute([first, second], groups, weights, multi_objective_aggregation="loss_per_reward")
    summed = compute([first, second], groups, weights, multi_objective_aggregation="normalize_then_sum")
    assert summed.by_reward is None and apart.by_reward.shape == (8, 2)
    assert torch.equal(apart.advantages, summed.advantages) and torch.equal(apart.rewards, summed.rewards.nan_to_num())
    assert_close(apart.by_reward @ torch.tensor(weights), summed.advantages)
    assert_close(apart.by_reward[:3, 0], z_scores([0.0, 1.0, 2.0]))
    assert apart.by_reward[3, 0] == 0
    clip = {"advantage_clip": 1.0}
    clipped = compute([first, second], groups, weights, multi_objective_aggregation="loss_per_reward", **clip)
    assert_close(clipped.by_reward, apart.by_reward.clamp(-1, 1))
    assert torch.equal(clipped.advantages, apart.advantages)
    together = compute([first, second], groups, weights, multi_objective_aggregation="normalize_then_sum", **clip)
    assert not torch.allclose(clipped.by_reward @ torch.tensor(weights), together.advantages, atol=0.1)


def test_where_no_group_has_a_second_sample_spreads_are_of_the_batch():
    rewards, batches = [1.0, 3.0, 5.0, 5.0], torch.tensor([0, 0, 1, 1])
    alone = compute([rewards], [0, 1, 2, 3], advantage_fn=double, batches=batches)
    assert_close(alone.group_std, [math.sqrt(2), math.sqrt(2), 0, 0])
    assert alone.frac_reward_zero_std == 0.5 and alone.advantages.tolist() == [2.0, 6.0, 10.0, 10.0]
    pairs = compute([rewards], [0, 1, 0, 1], advantage_fn=double)
    assert_close(pairs.group_std, torch.tensor([4.0, 2.0, 4.0, 2.0]) / math.sqrt(2))


def test_samples_are_ranked_before_the_clip():
    rewards = [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 55.0, 45.0]
    result = compute([rewards], scale_rewards="none", advantage_clip=5.0)
    assert_close(result.ranking, torch.tensor(rewards) - 50.0)
    assert result.advantages.abs().max() == 5.0
    kept = best_of_n(result.ranking, torch.zeros(8, dtype=torch.int64), 2, torch.Generator())
    assert sorted(kept.tolist()) == [0, 5]


# An advantage function of the user's own


def double(rewards, groups, *, weights, batches):
    """Twice the first reward; what it is given is its own to change."""
    for values in (rewards, groups, weights, batches):
        values.add_(1)
    return 2 * (rewards[:, 0] - 1)


def given_to_a_function(seed=0):
    rewards = torch.randn(16, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rewards, torch.arange(16) // 4, torch.ones(1, dtype=torch.float64), torch.zeros(16).long()


def test_an_advantage_function_is_imported():
    assert load_advantage_fn(None) is None
    assert load_advantage_fn(f"{__name__}.double") is double and load_advantage_fn(double) is double


def test_an_advantage_function_changes_nothing_else_and_unscored_samples_have_the_advantage_0():
    given = given_to_a_function()
    given[0][5] = NAN
    before = [values.clone() for values in given]
    found = apply_advantage_fn(double, *given)
    assert found[5] == 0 and torch.allclose(found[:5], 2 * before[0][:5, 0]) and found.dtype == torch.float64
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(given, before, strict=True))
    assert apply_advantage_fn(lambda *_, **__: [0.5] * 16, *given).eq(0.5).sum() == 15  # a list does as well


def without_weights(rewards, groups, *, batches):
    """Takes other arguments than it is given."""


@pytest.mark.parametrize("path", ["no_such.ranks", "math.pi", f"{__name__}.without_weights"])
def test_what_is_no_advantage_function_is_refused_with_the_settings(path):
    with pytest.raises(ValueError, match=path):
        DiffusionGRPOConfig("out", use_cpu=True, advantage_fn=path)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda rewards, *_, **__: rewards[:3, 0], r"\(3,\)"),
        (lambda rewards, *_, **__: rewards[:, 0].log(), "returned nan"),
    ],
)
def test_what_an_advantage_function_may_not_return(function, match):
    with pytest.raises(ValueError, match=match):
        apply_advantage_fn(function, *given_to_a_function())


# Generalized advantage estimation


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_the_discounted_sum_of_temporal_differences(gamma, lam):
    rewards, values = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    following = torch.cat([values[:, 1:], torch.zeros(7, 1)], 1)
    delta = rewards + gamma * following - values
    expected = [sum((gamma * lam) ** k * delta[:, step + k] for k in range(5 - step)) for step in range(5)]
    found = estimate_advantages(rewards, values, gamma, lam)
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-12, atol=1e-12)
