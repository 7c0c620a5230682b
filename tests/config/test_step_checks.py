"""Steps and noise levels that a rollout cannot have are refused in one sentence."""

import pytest
from command_line import make_config

BRANCHED = {"branches": 4, "sde_window": [1, 4]}
REFUSED = [
    ({"sde_window": [2, 10]}, r"sde_window=\[2, 10\].*stop <= 9.*never trained"),
    ({"sde_window": [3, 3]}, "start < stop"),
    ({"sde_window": [3]}, r"\[start, stop\)"),
    ({"sde_window": [0, 4], "sde_window_size": 5}, "sde_window_size=5 does not fit into the steps 0 to 3"),
    ({"sde_window_size": 10}, "does not fit into the steps 0 to 4"),
    ({"sde_window_size": 0}, "sde_window_size must be at least 1"),
    (
        {"sde_window_order": "sliding", "sde_window": [0, 2]},
        "sde_window_order='sliding' chooses which part.* all 2 steps of the window are trained; set sde_window_size",
    ),
    ({"sde_window_order": "per_prompt", "sde_window": [0, 3], "sde_window_size": 3}, "all 3 steps of the window"),
    ({"sde_window_order": "per_prompt", "sde_window": [0, 1]}, "the window has only one step; widen sde_window"),
    ({"sde_window_order": "slide"}, "Did you mean 'sliding'"),
    ({"sde_window_interval": 0}, "sde_window_interval must be at least 1"),
    ({"branches": 1}, "branches must be at least 2"),
    ({"branches": 6}, "branches=6 does not divide num_generations=16"),
    (
        BRANCHED | {"deterministic_outside_window": False},
        "all steps draw noise; set deterministic_outside_window=True",
    ),
    (BRANCHED | {"same_initial_noise": True}, "one initial latent, but branches=4 gives it 4; leave one of them out"),
    (BRANCHED | {"advantage_estimator": "gae"}, "conditions of each sample.*leave one of them out"),
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
    ({"noise_in_last_step": True, "deterministic_outside_window": True}, "contradict each other.*to False"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_refused_with_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_config(**settings)
    assert "\n" not in str(refusal.value)
