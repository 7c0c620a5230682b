"""Stop a run whose loss or gradient is NaN or infinite."""

import torch
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite.

    Examples:
        >>> refuse_non_finite(torch.tensor(float("nan")), "loss", update=3, output_dir=folder)
        Traceback (most recent call last):
        NonFiniteError: The loss of update 3 is nan. ...
    """


def refuse_non_finite(value: Tensor, name: str, update: int, output_dir: str) -> None:
    if torch.isfinite(value).all():
        return
    last = get_last_checkpoint(output_dir)
    raise NonFiniteError(
        f"The {name} of update {update} is {value.item()}. Newest complete checkpoint: {last or 'none'}. Try a lower "
        "learning rate, or float32."
    )
