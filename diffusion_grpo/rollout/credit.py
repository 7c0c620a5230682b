"""Compute advantages from the rewards of a rollout: relative to the group, or with a value model and GAE."""

import dataclasses

import torch
from torch import Tensor

from ..algorithms.advantage_fn import AdvantageFunction
from ..algorithms.advantages import Advantages, compute_advantages, normalize
from ..algorithms.gae import estimate_advantages
from .value_model import ValueModel, ValueTargets


@dataclasses.dataclass
class Estimate:
    """The advantages of a rollout, and values to log.

    Attributes:
        advantages: advantages of this process's samples: `(samples,)`; `(samples, rewards)` for a loss that is summed
            over rewards; `(samples, steps)` with a value model.
    """

    result: Advantages
    advantages: Tensor
    targets: ValueTargets | None
    every: Tensor
    columns: dict[str, list[float]]
    metrics: dict[str, float]


class CreditAssigner:
    """Conversion of a rollout's rewards into advantages."""

    def __init__(
        self,
        names: list[str],
        weights: list[float],
        *,
        num_generations: int,
        num_batches: int = 1,
        kl_reward: float = 0.0,
        scale_rewards: str = "group",
        reward_baseline: str = "group",
        multi_objective_aggregation: str = "sum_then_normalize",
        advantage_clip: float | None = None,
        reward_threshold: float | None = None,
        advantage_fn: AdvantageFunction | None = None,
        values: ValueModel | None = None,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
    ):
        self.names, self.weights, self.values = names, weights, values
        self._num_generations, self._num_batches, self._kl_reward = num_generations, num_batches, kl_reward
        self._scale_rewards, self._reward_baseline = scale_rewards, reward_baseline
        self._aggregation, self._advantage_clip = multi_objective_aggregation, advantage_clip
        self._reward_threshold, self._gamma, self._gae_lambda = reward_threshold, gamma, gae_lambda
        self._advantage_fn = advantage_fn

    def __call__(
        self, rewards: Tensor, positions: Tensor, divergences: Tensor | None = None, states: Tensor | None = None
    ) -> Estimate:
        """Return the advantages of a rollout.

        Args:
            rewards: `(samples, functions)` rewards of all processes, in the order of positions, so that groups are
                consecutive.
            divergences: `(samples, steps)` KL divergences from the reference by position, if `kl_reward` is above 0.
        """
        every_position = torch.arange(len(rewards))
        batches = every_position * self._num_batches // len(rewards)
        result = compute_advantages(
            rewards,
            every_position // self._num_generations,
            torch.tensor(self.weights),
            batches=batches,
            penalty=None if divergences is None else self._kl_reward * divergences.mean(1),
            scale_rewards=self._scale_rewards,
            # a value model needs no groups: it also learns from equal rewards
            reward_baseline=self._reward_baseline if self.values is None else "batch",
            multi_objective_aggregation=self._aggregation,
            advantage_clip=self._advantage_clip,
            reward_threshold=self._reward_threshold,
            advantage_fn=self._advantage_fn,
        )
        every, targets = result.advantages, None
        columns = {"reward": result.rewards[positions].tolist(), "advantage": every[positions].tolist()}
        metrics = self._measure(rewards, result)
        if divergences is not None:
            columns["kl"] = divergences.mean(1)[positions].tolist()
            metrics["kl/rollout"] = divergences.mean().item()
        if result.by_reward is not None:
            every = result.by_reward
            names = zip(self.names, every[positions].T, strict=True)
            columns |= {f"advantage/{name}": column.tolist() for name, column in names}
        if self.values is not None:
            every, targets = self._estimate_values(result, batches, divergences, states)
            metrics |= measure_values(targets)
            targets = targets[positions]
            columns["advantage"] = every[positions].mean(1).tolist()
            columns["value"] = targets.values[:, 0].tolist()
        metrics |= measure_spread("advantage", every)
        metrics["spread/advantage_mean"] = every.double().mean().item()
        metrics["frac_advantage_zero"] = (every == 0).reshape(len(every), -1).all(1).double().mean().item()
        if self._advantage_clip is not None:
            metrics["frac_advantage_clipped"] = (every.abs() >= self._advantage_clip).double().mean().item()
        return Estimate(result, every[positions], targets, every, columns, metrics)

    def _measure(self, rewards: Tensor, result: Advantages) -> dict[str, float]:
        """Return metrics of the rewards of a rollout."""
        metrics = {
            "reward_std": result.group_std.mean().item(),
            "frac_reward_zero_std": result.frac_reward_zero_std,
            **measure_spread("reward", result.rewards),
        }
        if not result.rewards.isnan().all():
            metrics["reward"] = result.rewards.nanmean().item()
        for name, column in zip(self.names, rewards.T, strict=True):
            known = column[~column.isnan()]
            if len(known):
                metrics[f"rewards/{name}/mean"] = known.mean().item()
            if len(known) > 1:  # unbiased, like `reward_std` of the groups
                metrics[f"rewards/{name}/std"] = known.std().item()
        return metrics

    @torch.no_grad()
    def _estimate_values(
        self, result: Advantages, batches: Tensor, divergences: Tensor | None, states: Tensor
    ) -> tuple[Tensor, ValueTargets]:
        """Return `(samples, steps)` advantages relative to the value model, and the model's training targets.

        The reward is given after the last trained step; the KL penalty is spread over the steps. Advantages are
        normalized over all samples and steps of a batch, unless `scale_rewards` is "none".
        """
        total, model = result.rewards.double(), self.values
        if not model.is_calibrated:
            is_known = ~total.isnan()
            if is_known.any():
                model.calibrate(states[is_known], total[is_known])
        rewards = torch.zeros(states.shape[:2], dtype=torch.float64)
        rewards[:, -1] = total
        if divergences is not None:
            rewards -= self._kl_reward * divergences.double() / divergences.shape[1]
        values = model(states.to(model.state_mean.device)).double().cpu()
        advantages = estimate_advantages(rewards, values, self._gamma, self._gae_lambda)
        targets = ValueTargets(states, values.float(), (advantages + values).float())
        if self._scale_rewards == "none":
            advantages = advantages.nan_to_num(nan=0.0)
        else:
            index = batches[:, None].expand_as(advantages).flatten()
            advantages = normalize(advantages.flatten(), index, index).view_as(advantages)
        advantages = advantages.masked_fill(result.is_dropped[:, None], 0.0)
        if self._advantage_clip is not None:
            advantages = advantages.clamp(-self._advantage_clip, self._advantage_clip)
        return advantages.float(), targets


def measure_values(targets: ValueTargets) -> dict[str, float]:
    """Return the mean value, and the share of the variance of returns that the value model explains (at most 1)."""
    is_known = ~targets.returns.isnan()
    values, returns = targets.values[is_known].double(), targets.returns[is_known].double()
    metrics = {"value/mean": targets.values.mean().item()}
    if len(returns) > 1 and returns.var() > 0:
        metrics["value/explained_variance"] = (1 - (returns - values).var() / returns.var()).item()
    return metrics


def measure_spread(name: str, values: Tensor) -> dict[str, float]:
    """Return `spread/{name}_min`, `_max` and the unbiased `_std` over all values that are not NaN."""
    values = values[~values.isnan()].double()
    if len(values) < 2:
        return {}
    found = {"min": values.min(), "max": values.max(), "std": values.std()}
    return {f"spread/{name}_{key}": value.item() for key, value in found.items()}
