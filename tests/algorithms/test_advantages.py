"""Advantages: the worked example, what equal rewards and missing ones come to, and every option."""

import math

import pytest
import torch

from diffusion_grpo.algorithms.advantages import best_of_n, combine, compute_advantages

NAN = float("nan")
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


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 24])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_equal_rewards_give_exactly_zero(value, size, scale_rewards, aggregation):
    columns = [[value] * size + [0.0, 1.0], [value / 3] * size + [0.0, 1.0]]
    groups = [0] * size + [1, 1]
    result = compute(
        columns,
        groups,
        [0.6, 0.4],
        scale_rewards=scale_rewards,
        multi_objective_aggregation=aggregation,
    )
    assert result.advantages[:size].eq(0).all() and result.group_std[:size].eq(0).all()
    assert result.advantages[size:].ne(0).all()
    assert result.frac_reward_zero_std == pytest.approx(size / (size + 2))


def test_rounding_is_not_a_difference_but_a_small_difference_is():
    rounded = torch.tensor([0.7]).nextafter(torch.tensor([1.0])).item()
    assert compute([[0.7, rounded, 0.7]]).advantages.eq(0).all()
    result = compute([[0.7, 0.701, 0.7]])
    torch.testing.assert_close(result.advantages, z_scores([0.0, 1.0, 0.0]), rtol=1e-4, atol=0)


def test_groups_are_known_by_number_in_any_order():
    result = compute([[1.0, 10.0, 2.0, 30.0, 6.0]], groups=[7, -1, 7, -1, 7])
    assert_close(result.advantages[[0, 2, 4]], z_scores([1.0, 2.0, 6.0]))
    assert_close(result.advantages[[1, 3]], z_scores([10.0, 30.0]))
    assert_close(result.group_std[1], torch.tensor([10.0, 30.0]).std())


def test_scales():
    rewards, groups = [1.0, 2.0, 10.0, 14.0], [0, 0, 1, 1]
    assert_close(compute([rewards], groups, scale_rewards="none").advantages, [-0.5, 0.5, -2.0, 2.0])
    batch_std = torch.tensor(rewards).std()
    assert_close(
        compute([rewards], groups, scale_rewards="batch").advantages, torch.tensor([-0.5, 0.5, -2.0, 2.0]) / batch_std
    )
    half = 0.5**0.5
    assert_close(compute([rewards], groups, scale_rewards="group").advantages, [-half, half, -half, half])


def test_sum_then_normalize_weighs_the_rewards_before_the_statistics():
    first, second = [0.0, 1.0, 2.0, 0.0], [30.0, 0.0, 10.0, 0.0]
    result = compute([first, second], weights=[1.0, 0.1])
    assert_close(result.rewards, [3.0, 1.0, 3.0, 0.0])
    assert_close(result.advantages, z_scores([3.0, 1.0, 3.0, 0.0]))


def test_normalize_then_sum_makes_the_scale_of_a_reward_immaterial():
    first, second = [0.0, 1.0, 2.0, 0.0], [30.0, 0.0, 10.0, 0.0]
    options = {"multi_objective_aggregation": "normalize_then_sum", "weights": [1.0, 0.5]}
    result = compute([first, second], **options)
    assert_close(result.advantages, z_scores(first) + 0.5 * z_scores(second))
    assert_close(result.rewards, [15.0, 1.0, 7.0, 0.0])
    assert_close(compute([first, [1000 * r for r in second]], **options).advantages, result.advantages)


def test_gdpo_tells_apart_what_the_sum_does_not():
    """The example that motivates GDPO: the same sum by different rewards, where one hardly ever varies."""
    easy, hard = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    summed = compute([easy, hard])
    assert summed.advantages.eq(0).all() and summed.frac_reward_zero_std == 1
    apart = compute([easy, hard], weights=[1.0, 2.0], multi_objective_aggregation="normalize_then_sum")
    assert apart.advantages[3] > 0 > apart.advantages[0]


def test_one_reward_needs_no_aggregation():
    orders = [compute([EXAMPLE], multi_objective_aggregation=order) for order in ORDERS]
    assert torch.equal(orders[0].advantages, orders[1].advantages)


ORDERS = ["sum_then_normalize", "normalize_then_sum"]


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
    apart = compute([first, second], multi_objective_aggregation="normalize_then_sum")
    expected = z_scores(first)
    expected[[0, 2]] += z_scores([5.0, 7.0])
    assert_close(apart.advantages, expected)


def test_what_is_missing_is_the_mean_of_the_samples_compared():
    """A judge that failed to answer says nothing about the sample."""
    judged, plain, groups = (
        [0.9, NAN, 0.7, NAN, NAN, NAN, NAN, 0.5],
        [0.0] * 4 + [0.0, 1.0, 0.0, 0.0],
        [0, 0, 0] + [1] * 5,
    )
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


def test_clip_comes_last():
    outlier = [0.0] * 63 + [1.0]
    free = compute([outlier, outlier], multi_objective_aggregation="normalize_then_sum")
    assert free.advantages.max() > 15
    clipped = compute([outlier, outlier], multi_objective_aggregation="normalize_then_sum", advantage_clip=5.0)
    assert torch.equal(clipped.advantages, free.advantages.clamp(-5, 5))


