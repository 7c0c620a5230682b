"""Advantages: from the rewards of all samples of a generation to one number per sample or, with GAE, per step.

All of GRPO that compares samples with each other is here, including `best_of_n` and a user's own advantage function:
it needs the rewards of every process at once, no network and no gradient. Statistics are computed in float64 on the
CPU, so that every process and every device gets the same bits.
"""

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

AdvantageFunction = Callable[..., torch.Tensor]
AGGREGATIONS = [
    "sum_then_normalize",
    "normalize_then_sum",
    "min_then_normalize",
    "product_then_normalize",
    "loss_per_reward",
]
ONE_BY_ONE = ("normalize_then_sum", "loss_per_reward")  # these normalise each reward; the others, their combination
EPS = 1e-8
# Rewards of a group that differ by less than this, relative to the largest, count as equal: such differences are
# rounding errors of float32 (0.7 and 1 - 0.3), which a z-score would scale up to full size.
EQUAL = 4 * torch.finfo(torch.float32).eps


@dataclasses.dataclass(frozen=True)
class Advantages:
    """The samples' advantages, and what they were computed from.

    Attributes:
        advantages: `(samples,)` float32, never NaN. With `"loss_per_reward"`, the weighted sum before the clip.
        ranking: `(samples,)` float32, the advantages before the clip, by which `best_of_n` chooses; NaN if no function
            scored the sample.
        rewards: `(samples,)` float32, weighted sum (or minimum, or product) of the functions, with means in place of
            missing values (see `combine`); NaN if none of them scored the sample.
        group_std: `(samples,)` float32, standard deviation of `rewards` in the sample's group (or in its batch, if
            rewards are compared within the batch or no group has a second sample); 0 if all rewards there are equal.
        frac_reward_zero_std: share of the samples whose `group_std` is 0.
        is_dropped: `(samples,)` bool, True for samples of a group below `reward_threshold`.
        by_reward: `(samples, functions)` float32, the clipped and unweighted advantage for each reward alone; only
            with `"loss_per_reward"`.

    Examples:
        >>> rewards = torch.tensor([[1.0], [1.0], [3.0], [5.0]])  # two prompts with two samples each, one reward
        >>> found = compute_advantages(rewards, torch.tensor([0, 0, 1, 1]), torch.ones(1))
        >>> found.frac_reward_zero_std  # the first group has equal rewards
        0.5
    """

    advantages: torch.Tensor
    ranking: torch.Tensor
    rewards: torch.Tensor
    group_std: torch.Tensor
    frac_reward_zero_std: float
    is_dropped: torch.Tensor
    by_reward: torch.Tensor | None = None


