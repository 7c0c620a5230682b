"""Losses of one denoising step, or of tokens: pure functions from `LossInputs` to `LossOutput(loss, metrics)`.

Most algorithms of the GRPO family differ in nothing else. To use a loss of your own, set `loss_type` to its dotted
path, and give its keyword arguments, besides its `LossInputs`, as `loss_kwargs`. A loss is the mean over one
micro-batch at one step: the caller divides by the number of trained steps. The loss of the value model, the weights of
samples, and sums of losses are here too.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from ..policy.token_process import masked_mean

__all__ = [
    "Loss",
    "LossInputs",
    "LossOutput",
    "dppo",
    "grpo",
    "grpo_guard",
    "kl_divergence",
    "loss_per_reward",
    "needs_old_mean",
    "token_kl_divergence",
]


@dataclasses.dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss: one denoising step of one micro-batch.

    Attributes:
        log_prob: `(batch,)`, log-probability of the recorded step under the current policy, with gradient.
        old_log_prob: `(batch,)`, the same under the policy that made the rollout, without gradient.
        advantages: `(batch,)`, one per sample: the same at all its steps unless a value model estimates them.
            `loss_per_reward` gets one column per reward.
        mean: `(batch, ...)`, mean of the next latent under the policy, with gradient.
        std: standard deviation of the next latent, broadcastable to `mean`, greater than 0.
        ref_mean: `(batch, ...)`, mean of the next latent under the reference; `None` if there is no reference.
        mask: `(batch, tokens)` if the policy writes tokens: True for those that count. `log_prob` and
            `old_log_prob` are then `(batch, tokens)` too, and `mean`, `std` and `ref_mean` are None.
        ref_log_prob: for tokens, `(batch, tokens)` log-probabilities under the reference; `None` without a reference.
        epsilon: the ratio is clipped below at `1 - epsilon`.
        epsilon_high: the ratio is clipped above at `1 + epsilon_high`.
        beta: weight of the KL divergence to the reference; without a reference it has no effect.
        noise: `(batch,)`, `std` averaged over the elements that the step moves.
        jacobian: `(batch,)`, |d mean / d prediction| of the step.
        moving: `(batch,)`, number of elements that the step moves. Elements that a pipeline holds fixed do not count
            in averages. `None` if all move.
        old_divergence: `(batch,)`, KL divergence from the policy that made the rollout, with gradient; only for a loss
            that is marked with [`needs_old_mean`].

    Examples:
        >>> log_prob = torch.tensor([-0.5, -0.5], requires_grad=True)
        >>> step = LossInputs(
        ...     log_prob=log_prob, old_log_prob=log_prob.detach(), advantages=torch.tensor([1.0, -1.0]),
        ...     mean=torch.zeros(2, 4), std=torch.tensor(0.1), ref_mean=None,
        ...     epsilon=1e-4, epsilon_high=1e-4, beta=0.0,
        ... )
        >>> grpo(step).loss.backward()
        >>> log_prob.grad.tolist()
        [-0.5, 0.5]
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    ref_mean: torch.Tensor | None
    epsilon: float
    epsilon_high: float
    beta: float
    mask: torch.Tensor | None = None
    ref_log_prob: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    jacobian: torch.Tensor | None = None
    old_divergence: torch.Tensor | None = None
    moving: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """What a loss returns.

    Attributes:
        loss: scalar with gradient.
        metrics: detached scalars to log, by name.

    Examples:
        >>> LossOutput(torch.zeros(()), {"loss/policy": torch.zeros(())}).loss.item()
        0.0
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


Loss = Callable[[LossInputs], LossOutput]


def needs_old_mean(loss: Loss) -> Loss:
    """Mark a loss that uses `old_divergence`, so that the means under the policy that made the rollout are kept.

    Args:
        loss: loss of one denoising step; the same function is returned, with the mark.

    Examples:
        >>> @needs_old_mean
        ... def penalised(inputs, *, weight=1.0):
        ...     gain = inputs.advantages * (inputs.log_prob - inputs.old_log_prob).exp()
        ...     return LossOutput((weight * inputs.old_divergence - gain).mean(), {})
        >>> penalised(step).loss.shape
        torch.Size([])
    """
    loss.needs_old_mean = True
    return loss


