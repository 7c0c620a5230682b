"""Leave samples whose advantage is 0 out of an update, by weighting the samples' losses.

Flow-GRPO's code drops these samples before it cuts micro-batches, so that its means are taken over the others. Here
they stay in the calls in which they were rolled out, since a replay with other samples differs in the last bits. Only
the weights of the losses change.
"""

import dataclasses

import torch
from torch import Tensor

from .losses import Loss, LossInputs, LossOutput


def sample_weights(advantages: Tensor, trained: Tensor) -> Tensor:
    """Return the weight of each sample's loss: 0 where all its advantages are 0, trained / kept for the others.

    Args:
        advantages: `(samples, ...)` advantages of all samples of all processes.
        trained: `(trained,)` int64, indices of the samples that are trained on.

    Returns:
        `(samples,)` float32; all 0 if no sample is kept.
    """
    is_kept = (advantages != 0).flatten(1).any(1) if advantages.ndim > 1 else advantages != 0
    kept = int(is_kept[trained].sum())
    return is_kept.float() * (len(trained) / max(kept, 1))


def sum_loss(loss: Loss, inputs: LossInputs, weights: Tensor | None) -> LossOutput:
    """Turn a loss that is a mean over samples into their weighted sum.

    Args:
        weights: `(batch,)` weights from [`sample_weights`], of which those above 0 are equal. None if all are 1.
    """
    if weights is None:
        output = _call(loss, inputs)
        return dataclasses.replace(output, loss=output.loss * len(inputs.log_prob))
    is_kept = (weights > 0).to(inputs.log_prob.device)
    if not is_kept.any():
        output = _call(loss, inputs)
        return LossOutput(output.loss * 0.0, {name: value * 0.0 for name, value in _terms(output).items()})
    output, total = _call(loss, select_samples(inputs, is_kept)), weights.sum().item()
    terms = {name: value * (total / len(weights)) for name, value in _terms(output).items()}
    return LossOutput(output.loss * total, output.metrics | terms)


def _terms(output: LossOutput) -> dict[str, Tensor]:
    return {name: value for name, value in output.metrics.items() if name.startswith("loss/")}


def _call(loss: Loss, inputs: LossInputs) -> LossOutput:
    """Call a loss, and check what it returns, since it may be the user's own."""
    output, name = loss(inputs), getattr(getattr(loss, "func", loss), "__name__", loss)
    if not isinstance(output, LossOutput):
        raise TypeError(f"{name} returned a {type(output).__name__}; it must return LossOutput(loss, metrics).")
    if not torch.is_tensor(output.loss) or output.loss.ndim:
        found = f"of shape {tuple(output.loss.shape)}" if torch.is_tensor(output.loss) else repr(output.loss)
        raise TypeError(f"{name} returned the loss {found}; it must return the mean over the samples, as one tensor.")
    if inputs.log_prob.requires_grad and not output.loss.requires_grad:
        raise TypeError(f"{name} returned a loss without a gradient; compute it from inputs.log_prob or inputs.mean.")
    return output


def select_samples(inputs: LossInputs, chosen: Tensor) -> LossInputs:
    """Return the inputs of some samples only; `chosen` indexes the batch dimension."""
    count = len(inputs.log_prob)
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    rows = {name: x for name, x in values.items() if torch.is_tensor(x) and x.ndim and len(x) == count}
    if inputs.std is not None and inputs.std.ndim < inputs.mean.ndim:
        rows.pop("std", None)  # its first dimension is not the batch
    return dataclasses.replace(inputs, **{name: x[chosen] for name, x in rows.items()})
