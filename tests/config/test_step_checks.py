"""Steps and noise levels that a rollout cannot have are refused in one sentence."""

import pytest
from command_line import make_config

REFUSED = [
    ({"trained_steps": [2, 10]}, r"trained_steps=\[2, 10\].*stop <= 9.*last step has no noise"),
    ({"trained_steps": [3, 3]}, "start < stop"),
    ({"trained_steps": [3]}, r"\[start, stop\)"),
    ({"trained_steps": "half"}, "trained_steps='half' must be all or"),
    ({"trained_steps": [0, 4], "num_trained_steps": 5}, "num_trained_steps=5 is more than the 4 steps"),
    ({"num_trained_steps": 10}, "more than the 5 steps"),
    ({"num_trained_steps": 0}, "num_trained_steps must be at least 1"),
    ({"step_selection": "slide"}, "Did you mean 'sliding'"),
    ({"step_interval": 0}, "step_interval must be at least 1"),
    ({"noisy_steps": "some"}, "noisy_steps='some' is unknown"),
    ({"samples_per_latent": 6}, "samples_per_latent=6 must be group or a divisor of num_generations=16"),
    ({"samples_per_latent": 0}, "samples_per_latent=0 must be"),
    ({"samples_per_latent": "all"}, "samples_per_latent='all' must be"),
    ({"sigmas": [1.0, 0.5]}, "sigmas holds 2 noise levels.*set num_inference_steps: 2, or leave sigmas out"),
    ({"sigmas": [1.0]}, "sigmas must be a list of at least two numbers"),
    ({"sigmas": 0.5}, "sigmas must be a list of at least two numbers, one per step, got 0.5"),
    ({"sigmas": [0.9, 0.6, 0.3], "num_inference_steps": 3}, "must begin with 1.0, which is pure noise"),
    ({"sigmas": [1.0, 0.3, 0.6], "num_inference_steps": 3}, "fall with every step"),
    ({"sigmas": [1.0, 0.5, 0.0], "num_inference_steps": 3}, "to a last value above 0"),
    (
        {"sigmas": [1.0, 0.6, 0.3], "num_inference_steps": 3},
        "evaluations keep the pipeline's own spacing; set eval_num_inference_steps",
    ),
    ({"pipeline_kwargs": {"sigmas": [1.0, 0.5]}}, r"sigmas is set by the trainer \(the setting sigmas\)"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_refused_with_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_config(**settings)
    assert "\n" not in str(refusal.value)
