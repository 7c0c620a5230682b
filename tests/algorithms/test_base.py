"""An algorithm of one's own needs only passes and a loss."""

import pytest
import torch

from diffusion_grpo.algorithms.base import Algorithm, PassOutput, RatioError, Recording, summarise_samples


class Own(Algorithm):
    """Defines no check."""

    def passes(self, batch):
        return []

    def loss(self, policy, reference, part, step):
        return PassOutput(policy, {})


def test_the_defaults_of_an_algorithm():
    own = Own()
    assert own.recording == Recording() and own.check(batch=None, drift=1e9) == {}
    assert own.loss(0.5, None, None, 0) == PassOutput(loss=0.5, metrics={}, drift=0.0)
    assert issubclass(RatioError, RuntimeError)


@pytest.mark.parametrize(("weights", "kept"), [(None, [1.0, 2.0, 4.0, 8.0]), ([2.0, 0.0, 2.0, 0.0], [1.0, 4.0])])
def test_what_is_measured_of_samples_is_logged_of_those_that_count(weights, kept):
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    measured = {"a": values, "a/min": values, "a/max": values, "whole": torch.tensor(3.0)}
    metrics, counts = summarise_samples(measured, None if weights is None else torch.tensor(weights))
    assert metrics == {"a": sum(kept) / len(kept), "a/min": min(kept), "a/max": max(kept), "whole": 3.0}
    assert counts == {}


def test_what_is_measured_of_some_samples_alone_says_of_how_many():
    values = torch.tensor([torch.nan, 2.0, 4.0, torch.nan])
    assert summarise_samples({"a": values}, None) == ({"a": 3.0}, {"a": 2})
    assert summarise_samples({"a": values}, torch.tensor([1.0, 1.0, 0.0, 0.0])) == ({"a": 2.0}, {"a": 1})
    assert summarise_samples({"a": values}, torch.tensor([1.0, 0.0, 0.0, 0.0])) == ({}, {"a": 0})