def test_results_are_float32_without_gradient_and_the_inputs_stay():
    rewards = torch.tensor([[1.0], [NAN], [3.0]])
    before = rewards.clone()
    result = compute_advantages(rewards, torch.zeros(3, dtype=torch.int64), torch.ones(1))
    assert {t.dtype for t in (result.advantages, result.rewards, result.group_std)} == {torch.float32}
    torch.testing.assert_close(rewards, before, equal_nan=True)


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


def test_best_of_n_works_on_groups_of_equals():
    kept = best_of_n(torch.zeros(6), torch.tensor([1, 2, 1, 2, 1, 2]), 2, torch.Generator())
    assert len(set(kept.tolist())) == 4 and sum(i % 2 for i in kept.tolist()) == 2


@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_best_of_n_refuses(n):
    with pytest.raises(ValueError, match=f"even, at least 2 .* 4, not {n}"):
        best_of_n(torch.zeros(9), torch.tensor([0] * 5 + [1] * 4), n, torch.Generator())


def test_min_and_product_of_known_rewards():
    rewards = torch.tensor([[0.5, 0.2], [0.9, math.nan], [math.nan, math.nan], [0.0, 1.0]])
    weights = torch.tensor([1.0, 2.0])
    least = combine(rewards, weights, "min_then_normalize")
    product = combine(rewards, weights, "product_then_normalize")
    # the missing value counts as the mean of the others, 0.6
    torch.testing.assert_close(least, torch.tensor([0.4, 0.9, math.nan, 0.0]), equal_nan=True)
    torch.testing.assert_close(product, torch.tensor([0.02, 0.9 * 0.6**2, math.nan, 0.0]), equal_nan=True)
    alone = torch.arange(4)  # nobody is compared with the second sample, so the reward is left out
    product = combine(rewards, weights, "product_then_normalize", alone)
    torch.testing.assert_close(product, torch.tensor([0.02, 0.9, math.nan, 0.0]), equal_nan=True)
    with pytest.raises(ValueError, match="one is -1; give that reward a clip"):
        combine(torch.tensor([[-1.0, 1.0]]), weights, "product_then_normalize")


@pytest.mark.parametrize("order", ["min_then_normalize", "product_then_normalize"])
def test_what_must_all_be_good_is_normalised_after_it_is_combined(order):
    rewards = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.1, 0.9], [0.6, 0.6]])
    result = compute_advantages(
        rewards, torch.zeros(4, dtype=torch.int64), torch.ones(2), multi_objective_aggregation=order
    )
    total = combine(rewards, torch.ones(2), order)
    torch.testing.assert_close(result.advantages, (total - total.mean()) / total.std())
    assert result.advantages.argmax() == 3 and result.advantages[0] < 0


@pytest.mark.parametrize("order", ["sum_then_normalize", "normalize_then_sum", "product_then_normalize"])
def test_a_missing_reward_neither_helps_nor_harms(order):
    rewards = [[0.5, 0.5, 0.5, 0.5], [0.9, 0.2, 0.6, NAN]]
    found = compute(rewards, [0, 0, 0, 0], multi_objective_aggregation=order).advantages
    assert abs(found[3]) < 1e-6 and found[:3].abs().min() > 0.05


def test_a_missing_reward_does_not_make_a_minimum_smaller_or_larger():
    rewards = [[0.5, 0.5, 0.4, 0.3], [0.9, 0.2, 0.4, NAN]]
    found = compute(rewards, [0, 0, 0, 0], multi_objective_aggregation="min_then_normalize")
    assert_close(found.rewards, [0.5, 0.2, 0.4, 0.3])


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
    def double(rewards, groups, *, weights, batches):
        return 2 * rewards[:, 0]

    rewards, batches = [1.0, 3.0, 5.0, 5.0], torch.tensor([0, 0, 1, 1])
    alone = compute([rewards], [0, 1, 2, 3], advantage_fn=double, batches=batches)
    assert_close(alone.group_std, [math.sqrt(2), math.sqrt(2), 0, 0])
    assert alone.frac_reward_zero_std == 0.5 and alone.advantages.tolist() == [2.0, 6.0, 10.0, 10.0]
    pairs = compute([rewards], [0, 1, 0, 1], advantage_fn=double)
    assert_close(pairs.group_std, torch.tensor([4.0, 2.0, 4.0, 2.0]) / math.sqrt(2))


def test_threshold_drops_groups_whatever_they_are_compared_with():
    rewards, groups = [0.0, 1.0, 4.0, 6.0], [0, 0, 1, 1]
    result = compute([rewards], groups, reward_baseline="batch", reward_threshold=0.9)
    assert_close(result.advantages, [0, 0, *((torch.tensor(rewards[2:]) - 2.75) / torch.tensor(rewards).std())])
    assert result.is_dropped.tolist() == [True, True, False, False]


def test_samples_are_ranked_before_the_clip():
    rewards = [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 55.0, 45.0]
    result = compute([rewards], scale_rewards="none", advantage_clip=5.0)
    assert_close(result.ranking, torch.tensor(rewards) - 50.0)
    assert result.advantages.abs().max() == 5.0
    kept = best_of_n(result.ranking, torch.zeros(8, dtype=torch.int64), 2, torch.Generator())
    assert sorted(kept.tolist()) == [0, 5]