def compute_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    *,
    batches: torch.Tensor | None = None,
    penalty: torch.Tensor | None = None,
    scale_rewards: str = "group",
    reward_baseline: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
    advantage_clip: float | None = None,
    reward_threshold: float | None = None,
    advantage_fn: AdvantageFunction | None = None,
) -> Advantages:
    """Compute advantages relative to the group of one prompt (GRPO, arXiv 2402.03300).

    Args:
        rewards: `(samples, functions)` float32; NaN where a function leaves the sample out. The sample then takes no
            part in that function's statistics, and the function neither helps nor harms it: where the functions are
            combined first, it gets the mean of the samples that it is compared with (TRL gives it 0). A sample left
            out by all has the advantage 0.
        groups: `(samples,)` int64, the group of each sample; any numbers, in any order, at least two samples per
            group.
        weights: `(functions,)`, weight of each function.
        batches: `(samples,)` int64, the batch of each sample; a batch holds whole groups. By default there is one.
        penalty: `(samples,)`, subtracted from the weighted reward before it is normalised, or from each reward where
            these are normalised one by one.
        scale_rewards: what the distance to the mean is divided by: the unbiased standard deviation of the `"group"`,
            that of the whole `"batch"` (Flow-GRPO's global std), or nothing (`"none"`, Dr. GRPO).
        reward_baseline: the mean that is subtracted: that of the `"group"` or of the `"batch"`. With `"batch"`, a
            group may have a single sample, and the default scale is the batch's too.
        multi_objective_aggregation: `"sum_then_normalize"` normalises the weighted sum of the functions,
            `"normalize_then_sum"` sums the normalised functions (GDPO, arXiv 2601.05242, without its last division by
            the batch's std, which only rescales). `"loss_per_reward"` normalises and clips each function by itself,
            for a loss that is summed over them (DanceGRPO's code for video, arXiv 2505.07818).
            `"min_then_normalize"` and `"product_then_normalize"` take the functions' minimum or product in place of
            the sum (`combine`).
        advantage_clip: advantages are clamped to plus and minus this, at the very end.
        reward_threshold: a group whose mean weighted reward is below this gets the advantage 0.
        advantage_fn: computes the advantages in place of the normalisation that `scale_rewards`, `reward_baseline` and
            `multi_objective_aggregation` choose; clip, threshold and penalty still apply. See
            [`~diffusion_grpo.algorithms.advantages.load_advantage_fn`].

    Raises:
        ValueError: shapes that do not fit, a group of one sample, an unknown option, or an `advantage_fn` that does
            not return one finite number per sample.

    Examples:
        >>> rewards = torch.tensor([[1.0], [2.0], [3.0]])  # three samples of one prompt, one reward
        >>> found = compute_advantages(rewards, torch.zeros(3, dtype=torch.long), torch.ones(1))
        >>> [round(value, 3) for value in found.advantages.tolist()]
        [-1.0, 0.0, 1.0]
    """
    baseline = reward_baseline if advantage_fn is None else "batch"  # groups may then have a single sample
    check_inputs(rewards, groups, weights, scale_rewards, baseline, multi_objective_aggregation)
    if advantage_fn is not None and multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={multi_objective_aggregation!r} has no effect with an advantage_fn, which "
            "gets every reward; leave one of them out."
        )
    device, rewards, weights = rewards.device, rewards.detach().cpu().double(), weights.detach().cpu().double()
    # consecutive numbers from 0
    group, batch = (
        torch.unique(names.cpu(), return_inverse=True)[1]
        for names in (groups, torch.zeros_like(groups) if batches is None else batches)
    )
    has_groups = len(group.unique()) < len(group)  # an advantage_fn may be given one sample per prompt
    compared = group if reward_baseline == "group" and has_groups else batch
    scaled = {"group": compared, "batch": batch, "none": None}[scale_rewards]
    total = combine(rewards, weights, multi_objective_aggregation, compared)
    std = group_statistics(total, compared)[1]
    one_by_one = multi_objective_aggregation in ONE_BY_ONE
    columns = rewards if one_by_one or advantage_fn is not None else total[:, None]
    if penalty is not None:
        columns = columns - penalty.detach().cpu().double()[:, None]
    if advantage_fn is None:
        columns = torch.stack([normalize(column, compared, scaled) for column in columns.unbind(1)], 1)
    else:
        columns = apply_advantage_fn(advantage_fn, columns, group, weights, batch)[:, None]
    is_dropped = group_statistics(total, group)[0] < (-torch.inf if reward_threshold is None else reward_threshold)
    columns = columns.masked_fill(is_dropped[:, None], 0.0)
    advantages = sum_weighted(columns, weights) if one_by_one else columns[:, 0]
    clip = torch.inf if advantage_clip is None else advantage_clip
    is_apart = multi_objective_aggregation == "loss_per_reward"
    return Advantages(
        advantages=(advantages if is_apart else advantages.clamp(-clip, clip)).float().to(device),
        ranking=advantages.masked_fill(total.isnan(), torch.nan).float().to(device),
        rewards=total.float().to(device),
        group_std=std.float().to(device),
        frac_reward_zero_std=(std == 0).double().mean().item(),
        is_dropped=is_dropped.to(device),
        by_reward=columns.clamp(-clip, clip).float().to(device) if is_apart else None,
    )


