"""Samples whose advantage is 0 are left out of an update, as in Flow-GRPO's code."""

import torch

from diffusion_grpo.algorithms.losses import LossInputs, grpo, sample_weights, sum_loss


def inputs_of(advantages, ref_mean=None):
    torch.manual_seed(0)
    count = len(advantages)
    mean = torch.randn(count, 3, dtype=torch.float64, requires_grad=True)
    return LossInputs(
        log_prob=(mean**2).mean(1) * 1e-2,
        old_log_prob=torch.zeros(count, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mean=mean,
        std=torch.tensor(0.5, dtype=torch.float64),
        ref_mean=torch.zeros(count, 3, dtype=torch.float64),
        epsilon=0.1,
        epsilon_high=0.1,
        beta=0.3,
    )


def test_flow_grpos_update_without_zero_advantages():
    """Its mask, two micro-batches of what is left, and the mean over both; ours sums and divides by all."""
    advantages = [1.5, 0.0, -0.5, 0.0, 0.0, 0.0, 2.0, -1.0]
    whole = inputs_of(advantages)
    kept = [i for i, advantage in enumerate(advantages) if advantage != 0]
    theirs = 0.0
    for batch in (kept[:2], kept[2:]):
        ratio, advantage = torch.exp(whole.log_prob[batch]), whole.advantages[batch]
        policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
        kl = ((whole.mean[batch] ** 2).mean(1) / (2 * 0.5**2)).mean()
        theirs = theirs + (policy + 0.3 * kl) / 2
    weights = sample_weights(whole.advantages, torch.arange(8))
    assert weights.tolist() == [2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 2.0]
    ours, terms = 0.0, 0.0
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):  # the second has nobody who counts
        names = ("log_prob", "old_log_prob", "advantages", "mean", "ref_mean")
        part = LossInputs(
            **{name: getattr(whole, name)[rows] for name in names},
            std=whole.std,
            epsilon=0.1,
            epsilon_high=0.1,
            beta=0.3,
        )
        output = sum_loss(grpo, part, weights[rows])
        ours = ours + output.loss / 8
        terms = terms + (output.metrics["loss/policy"] + output.metrics["loss/kl"]) * len(weights[rows]) / 8
        assert ("ratio/mean" in output.metrics) == bool(weights[rows].any())  # of samples that count
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(terms, ours.detach(), rtol=1e-12, atol=0)  # what is logged adds up to the loss
    gradients = [torch.autograd.grad(loss, whole.mean, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_weights_are_of_what_is_trained():
    advantages = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0], [2.0, 2.0]])
    assert sample_weights(advantages, torch.tensor([0, 1, 2])).tolist() == [1.5, 0.0, 1.5, 1.5]
    assert sample_weights(torch.zeros(4), torch.arange(4)).tolist() == [0.0] * 4


def test_a_standard_deviation_of_each_sample_goes_with_it():
    given = inputs_of([1.0, 0.0])
    each = {**vars(given), "std": torch.tensor([[0.5], [9.0]], dtype=torch.float64)}
    whole = sum_loss(grpo, given, torch.tensor([2.0, 0.0])).loss
    torch.testing.assert_close(sum_loss(grpo, LossInputs(**each), torch.tensor([2.0, 0.0])).loss, whole)