def kl_divergence(
    mean: torch.Tensor, ref_mean: torch.Tensor, std: torch.Tensor, moving: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the KL divergence of two Gaussians with equal standard deviations, averaged over the elements that move.

    See arXiv 2505.05470.

    Args:
        mean: `(batch, ...)`, mean under the policy.
        ref_mean: `(batch, ...)`, mean under the reference.
        std: broadcastable to `mean`, greater than 0.
        moving: `(batch,)`, number of elements that move; at the others both means are equal. `None` if all move.

    Returns:
        `(batch,)`, `mean((mean - ref_mean)**2 / (2 * std**2))` over all but the batch dimension, with gradient.
        Flow-GRPO's code leaves the time step out of `std`, so that its values are smaller by the factor `-dt`.

    Examples:
        >>> kl_divergence(torch.ones(1, 4), torch.zeros(1, 4), torch.tensor(0.5)).item()
        2.0
    """
    each = ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1)
    return each.mean(1) if moving is None else each.sum(1) / moving


def token_kl_divergence(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """Estimate the KL to the reference at each drawn token, as TRL does (k3).

    See http://joschu.net/blog/kl-approx.html.

    Args:
        log_prob: `(batch, tokens)` log-probabilities under the policy, with gradient.
        ref_log_prob: `(batch, tokens)` log-probabilities under the reference.

    Returns:
        `(batch, tokens)`, `exp(d) - d - 1` with `d = ref_log_prob - log_prob`; never negative, 0 where both agree.

    Examples:
        >>> token_kl_divergence(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.0]])).tolist()
        [[0.0, 0.0]]
    """
    difference = ref_log_prob - log_prob
    return torch.exp(difference) - difference - 1


def grpo(inputs: LossInputs) -> LossOutput:
    """Compute GRPO's clipped objective and the KL to the reference (arXiv 2402.03300, for flows arXiv 2505.05470).

    `mean(max(-A * ratio, -A * clip(ratio, 1 - epsilon, 1 + epsilon_high))) + beta * mean(KL)` with
    `ratio = exp(log_prob - old_log_prob)`. Log-probabilities are averages over the dimensions of a latent, so that
    ratios stay within some 1e-4 of 1 and `epsilon` has to be as small.

    For tokens, the mean is taken over the tokens of each sample that count and then over samples, and the KL is
    [`token_kl_divergence`]. Their log-probabilities are not averages, so `epsilon` is on the order of 0.2.

    Args:
        inputs: the inputs for one denoising step, or for tokens.

    Returns:
        Metrics `loss/policy` and `loss/kl`, the two terms; `ratio/mean`, `ratio/min`, `ratio/max`, and the shares of
        samples (or tokens) whose ratio left the interval on the side where the clip acts: `clip_ratio/low_mean`
        (below, negative advantage), `clip_ratio/high_mean` (above, positive advantage), `clip_ratio/region_mean`
        (either). With a reference also `kl`.

    Examples:
        >>> output = grpo(step)  # a `LossInputs`
        >>> output.loss.requires_grad, output.metrics["ratio/mean"].item()
        (True, 1.0)
    """
    ratio = torch.exp(inputs.log_prob - inputs.old_log_prob)
    return _clip_ratio(inputs, ratio, 1 - inputs.epsilon, 1 + inputs.epsilon_high)


@needs_old_mean
def grpo_guard(inputs: LossInputs, *, clip_range: float = 4e-6) -> LossOutput:
    """Compute GRPO-Guard's loss with its regulated clip (https://huggingface.co/papers/2510.22319).

    The log-ratio has a negative mean, and its mean and spread differ from step to step, so one clip range acts on only
    some of the steps. Here `ratio = exp((log_prob - old_log_prob + KL_old) * std)`. Adding the KL divergence from the
    policy that made the rollout centres the log-ratio, and multiplying by std gives it the same spread at all steps.
    The loss is divided by |d mean / d prediction|. Both are computed per sample. The authors' code averages the KL
    over the batch, and divides by the time step, which is close to this derivative for `flow_sde` but not for other
    processes.

    Args:
        inputs: the inputs for a Gaussian step.
        clip_range: the ratio is clipped to `1 - clip_range` and `1 + clip_range`; `epsilon` has no effect. Published
            values are 2e-6 (text in images) and 4e-6 (PickScore), with two updates per rollout, learning rate 1e-4,
            beta 0.

    Returns:
        Metrics as in [`grpo`], and `kl/old`, the mean KL divergence from the policy that made the rollout.

    Examples:
        >>> output = grpo_guard(step)  # a `LossInputs`
        >>> output.loss.requires_grad, output.metrics["ratio/mean"].item()
        (True, 1.0)
    """
    log_ratio = inputs.log_prob - inputs.old_log_prob + inputs.old_divergence
    output = _clip_ratio(
        inputs, torch.exp(log_ratio * inputs.noise), 1 - clip_range, 1 + clip_range, 1 / inputs.jacobian
    )
    return dataclasses.replace(output, metrics=output.metrics | {"kl/old": inputs.old_divergence.detach().mean()})


@needs_old_mean
def dppo(inputs: LossInputs, *, threshold: float = 1e-5) -> LossOutput:
    """Compute Flow-DPPO's loss, with a mask in place of the clip (https://huggingface.co/papers/2606.11025).

    The loss of a sample is `-A * ratio` where the KL divergence from the policy that made the rollout is below
    `threshold`, or where the step pulls the ratio back towards 1. A sample that is further away and would move on
    (ratio above 1 and A > 0, or below 1 and A < 0) gives no gradient.

    Args:
        inputs: the inputs for a Gaussian step.
        threshold: limit of the KL divergence, averaged over dimensions; published values are 1e-6 to 1e-5. `epsilon`
            has no effect.

    Returns:
        Metrics as in [`grpo`], where `clip_ratio/*` are the shares of masked samples, and `kl/old` as in
        [`grpo_guard`].

    Examples:
        >>> output = dppo(step)  # a `LossInputs`
        >>> output.loss.requires_grad, output.metrics["ratio/mean"].item()
        (True, 1.0)
    """
    ratio = torch.exp(inputs.log_prob - inputs.old_log_prob)
    advantages, divergence = inputs.advantages, inputs.old_divergence.detach()
    is_far = divergence >= threshold
    is_high = is_far & (ratio > 1) & (advantages > 0)
    is_low = is_far & (ratio < 1) & (advantages < 0)
    loss = (-advantages * ratio).masked_fill(is_high | is_low, 0.0)
    output = _finish(inputs, loss, ratio, is_low, is_high)
    return dataclasses.replace(output, metrics=output.metrics | {"kl/old": divergence.mean()})


def _clip_ratio(
    inputs: LossInputs, ratio: torch.Tensor, low: float, high: float, factor: torch.Tensor | None = None
) -> LossOutput:
    """Return PPO's clipped objective, times a factor per sample, and the KL to the reference."""
    # all tokens of a sample share one advantage
    advantages = inputs.advantages if inputs.advantages.ndim == ratio.ndim else inputs.advantages[:, None]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    return _finish(inputs, loss if factor is None else factor * loss, ratio, is_low, is_high)