def check_inputs(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    scale_rewards: str,
    reward_baseline: str,
    multi_objective_aggregation: str,
) -> None:
    """Refuse what `compute_advantages` cannot work with."""
    if rewards.ndim != 2 or groups.shape != rewards.shape[:1] or weights.shape != rewards.shape[1:]:
        raise ValueError(
            "rewards, groups and weights must have the shapes (samples, functions), (samples,) and (functions,), not "
            f"{tuple(rewards.shape)}, {tuple(groups.shape)} and {tuple(weights.shape)}."
        )
    names, counts = torch.unique(groups, return_counts=True)
    if (counts < 2).any() and reward_baseline == "group":
        raise ValueError(
            f"Group {names[counts < 2][0].item()} has a single sample, which has nothing to be compared with; "
            "set num_generations to 2 or more."
        )
    options = {
        "reward_baseline": (reward_baseline, ("group", "batch")),
        "scale_rewards": (scale_rewards, ("group", "batch", "none")),
        "multi_objective_aggregation": (multi_objective_aggregation, AGGREGATIONS),
    }
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}.")


def combine(
    columns: torch.Tensor, weights: torch.Tensor, aggregation: str, compared: torch.Tensor | None = None
) -> torch.Tensor:
    """Combine `(samples, functions)` rewards into one number per sample, NaN where every function is NaN.

    NaN counts as the function's mean over the samples with an equal number in `compared`, by default all. If the
    function scored none of them, it is left out of a minimum or product; a sum takes its mean over all samples.
    """
    is_unscored, filled = columns.isnan().all(1), columns
    is_filled = columns.isnan() & ~is_unscored[:, None]
    if is_filled.any():
        compared = torch.zeros(len(columns), dtype=torch.int64) if compared is None else compared
        means = torch.stack([group_statistics(column, compared)[0] for column in columns.unbind(1)], 1)
        filled = torch.where(is_filled, means, columns)
    is_missing = filled.isnan()
    if aggregation == "min_then_normalize":
        total = (filled * weights).masked_fill(is_missing, torch.inf).amin(1)
    elif aggregation == "product_then_normalize":
        factors = (filled**weights).masked_fill(is_missing, 1.0)
        if (filled < 0).any() or not factors.isfinite().all():
            raise ValueError(
                f"product_then_normalize multiplies rewards, but one is {filled[~is_missing].min().item():g}; give "
                "that reward a clip of [0, high], positive weights, or use min_then_normalize."
            )
        total = factors.prod(1)
    else:
        total = sum_weighted(torch.where(is_missing, columns.nanmean(0), filled), weights)
    return total.masked_fill(is_unscored, torch.nan)


