"""From the rewards of a whole rollout to what is trained on: the group's statistics, or a value model with GAE.

In: rewards, KL divergences and states of every process' samples. Out: an `Estimate` for the samples of this process.
A module of its own because it is where settings, rewards and the value model meet; the trainer knows neither of their
shapes.
"""

import dataclasses

import torch
from torch import Tensor

from ..algorithms.advantages import Advantages, compute_advantages, normalize
from ..config.settings import DiffusionGRPOConfig
from .value_model import ValueModel, ValueTargets, generalized_advantages


@dataclasses.dataclass
class Estimate:
    """What the rewards of a rollout come to.

    Attributes:
        result: of all samples of all processes, for the log.
        advantages: here and below of the samples of this process. `(samples,)`; `(samples, rewards)` for a loss that
            is summed over rewards; `(samples, steps)` with a value model.
        targets: of the value model, or `None`.
        every: the advantages of all samples of all processes.
        columns: for the table of samples, one value a sample.
        metrics: by the key under which they are logged.
    """

    result: Advantages
    advantages: Tensor
    targets: ValueTargets | None
    every: Tensor
    columns: dict[str, list[float]]
    metrics: dict[str, float]


def estimate(
    args: DiffusionGRPOConfig,
    weights: list[float],
    names: list[str],
    rewards: Tensor,
    positions: Tensor,
    divergences: Tensor | None = None,
    states: Tensor | None = None,
    model: ValueModel | None = None,
) -> Estimate:
    """Advantages by the settings.

    Args:
        args: of the run.
        weights, names: one a reward function.
        rewards: `(samples, functions)` of all processes, by their position in the generation: groups side by side.
        positions: `(samples of this process,)` int64, where they are in it.
        divergences: `(samples, steps)` KL divergence from the reference, where `kl_reward` is above 0.
        states: `(samples, steps, STATE_SIZE)`, with a value model.
        model: the value model; without one advantages are relative to the group.
    """
    places = torch.arange(len(rewards))
    groups, batches = places // args.num_generations, places * args.num_batches_per_step // len(rewards)
    result = compute_advantages(
        rewards,
        groups,
        torch.tensor(weights),
        batches=batches,
        penalty=None if divergences is None else args.kl_reward * divergences.mean(1),
        scale_rewards=args.scale_rewards,
        # a value model needs no group: equal rewards in one teach it something too
        reward_baseline=args.reward_baseline if model is None else "batch",
        multi_objective_aggregation=args.multi_objective_aggregation,
        advantage_clip=args.advantage_clip,
        reward_threshold=args.reward_threshold,
    )
    every = result.advantages
    columns = {"reward": result.rewards[positions].tolist(), "advantage": every[positions].tolist()}
    metrics, targets = {}, None
    if divergences is not None:
        columns["kl"] = divergences.mean(1)[positions].tolist()
        metrics["kl/rollout"] = divergences.mean().item()
    if result.by_reward is not None:
        every = result.by_reward
        columns |= {
            f"advantage/{name}": column.tolist() for name, column in zip(names, every[positions].T, strict=True)
        }
    if model is not None:
        every, targets = value_advantages(args, result, batches, divergences, states, model)
        metrics |= value_metrics(targets)
        targets = targets[positions]
        columns["advantage"] = every[positions].mean(1).tolist()
        columns["value"] = targets.values[:, 0].tolist()
    return Estimate(result, every[positions], targets, every, columns, metrics)


@torch.no_grad()
def value_advantages(
    args: DiffusionGRPOConfig,
    result: Advantages,
    batches: Tensor,
    divergences: Tensor | None,
    states: Tensor,
    model: ValueModel,
) -> tuple[Tensor, ValueTargets]:
    """`(samples, steps)` advantages against a value model, and what it is to learn.

    The reward comes after the last trained step; the KL penalty is spread over the steps. Advantages are normalised
    over all samples and steps of the batch, unless `scale_rewards` is "none".
    """
    total = result.rewards.double()
    if not model.is_calibrated:
        is_known = ~total.isnan()
        if is_known.any():
            model.calibrate(states[is_known], total[is_known])
    rewards = torch.zeros(states.shape[:2], dtype=torch.float64)
    rewards[:, -1] = total
    if divergences is not None:
        rewards -= args.kl_reward * divergences.double() / divergences.shape[1]
    values = model(states.to(model.state_mean.device)).double().cpu()
    advantages = generalized_advantages(rewards, values, args.gamma, args.gae_lambda)
    targets = ValueTargets(states, values.float(), (advantages + values).float())
    if args.scale_rewards == "none":
        advantages = advantages.nan_to_num(nan=0.0)
    else:
        index = batches[:, None].expand_as(advantages).flatten()
        advantages = normalize(advantages.flatten(), index, index).view_as(advantages)
    advantages = advantages.masked_fill(result.is_dropped[:, None], 0.0)
    if args.advantage_clip is not None:
        advantages = advantages.clamp(-args.advantage_clip, args.advantage_clip)
    return advantages.float(), targets


def value_metrics(targets: ValueTargets) -> dict[str, float]:
    """How well the value model foresaw the rollout: its mean, and 1 where nothing is left to explain."""
    is_known = ~targets.returns.isnan()
    values, returns = targets.values[is_known].double(), targets.returns[is_known].double()
    metrics = {"value/mean": targets.values.mean().item()}
    if len(returns) > 1 and returns.var() > 0:
        metrics["value/explained_variance"] = (1 - (returns - values).var() / returns.var()).item()
    return metrics


def measure_spread(name: str, values: Tensor) -> dict[str, float]:
    """`spread/{name}_min`, `_max` and the unbiased `_std` over all values that are not NaN."""
    values = values[~values.isnan()].double()
    if len(values) < 2:
        return {}
    found = {"min": values.min(), "max": values.max(), "std": values.std()}
    return {f"spread/{name}_{key}": value.item() for key, value in found.items()}
