"""DiffusionNFT's loss against the paper's formula, and what it is at the old policy."""

import pytest
import torch
from renoised_parts import changed, gradient, mean, problem, squares
from torch.testing import assert_close

from diffusion_grpo.algorithms.nft import NFT


def reference_loss(given, strength=1.0, advantage_range=5.0):
    """(samples,) C (r |plus - x0|^2 / w_plus + (1 - r) |minus - x0|^2 / w_minus) / b, a sample at a time."""
    losses = []
    for index, advantage in enumerate(given.advantages.tolist()):
        better = min(max(advantage / (2 * advantage_range) + 0.5, 0.0), 1.0)
        kept = slice(None) if given.moves is None else given.moves[index]
        now, old, clean = (x[index][kept].flatten() for x in (given.clean, given.old, given.target))
        plus = strength * now + (1 - strength) * old - clean
        minus = (1 + strength) * old - strength * now - clean
        sides = [(error**2).mean() / error.detach().abs().mean().clamp(min=1e-5) for error in (plus, minus)]
        losses.append(advantage_range / strength * (better * sides[0] + (1 - better) * sides[1]))
    return torch.stack(losses)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("sigma_by_element", [False, True])
@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("settings", [{}, {"strength": 0.1, "advantage_range": 2.0}])
def test_loss_and_gradient(is_masked, sigma_by_element, has_old, settings):
    given = problem(is_masked=is_masked, sigma_by_element=sigma_by_element, has_old=has_old, has_weights=True)
    out = NFT(**settings).loss(given.policy, None, given.part, 3)
    losses = reference_loss(given, **settings)
    expected = (given.weights * losses).sum()
    assert_close(out.loss, expected)
    assert_close(gradient(out.loss, given), gradient(expected, given))
    assert out.metrics["loss/policy"] == pytest.approx(expected.item() / len(losses))
    moved = squares(given, given.clean, given.old).mean().item() if has_old else 0.0
    assert out.metrics["old/distance"] == pytest.approx(moved)


@pytest.mark.parametrize("strength", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("is_masked", [False, True])
def test_at_the_old_policy_the_gradient_is_that_of_the_error(strength, is_masked):
    """(2 r - 1) C / w times that of the mean squared error, whatever the strength."""
    given = problem(is_masked=is_masked, advantages=[2.0, -3.0, 0.5, 9.0, -9.0, 0.0])
    found = gradient(NFT(strength=strength).loss(given.policy, None, given.part, 3).loss, given)
    error = given.clean - given.target
    width = mean(given, error.detach().abs())
    factor = torch.tensor([0.4, -0.6, 0.1, 1.0, -1.0, 0.0]) * 5 / width  # 9 is more than C
    assert_close(found, gradient((factor * mean(given, error**2)).sum(), given))


def test_a_perfect_prediction_is_not_divided_by_zero():
    given = problem(distance=0.0)
    out = NFT().loss(given.policy, None, given.part, 3)
    assert out.loss.item() == 0.0 and (gradient(out.loss, given) == 0).all()


def test_advantages_of_any_device_and_dtype():
    given = problem(has_old=True)
    found = NFT().loss(given.policy, None, changed(given, advantages=given.advantages.float()), 3)
    assert_close(found.loss, reference_loss(given).sum(), rtol=1e-6, atol=0)
