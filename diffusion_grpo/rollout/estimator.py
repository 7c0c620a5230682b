"""Compute advantages from the rewards of a rollout: relative to the group, or with a value model and GAE."""

import dataclasses

import torch
from torch import Tensor

from ..algorithms.advantages import Advantages, compute_advantages, estimate_advantages, load_advantage_fn, normalize
from ..algorithms.losses import sample_weights
from ..config.settings import DiffusionGRPOConfig
from .value_model import ValueModel, ValueTargets


@dataclasses.dataclass
class SampleAdvantages:
    """What the rewards come to for some samples.

    Attributes:
        values: `(samples,)` float32; `(samples, rewards)` for a loss that is summed over rewards; `(samples, steps)`
            with a value model.
        targets: what the value model is trained on, if there is one.
        weights: `(samples,)` float32 weight of each sample's loss; None where all are 1.
    """

    values: Tensor
    targets: ValueTargets | None = None
    weights: Tensor | None = None

    def __getitem__(self, indices: Tensor | slice) -> "SampleAdvantages":
        parts = (None if part is None else part[indices] for part in (self.targets, self.weights))
        return SampleAdvantages(self.values[indices], *parts)


@dataclasses.dataclass
class Estimate:
    """The advantages of all samples of a rollout by position, and values to log; `columns` are of this process."""

    result: Advantages
    advantages: SampleAdvantages
    columns: dict[str, list[float]]
    metrics: dict[str, float]


class AdvantageEstimator:
    """Conversion of a rollout's rewards into advantages, with a value model for `advantage_estimator="gae"`."""

    def __init__(
        self, args: DiffusionGRPOConfig, names: list[str], weights: list[float], values: ValueModel | None = None
    ):
        self._args, self.names, self._weights, self.values = args, names, torch.tensor(weights), values
        self._ranks, self._takes_gradients = args.recording.ranks, args.takes_gradients
        self._clip = None if self._ranks else args.advantage_clip
        # a value model needs no groups: it also learns from equal rewards
        self._baseline = "group" if values is None and args.compares_groups else "batch"
        self._advantage_fn = load_advantage_fn(args.advantage_fn)

    def __call__(
        self, rewards: Tensor, positions: Tensor, divergences: Tensor | None = None, states: Tensor | None = None
    ) -> Estimate:
        """Return the advantages of a rollout.

        `rewards` (samples, functions) and, with `kl_reward`, `divergences` (samples, steps) are of all processes by
        position, so that groups are consecutive; `positions` are those of this process.
        """
        args, every_position = self._args, torch.arange(len(rewards))
        batches = every_position * args.num_batches_per_step // len(rewards)
        result = compute_advantages(
            rewards,
            every_position // args.num_generations,
            self._weights,
            batches=batches,
            penalty=None if divergences is None else args.kl_reward * divergences.mean(1),
            scale_rewards=args.scale_rewards,
            reward_baseline=self._baseline,
            multi_objective_aggregation=args.multi_objective_aggregation,
            advantage_clip=self._clip,
            reward_threshold=args.reward_threshold,
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
            columns["advantage"] = every[positions].mean(1).tolist()
            columns["value"] = targets.values[positions, 0].tolist()
        metrics |= measure_spread("advantage", every)
        metrics["spread/advantage_mean"] = every.double().mean().item()
        metrics["frac_advantage_zero"] = (every == 0).reshape(len(every), -1).all(1).double().mean().item()
        if self._clip is not None:
            metrics["frac_advantage_clipped"] = (every.abs() >= self._clip).double().mean().item()
        if self._takes_gradients:  # nothing is weighted by advantages, and equal rewards are no reason for a warning
            silent = ("spread/advantage", "frac_")
            metrics = {name: value for name, value in metrics.items() if not name.startswith(silent)}
        return Estimate(result, SampleAdvantages(every, targets), columns, metrics)

    def weigh(self, found: Estimate, trained: Tensor) -> SampleAdvantages:
        """Return the advantages, by position, with weights for the losses of the trained samples if any is not 1."""
        is_scored = ~found.result.rewards.isnan()
        weights = None
        if self._args.drop_zero_advantages:
            weights = sample_weights(found.advantages.values, trained)
        elif self._ranks and not is_scored.all():
            weights = is_scored.float()
        return dataclasses.replace(found.advantages, weights=weights)

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
            rewards -= self._args.kl_reward * divergences.double() / divergences.shape[1]
        values = model(states.to(model.state_mean.device)).double().cpu()
        advantages = estimate_advantages(rewards, values, self._args.gamma, self._args.gae_lambda)
        targets = ValueTargets(states, values.float(), (advantages + values).float())
        if self._args.scale_rewards == "none":
            advantages = advantages.nan_to_num(nan=0.0)
        else:
            index = batches[:, None].expand_as(advantages).flatten()
            advantages = normalize(advantages.flatten(), index, index).view_as(advantages)
        advantages = advantages.masked_fill(result.is_dropped[:, None], 0.0)
        if self._clip is not None:
            advantages = advantages.clamp(-self._clip, self._clip)
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
    statistics = {"min": values.min(), "max": values.max(), "std": values.std()}
    return {f"spread/{name}_{key}": value.item() for key, value in statistics.items()}