def _finish(
    inputs: LossInputs, loss: torch.Tensor, ratio: torch.Tensor, is_low: torch.Tensor, is_high: torch.Tensor
) -> LossOutput:
    """Add the KL to the policy term of each sample (or token), and compute the metrics."""
    policy, mask, counted = _mean(loss, inputs.mask), inputs.mask, ratio.detach()
    if mask is not None:
        counted = counted[mask.bool()] if mask.any() else ratio.new_ones(1)
    metrics = {
        "loss/policy": policy.detach(),
        "ratio/mean": _mean(ratio.detach(), mask),
        "ratio/min": counted.min(),
        "ratio/max": counted.max(),
        "clip_ratio/low_mean": _mean(is_low.float(), mask),
        "clip_ratio/high_mean": _mean(is_high.float(), mask),
        "clip_ratio/region_mean": _mean((is_low | is_high).float(), mask),
    }
    if inputs.ref_mean is not None:
        kl = kl_divergence(inputs.mean, inputs.ref_mean, inputs.std, inputs.moving).mean()
    elif inputs.ref_log_prob is not None:
        kl = _mean(token_kl_divergence(inputs.log_prob, inputs.ref_log_prob), mask)
    else:
        return LossOutput(policy, metrics)
    metrics |= {"kl": kl.detach(), "loss/kl": inputs.beta * kl.detach()}
    return LossOutput(policy + inputs.beta * kl, metrics)


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Average over samples; average tokens within each sample first, so that long and short samples count the same."""
    return (values if mask is None else masked_mean(values, mask)).mean()


def loss_per_reward(loss: Loss, weights: Sequence[float]) -> Loss:
    """Sum a loss over rewards that each have their own advantage, as DanceGRPO does for video (arXiv 2505.07818).

    `sum_i |w_i| * loss(sign(w_i) * A_i, beta = 0) + loss(A = 0, beta)`: the clip acts on each reward by itself. Once a
    ratio has left the clip range, rewards that would move it further out have no gradient, and rewards that would move
    it back still have one. The term without advantages, the KL, counts once. If nothing is clipped, this is the loss
    of the weighted sum of the advantages.

    Args:
        loss: takes one advantage per sample. It must be a sum of two terms: one that is 0 if the advantages are 0, and
            one that is multiplied by `beta`.
        weights: one per reward.

    Returns:
        A loss for `LossInputs` whose `advantages` are `(batch, rewards)`. Metrics are means over the rewards, but the
        terms `loss/policy` and `loss/kl` are those of the sum.

    Examples:
        >>> both = dataclasses.replace(step, advantages=torch.tensor([[1.0, 0.0], [-1.0, 2.0]]))
        >>> round(loss_per_reward(grpo, [0.5, 0.5])(both).loss.item(), 3)
        -0.5
    """

    def summed(inputs: LossInputs) -> LossOutput:
        columns = zip(inputs.advantages.unbind(1), weights, strict=True)
        signed = [(-column if weight < 0 else column, abs(weight)) for column, weight in columns]
        parts = [(loss(dataclasses.replace(inputs, advantages=column, beta=0.0)), size) for column, size in signed]
        rest = loss(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.log_prob)))
        names = parts[0][0].metrics
        metrics = {name: torch.stack([part.metrics[name] for part, _ in parts]).mean() for name in names}
        terms = {name: rest.metrics[name] for name in ("loss/kl",) if name in rest.metrics}
        if "loss/policy" in metrics:
            terms["loss/policy"] = sum(size * part.metrics["loss/policy"] for part, size in parts)
        metrics |= terms
        return LossOutput(sum((size * part.loss for part, size in parts), rest.loss), metrics)

    return summed


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> torch.Tensor:
    """Compute PPO's clipped value loss, half the mean of the larger squared error, over (batch, steps) values.

    An unknown target (NaN) counts as an error of 0, so that a known one weighs the same in any micro-batch. As in the
    code of PPO's authors, a value that moved further than `clip` in the right direction gets no gradient.
    """
    is_known, returns = ~returns.isnan(), returns.nan_to_num()
    error = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error.masked_fill(~is_known, 0.0).mean()


# Samples whose advantage is 0. Flow-GRPO's code drops them before it cuts micro-batches, so that its means are taken
# over the others. Here they stay in the calls in which they were rolled out, since a replay with other samples differs
# in the last bits. Only the weights of the losses change.


def sample_weights(advantages: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Return the (samples,) weight of each loss: 0 where all advantages are 0, trained / kept for the others.

    `advantages` are those of all processes, `trained` the indices of the samples that are trained on.
    """
    is_kept = (advantages != 0).flatten(1).any(1) if advantages.ndim > 1 else advantages != 0
    kept = int(is_kept[trained].sum())
    return is_kept.float() * (len(trained) / max(kept, 1))


