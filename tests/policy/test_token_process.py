"""Drawing tokens and scoring them, against float64 references written out here."""

import math

import pytest
import torch
from transformers import GenerationConfig

from diffusion_grpo.policy.token_process import (
    Sampling,
    TokenTrajectory,
    draw_ids,
    masked_mean,
    pack_bits,
    token_log_prob,
    unpack_bits,
)

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.6),
    Sampling(temperature=1.3, top_k=7, top_p=0.8),
]


def random_logits(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(logits, sampling):
    """Probabilities by id of one distribution in float64: the nucleus is the smallest set that reaches top_p."""
    scaled = [value / sampling.temperature for value in logits.double().tolist()]
    ids = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: sampling.top_k or len(scaled)]
    total = sum(math.exp(scaled[i]) for i in ids)
    nucleus, reached = [], 0.0
    for i in ids:
        if reached >= sampling.top_p:
            break
        nucleus.append(i)
        reached += math.exp(scaled[i]) / total
    total = sum(math.exp(scaled[i]) for i in nucleus)
    return {i: math.exp(scaled[i]) / total for i in nucleus}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_drawn_and_scored_by_the_truncated_distribution(sampling):
    logits = random_logits(10, 20)
    filtered = sampling.filter(logits)
    kept = (filtered > -torch.inf)[:, None] if sampling.is_truncated else None
    ids = draw_ids(filtered.log_softmax(1), torch.rand(10))
    found = token_log_prob(logits[:, None], ids[:, None], kept, sampling.temperature)[:, 0]
    assert sampling.is_truncated == bool((filtered == -torch.inf).any())
    for row, values, drawn, log_prob in zip(filtered, logits, ids.tolist(), found.tolist(), strict=True):
        expected = reference(values, sampling)
        assert set((row > -torch.inf).nonzero()[:, 0].tolist()) == set(expected)
        assert all(abs(row.softmax(0)[i].item() - p) < 1e-6 for i, p in expected.items())
        assert abs(log_prob - math.log(expected[drawn])) < 1e-5


def test_a_token_stays_in_the_support_it_was_drawn_from():
    """An updated policy may hold a drawn token for improbable: its ratio falls smoothly and keeps a gradient."""
    sampling = Sampling(top_p=0.6)
    before = random_logits(1, 20)
    kept = sampling.filter(before) > -torch.inf
    token = kept.nonzero()[0, 1]
    after = before.clone().index_fill(1, token, -9.0).requires_grad_(True)
    assert sampling.filter(after.detach())[0, token] == -torch.inf
    found = token_log_prob(after[:, None], token.reshape(1, 1), kept[:, None], 1.0)
    support = kept[0].nonzero()[:, 0]
    expected = after.detach().double()[0, support].log_softmax(0)[support == token]
    assert abs(found.item() - expected.item()) < 1e-5
    found.sum().backward()
    assert after.grad[0, token] > 0 and (after.grad[0][~kept[0]] == 0).all()


def test_draws_follow_the_probabilities():
    log_probs = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).log()
    uniform = (torch.arange(1000) + 0.5) / 1000
    ids = draw_ids(log_probs.expand(1000, 4), uniform)
    assert torch.bincount(ids, minlength=4).tolist() == [500, 0, 300, 200]
    ends = draw_ids(log_probs.expand(2, 4), torch.tensor([0.0, 1.0]))  # 1 is what rounding may make of the largest
    assert ends.tolist() == [0, 3]
    assert draw_ids(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1.0])).tolist() == [0]


@pytest.mark.parametrize("count", [8, 20, 64])
def test_a_support_survives_packing(count):
    kept = random_logits(3, 4, count) > 0
    bits = pack_bits(kept)
    assert bits.dtype == torch.uint8 and bits.shape == (3, 4, math.ceil(count / 8))
    assert torch.equal(unpack_bits(bits, count), kept)


def test_by_default_tokens_are_drawn_as_the_model_says():
    own = GenerationConfig(temperature=0.9, top_p=0.75)
    assert Sampling.of(own) == Sampling(0.9, 50, 0.75)  # transformers' own top-k, where none is named
    assert Sampling.of(GenerationConfig()) == Sampling(1.0, 50, 1.0)
    assert Sampling.of(own, temperature=1.0, top_k=0, top_p=None) == Sampling(1.0, 0, 0.75)


def test_settings_that_are_not_replayed_are_refused():
    with pytest.raises(ValueError, match="repetition_penalty=1.2.*not replayed; set it to 1.0"):
        Sampling.of(GenerationConfig(repetition_penalty=1.2))
    assert Sampling.of(GenerationConfig(repetition_penalty=1.0, min_length=0)).top_p == 1.0


def test_means_are_over_the_tokens_that_count():
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert masked_mean(values, mask).tolist() == [1.5, 4.0, 0.0]


def trajectory(tokens, support=1, drift=0.0):
    return TokenTrajectory(
        ids=torch.ones(2, tokens, dtype=torch.int64),
        mask=torch.ones(2, tokens, dtype=torch.bool),
        support=torch.ones(2, tokens, support, dtype=torch.uint8),
        log_probs=torch.full((2, 1, tokens), -1.0),
        drift=torch.full((2, tokens), drift),
        steps=torch.zeros(2, 1, dtype=torch.int64),
        seeds=torch.arange(2),
        initial_seeds=torch.arange(2),
        num_inference_steps=3,
        temperature=0.9,
    )


@pytest.mark.parametrize("support", [0, 1])
def test_trajectories_of_other_lengths_are_padded(support):
    both = type(trajectory(2)).cat([trajectory(2, support, drift=-0.1), trajectory(3, support, drift=0.3)])
    assert len(both) == 4 and both.mask.sum(1).tolist() == [2, 2, 3, 3]
    assert both.log_probs.shape == (4, 1, 3) and both.support.shape == (4, 3, support)
    assert (both.support[0, 2] == 255).all()  # no empty support, which has no distribution
    assert both.over_steps(both.log_probs).tolist() == [[-1.0]] * 4
    assert both[[1, 2]].mask.sum(1).tolist() == [2, 3] and both.temperature == 0.9
    metrics = both.metrics()
    assert metrics["completions/mean_length"] == 2.5
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0.3)
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.22)
