"""Preferences within a group against the papers' formulas: DGPO's gate and clip, online DPO's pairs."""

import pytest
import torch
from renoised_parts import changed, gradient, problem, squares
from torch.testing import assert_close

from diffusion_grpo.algorithms.dgpo import DGPO, DPO

GROUPS = {"together": [5, 5, 5, 6, 6, 6], "interleaved": [5, 6, 5, 6, 6, 5]}


def excess(given):
    return squares(given, given.clean) - squares(given, given.reference.clean)


def reference_dgpo(given, groups, preference_beta=100.0, clip=1e-2):
    """(samples,) gate A d, a group at a time; where the clip holds, d without gradient."""
    error, old = squares(given, given.clean), squares(given, given.old)
    losses = list(torch.zeros(len(groups), dtype=torch.float64))
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        score = sum(given.advantages[index] * excess(given)[index].detach() for index in members)
        gate = 1 / (1 + torch.exp(-preference_beta / len(members) * score))
        for index in members:
            advantage, ratio = given.advantages[index], torch.exp(old[index] - error[index]).item()
            has_left = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
            losses[index] = gate * advantage * (error[index].detach() if has_left else error[index])
    return torch.stack(losses)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sigma_by_element", [False, True])
@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_loss_and_gradient_of_dgpo(is_masked, sigma_by_element, has_old, groups):
    given = problem(is_masked=is_masked, sigma_by_element=sigma_by_element, has_old=has_old, has_weights=True)
    part = changed(given, groups=torch.tensor(GROUPS[groups]))
    out = DGPO(preference_beta=3.0).loss(given.policy, given.reference, part, 3)
    losses = reference_dgpo(given, GROUPS[groups], 3.0)
    expected = (given.weights * losses).sum()
    assert_close(out.loss, expected)
    assert_close(gradient(out.loss, given), gradient(expected, given))
    assert 0.05 < out.metrics["dgpo/gate"] < 0.95
    still = gradient(losses.sum(), given).flatten(1).abs().sum(1) == 0
    assert out.metrics["clip_ratio/region_mean"] == pytest.approx(still.double().mean().item())
    assert (0 < still.sum() < 6) == has_old


def test_samples_of_advantage_0_are_not_held_by_dgpos_clip():
    """They have no gradient whatever their ratio is."""
    given = problem(has_old=True, advantages=[0.0, 0.0, 0.0, 1.0, 0.0, -1.0])
    ratio = torch.exp(squares(given, given.old) - squares(given, given.clean)).detach()
    assert (ratio[:3] < 0.99).any()
    metrics = DGPO().loss(given.policy, given.reference, given.part, 3).metrics
    held = [ratio[3].item() > 1.01, ratio[5].item() < 0.99]
    assert metrics["clip_ratio/region_mean"] == pytest.approx(sum(held) / 6)
    found = [metrics[f"ratio/{name}"] for name in ("mean", "min", "max")]
    assert found == pytest.approx([ratio.mean().item(), ratio.min().item(), ratio.max().item()])


def test_the_gate_opens_where_the_better_are_denoised_worse():
    """It is a half at the reference, and has no gradient of its own."""
    given = problem(count=2, group_size=2, advantages=[1.0, -1.0])
    given.reference.clean = given.clean.detach()
    gates = [DGPO().loss(given.policy, given.reference, given.part, 3).metrics["dgpo/gate"]]
    for nearer, farther in ((0, 1), (1, 0)):  # which of the two the reference takes for nearer to the sample
        guess = given.clean.detach().clone()
        guess[nearer] += 0.1 * (given.target - guess)[nearer]
        guess[farther] -= 0.1 * (given.target - guess)[farther]
        given.reference.clean = guess
        gates.append(DGPO().loss(given.policy, given.reference, given.part, 3).metrics["dgpo/gate"])
    assert gates[0] == 0.5 and gates[1] > 0.5 > gates[2]


def reference_dpo(given, groups, preference_beta):
    """The sum over groups of -log sigmoid(-beta / 2 (D_best - D_worst)), times the samples of each."""
    total, pairs = 0.0, []
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        order = sorted(members, key=lambda index: given.advantages[index].item())
        difference = excess(given)[order[-1]] - excess(given)[order[0]]
        weight = given.weights[order[-1]] * len(members)
        total = total - weight * torch.log(1 / (1 + torch.exp(preference_beta / 2 * difference)))
        pairs.append(1.0 if difference < 0 else 0.0)
    return total, sum(pairs) / len(pairs)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sigma_by_element", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("has_weights", [False, True])
def test_loss_and_gradient_of_dpo(is_masked, sigma_by_element, groups, has_weights):
    given = problem(is_masked=is_masked, sigma_by_element=sigma_by_element, has_weights=has_weights)
    part = changed(given, groups=torch.tensor(GROUPS[groups]))
    out = DPO(preference_beta=4.0).loss(given.policy, given.reference, part, 3)
    expected, accuracy = reference_dpo(given, GROUPS[groups], 4.0)
    assert_close(out.loss, expected)
    found = gradient(out.loss, given)
    assert_close(found, gradient(expected, given))
    assert out.metrics["dpo/accuracy"] == pytest.approx(accuracy)
    assert (found.flatten(1).abs().sum(1) > 0).sum() == 4  # the best and the worst of two groups


def test_a_group_of_equal_advantages_counts_nothing_for_dpo():
    given = problem(advantages=[0.5] * 3 + [1.0, 0.0, -1.0])
    out = DPO(preference_beta=4.0).loss(given.policy, given.reference, given.part, 3)
    found = gradient(out.loss, given).flatten(1).abs().sum(1)
    assert (found > 0).tolist() == [False, False, False, True, False, True]
    assert out.counts == {"dpo/accuracy": 1}  # of two groups, so that means over calls are means over pairs
    given = problem(advantages=[0.5] * 3 + [-1.0] * 3)
    out = DPO().loss(given.policy, given.reference, given.part, 3)
    assert out.loss.item() == 0.0 and (gradient(out.loss, given) == 0).all()
    assert "dpo/accuracy" not in out.metrics


def test_a_sample_that_no_reward_scored_is_in_no_pair_of_dpo():
    """Its advantage of 0 may be the lowest, with an advantage function of one's own."""
    given = problem(count=6, group_size=3, advantages=[3.0, 2.0, 0.0, 1.0, 0.0, 0.0])
    part = changed(given, weights=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    out = DPO(preference_beta=4.0).loss(given.policy, given.reference, part, 3)
    found = gradient(out.loss, given).flatten(1).abs().sum(1)
    assert (found > 0).tolist() == [True, True, False, False, False, False]
    pair = changed(given, advantages=torch.tensor([3.0, 2.0, 2.5, 1.0, 1.0, 1.0]))
    assert_close(out.loss, DPO(preference_beta=4.0).loss(given.policy, given.reference, pair, 3).loss)


def test_dpo_at_the_reference():
    """The loss of a pair is log 2, its gradient preference_beta / 4 times that of the difference of the errors."""
    given = problem(count=2, group_size=2, advantages=[2.0, 1.0])
    given.reference.clean = given.clean.detach()
    out = DPO(preference_beta=8.0).loss(given.policy, given.reference, given.part, 3)
    assert out.loss.item() == pytest.approx(2 * torch.log(torch.tensor(2.0)).item())
    assert out.metrics["dpo/accuracy"] == 0.5
    error = squares(given, given.clean)
    assert_close(gradient(out.loss, given), gradient(2 * 8.0 / 4 * (error[0] - error[1]), given))