def sum_loss(loss: Loss, inputs: LossInputs, weights: torch.Tensor | None) -> LossOutput:
    """Turn a loss that is a mean over samples into their sum, weighted by [`sample_weights`]; None weighs all by 1."""
    is_kept = torch.ones(1, dtype=torch.bool) if weights is None else (weights > 0).to(inputs.log_prob.device)
    output = loss(inputs if weights is None or not is_kept.any() else select_samples(inputs, is_kept))
    name = getattr(getattr(loss, "func", loss), "__name__", loss)  # it may be the user's own
    if not isinstance(output, LossOutput):
        raise TypeError(f"{name} returned a {type(output).__name__}; it must return LossOutput(loss, metrics).")
    if not torch.is_tensor(output.loss) or output.loss.ndim:
        returned = f"of shape {tuple(output.loss.shape)}" if torch.is_tensor(output.loss) else repr(output.loss)
        raise TypeError(
            f"{name} returned the loss {returned}; it must return the mean over the samples, as one tensor."
        )
    if inputs.log_prob.requires_grad and not output.loss.requires_grad:
        raise TypeError(f"{name} returned a loss without a gradient; compute it from inputs.log_prob or inputs.mean.")
    if weights is None:
        return dataclasses.replace(output, loss=output.loss * len(inputs.log_prob))
    total, others = weights.sum().item(), output.metrics if is_kept.any() else {}
    share = total / len(weights)
    terms = {name: value * share for name, value in output.metrics.items() if name.startswith("loss/")}
    return LossOutput(output.loss * total, others | terms)


def select_samples(inputs: LossInputs, chosen: torch.Tensor) -> LossInputs:
    """Return the inputs of some samples only; `chosen` indexes the batch dimension."""
    count = len(inputs.log_prob)
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    rows = {name: x for name, x in values.items() if torch.is_tensor(x) and x.ndim and len(x) == count}
    if inputs.std is not None and inputs.std.ndim < inputs.mean.ndim:
        rows.pop("std", None)  # its first dimension is not the batch
    return dataclasses.replace(inputs, **{name: x[chosen] for name, x in rows.items()})
