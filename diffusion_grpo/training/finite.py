"""Stop a run whose loss or gradient is NaN or infinite."""

import torch
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are those of the last update.

    Examples:
        >>> refuse_non_finite(torch.tensor(float("nan")), "loss", update=3, output_dir=folder, has_stepped=False)
        Traceback (most recent call last):
        NonFiniteError: The loss of update 3 is nan; the weights were not updated. ...
    """


def refuse_non_finite(value: Tensor, name: str, update: int, output_dir: str, has_stepped: bool) -> None:
    """Refuse a value that is NaN or infinite."""
    if torch.isfinite(value).all():
        return
    last = get_last_checkpoint(output_dir)
    kept = "the weights may already contain it" if has_stepped else "the weights were not updated"
    raise NonFiniteError(
        f"The {name} of update {update} is {value.item()}; {kept}. Newest complete checkpoint: {last or 'none'}. Try "
        "a lower learning rate, or float32."
    )
