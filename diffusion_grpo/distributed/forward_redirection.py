"""Run a method inside the forward of a model's wrapper."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..policy.network_gate import replace_attribute


def redirect(wrapper: nn.Module, model: nn.Module, method: Callable, *args: Any) -> Any:
    """Call `method` inside the forward of `wrapper` (DDP, DeepSpeed), so that the wrapper's hooks run.

    TRL has a class for this, `_ForwardRedirection`, but it is private.
    """
    if wrapper is model:
        return method(*args)
    real = model.forward

    def detour(*given: Any) -> Any:
        with replace_attribute(model, "forward", real):
            return method(*given)

    with replace_attribute(model, "forward", detour):
        return wrapper(*args)
