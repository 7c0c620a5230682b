"""Which form of the log-probability goes with which process."""

import pytest

from diffusion_grpo.policy.log_prob_type import check_log_prob

KNOWN = ["gaussian", "squared_error"]


@pytest.mark.parametrize(
    ("log_prob_type", "process"), [("gaussian", "flow_sde"), ("gaussian", "cps"), ("squared_error", "cps")]
)
def test_forms_that_fit(log_prob_type, process):
    check_log_prob(log_prob_type, process, KNOWN)


@pytest.mark.parametrize(
    ("log_prob_type", "process", "message"),
    [
        ("square", "cps", "must be one of gaussian, squared_error, got 'square'"),
        ("squared_error", "ddim", "but the process is ddim; set sde_type='cps', or leave it out"),
    ],
)
def test_forms_that_do_not(log_prob_type, process, message):
    with pytest.raises(ValueError, match=message):
        check_log_prob(log_prob_type, process, KNOWN)
