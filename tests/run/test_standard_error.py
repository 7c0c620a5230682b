"""The standard error of an evaluation is over its prompts."""

import math
import statistics

import numpy as np
import pytest

from diffusion_grpo.run.standard_error import measure_mean


def test_one_sample_per_prompt_is_the_usual_error():
    values = [0.1, 0.4, 0.9, math.nan, None]
    mean, error = measure_mean(values, "abcde")
    assert mean == pytest.approx(statistics.mean(values[:3]))
    assert error == pytest.approx(statistics.stdev(values[:3]) / math.sqrt(3))


def test_more_samples_per_prompt_do_not_hide_how_prompts_differ():
    """Against the real spread of the mean over many draws of the prompts."""
    draw = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        rewards = draw.normal(0, 0.3, (16, 1)) + draw.normal(0, 0.05, (16, 8))
        mean, error = measure_mean(rewards.flatten().tolist(), np.arange(128) // 8)
        means.append(mean)
        errors.append(error)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(means), rel=0.1)


def test_without_values_there_is_no_mean():
    assert measure_mean([math.nan, None], "ab") is None and measure_mean([], []) is None