def sum_weighted(columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum `(samples, functions)` by `(functions,)` weights to `(samples,)`: NaN counts as 0; all NaN is NaN."""
    return (columns.nan_to_num(nan=0.0) * weights).sum(1).masked_fill(columns.isnan().all(1), torch.nan)


def group_statistics(rewards: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased standard deviation of each sample's group, both `(samples,)`; NaN does not count.

    The standard deviation is exactly 0 for equal or fewer than two rewards; the mean of no rewards is NaN.
    """
    mean, std = torch.full_like(rewards, torch.nan), torch.zeros_like(rewards)
    for group in range(int(index.max()) + 1):
        members = index == group
        values = rewards[members & ~rewards.isnan()]
        mean[members] = values.mean()
        if len(values) > 1 and values.max() - values.min() > EQUAL * values.abs().max():
            std[members] = values.std()
    return mean, std


def normalize(rewards: torch.Tensor, compared: torch.Tensor, scaled: torch.Tensor | None) -> torch.Tensor:
    """Return the scaled distance of rewards to their mean; exactly 0 for NaN and where all rewards are equal.

    Samples with equal numbers in `compared` share the mean, those in `scaled` the standard deviation; None divides by
    nothing.
    """
    mean, std = group_statistics(rewards, compared)
    scale = torch.ones_like(std) if scaled is None else group_statistics(rewards, scaled)[1] + EPS
    return ((rewards - mean) / scale).masked_fill((std == 0) | rewards.isnan(), 0.0)


def best_of_n(advantages: torch.Tensor, groups: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
    """Keep the n/2 best and n/2 worst samples of each group, which carry most of the signal (arXiv 2505.07818).

    Samples without a value are kept only if fewer than n have one.

    Args:
        advantages: `(samples,)`; NaN for a sample that no reward scored.
        groups: `(samples,)` int64, the group of each sample.
        n: even, at least 2, at most the size of the smallest group.
        generator: CPU generator that shuffles the kept samples.

    Returns:
        `(n * number of groups,)` int64: indices of the kept samples, on the device of `advantages`.

    Raises:
        ValueError: `n` is odd, below 2, or larger than a group.

    Examples:
        >>> advantages, groups = torch.tensor([0.1, -1.2, 1.3, -0.2]), torch.zeros(4, dtype=torch.long)
        >>> kept = best_of_n(advantages, groups, 2, torch.Generator())
        >>> sorted(kept.tolist())
        [1, 2]
    """
    values, names = advantages.detach().cpu(), groups.cpu()
    smallest = int(torch.unique(names, return_counts=True)[1].min())
    if n < 2 or n % 2 or n > smallest:
        raise ValueError(
            f"best_of_n must be even, at least 2 and at most the group's size (num_generations) {smallest}, not {n}."
        )
    kept = []
    for name in torch.unique(names):
        members = (names == name).nonzero().squeeze(1)
        is_unscored = values[members].isnan()
        scored, others = members[~is_unscored], members[is_unscored]
        order = scored[values[scored].argsort(descending=True, stable=True)]
        if len(order) < n:
            order = torch.cat([order, others[: n - len(order)]])
        kept += [order[: n // 2], order[-n // 2 :]]
    kept = torch.cat(kept)
    return kept[torch.randperm(len(kept), generator=generator)].to(advantages.device)


# Generalized advantage estimation


def estimate_advantages(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Estimate advantages by GAE (arXiv 1506.02438) over the trained steps; the value after the last step is 0.

    `A_t = delta_t + gamma * lam * A_(t+1)` with `delta_t = r_t + gamma * V_(t+1) - V_t`. With `gamma = lam = 1`, `A_t`
    is the sum of the rewards from step t on, minus the value.

    Args:
        rewards: `(samples, steps)`, received after each step.
        values: `(samples, steps)`, of the state before each step.
        gamma: discount per step, in [0, 1].
        lam: 0 relies on the next value, 1 on the rewards alone.

    Returns:
        `(samples, steps)` float64.

    Examples:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3)
        >>> estimate_advantages(rewards, values, gamma=1.0, lam=1.0).tolist()
        [[1.0, 1.0, 1.0]]
    """
    rewards, values = rewards.double(), values.double()
    advantages = torch.empty_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        following = delta + gamma * lam * following
        advantages[:, step], next_value = following, values[:, step]
    return advantages


# A function of the user's own, `advantage_fn`, in place of the normalisation relative to the group


def load_advantage_fn(path: str | AdvantageFunction | None) -> AdvantageFunction | None:
    """Import an advantage function (docs/algorithms/own.md)."""
    if path is None:
        return None
    function: Any = path
    if isinstance(path, str):
        try:
            function = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"advantage_fn={path!r} cannot be imported ({error}); give the dotted path of a function, "
                "my_package.my_advantages."
            ) from error
    if not callable(function):
        raise ValueError(f"advantage_fn={path!r} is a {type(function).__name__}; give the path of a function.")
    try:
        inspect.signature(function).bind(None, None, weights=None, batches=None)
    except TypeError as error:
        raise ValueError(
            f"advantage_fn={path!r} must take (rewards, groups, *, weights, batches): {error}."
        ) from error
    return function


def apply_advantage_fn(
    function: AdvantageFunction,
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    batches: torch.Tensor,
) -> torch.Tensor:
    """Call an advantage function, and return (samples,) float64 advantages, 0 for samples without a score."""
    name = getattr(function, "__name__", type(function).__name__)
    is_scored = ~rewards.isnan().all(1)
    values = function(rewards.clone(), groups.clone(), weights=weights.clone(), batches=batches.clone())
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if values.shape != groups.shape:
        raise ValueError(
            f"advantage_fn {name} returned the shape {tuple(values.shape)} for {len(groups)} samples; return one "
            f"number per sample, ({len(groups)},)."
        )
    wrong = (is_scored & ~values.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"advantage_fn {name} returned {values[wrong[0]].item()} for sample {wrong[0]}, whose rewards are "
            f"{rewards[wrong[0]].tolist()}; return finite numbers. NaN among the rewards is a function that left the "
            "sample out."
        )
    return values.masked_fill(~is_scored, 0.0)
