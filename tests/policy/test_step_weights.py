"""Weights of recorded steps, from how far noise and prediction of each step reach."""

import pytest
import torch

from diffusion_grpo.policy.step_weights import STEP_WEIGHTS, weigh_steps
from diffusion_grpo.policy.trajectory import StepScale

STD, JACOBIAN = torch.tensor([0.5, 0.2, 0.1]), torch.tensor([0.1, 0.4, 0.05])
SCALES = {
    step: StepScale(std.expand(2), jacobian.expand(2), torch.ones(2))
    for step, std, jacobian in zip((1, 2, 4), STD, JACOBIAN, strict=True)
}


@pytest.mark.parametrize("name", STEP_WEIGHTS)
def test_each_weight_is_its_formula(name):
    ratio = STD / JACOBIAN
    expected = {"noise": 2.25 * STD, "velocity": ratio / ratio.mean(), "guard": ratio}.get(name)
    found = weigh_steps(name, SCALES, torch.tensor([[1, 2, 4], [1, 2, 4]]))
    if name == "none":
        assert found is None
        return
    torch.testing.assert_close(found, expected.expand(2, 3))
    if name == "velocity":  # the gradient by the prediction is as large at each step
        pull = found[0] * JACOBIAN / STD
        torch.testing.assert_close(pull, pull[:1].expand(3))


def test_a_sample_gets_the_weights_of_its_own_steps_out_of_the_whole_window():
    found = weigh_steps("velocity", SCALES, torch.tensor([[2], [4]]))
    whole = weigh_steps("velocity", SCALES, torch.tensor([[1, 2, 4]] * 2))
    assert found.tolist() == [[whole[0, 1].item()], [whole[1, 2].item()]]
    assert found.dtype == torch.float32 and not torch.allclose(found, torch.ones(2, 1))
