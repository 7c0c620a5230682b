"""A method runs inside the forward of what wraps a model."""

import pytest
from torch import nn

from diffusion_grpo.distributed.backend import redirect


class Model(nn.Module):
    def forward(self, value):
        return value + 1


class Wrapper(nn.Module):
    """Counts its forwards, as DDP has its hooks there."""

    def __init__(self, model):
        super().__init__()
        self.model, self.forwards = model, 0

    def forward(self, *args):
        self.forwards += 1
        return self.model(*args)


def test_a_method_runs_in_the_wrappers_forward_and_sees_the_models_own_which_returns_after_an_error():
    wrapper = Wrapper(Model())
    assert redirect(wrapper, wrapper.model, lambda value: 10 * wrapper.model(value), 2) == 30
    assert wrapper.forwards == 1 and wrapper(2) == 3
    with pytest.raises(ZeroDivisionError):
        redirect(wrapper, wrapper.model, lambda: 1 / 0)
    assert wrapper(2) == 3 and "forward" not in vars(wrapper.model)
