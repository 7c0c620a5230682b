"""From the settings to the objects that the trainer holds; packages below this one are given values, not `args`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from ..algorithms.base import Algorithm
from ..algorithms.grpo import GRPO
from ..algorithms.losses import get_loss
from ..config.settings import DiffusionGRPOConfig
from ..data.prompts import check_dataset, named_datasets
from ..distributed.backend import DistributedBackend
from ..distributed.context_parallel import ContextGroups
from ..distributed.deepspeed import DeepSpeedBackend, hide_deepspeed
from ..distributed.fsdp import FSDP2Backend, wants_fsdp
from ..rewards import (
    Reward,
    check_columns,
    check_eval_rewards,
    check_groups,
    check_needs,
    load_rewards,
    reward_weights,
)
from ..rewards.reward_processes import is_scorer
from ..rollout.credit import CreditAssigner
from ..rollout.sampling_plan import SamplingPlan
from ..rollout.value_model import ValueModel
from ..run.sample_writer import KeptSamples, SampleWriter
from ..run.watch import watched_rewards
from .evaluation import EvaluationSettings


@dataclasses.dataclass(frozen=True)
class RunRewards:
    """The rewards of a run.

    Attributes:
        trained: those that are trained on.
        weights: one for each of them.
        evaluated: those that are only measured, in evaluations.
    """

    trained: list[Reward]
    weights: list[float]
    evaluated: list[Reward]

    @property
    def names(self) -> list[str]:
        """Names of the trained rewards."""
        return [reward.name for reward in self.trained]

    @property
    def all(self) -> list[Reward]:
        """Those that are trained on, and those that are only measured."""
        return self.trained + self.evaluated


def load_run_rewards(reward_funcs: Any, eval_reward_funcs: Any, args: DiffusionGRPOConfig) -> RunRewards:
    """Read the rewards in any form that a user may write, and check what they need.

    Raises:
        ValueError: an unknown reward or option, a missing package or file, or groups that a reward cannot be given.
    """
    trained = load_rewards(reward_funcs)
    evaluated = load_rewards(eval_reward_funcs, "eval_reward_funcs")
    check_eval_rewards(trained, evaluated)
    names = {reward.name for reward in trained}
    evaluated = [reward for reward in evaluated if reward.name not in names]  # trained ones are measured anyway
    watched = watched_rewards(args.watch_rewards, None, trained)  # refuses unknown names
    if not args.scores_on_some or is_scorer(make_groups(args), args.reward_processes):  # the others load nothing
        check_needs([*trained, *evaluated, *watched])
    weights = reward_weights(trained, args.reward_weights)
    if not args.scores_on_some:  # where groups are put together first
        check_groups(trained, args.batch_sizes.consecutive_samples, args.num_generations)
    return RunRewards(trained, weights, evaluated)


def check_datasets(
    rewards: RunRewards,
    args: DiffusionGRPOConfig,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
) -> None:
    """Refuse datasets without prompts, or without a column that a reward asks for.

    Raises:
        ValueError: such a dataset, or evaluations without one.
    """
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        check_dataset(dataset, name)
        evaluated = rewards.evaluated if name != "train_dataset" else []
        check_columns(rewards.trained + evaluated, dataset.column_names, name)
    if rewards.evaluated and not eval_dataset:
        raise ValueError(
            f"eval_reward_funcs={rewards.evaluated[0].name} has no prompts to be measured on; pass an eval_dataset."
        )
    if args.eval_strategy != "no" and not eval_dataset:
        raise ValueError(f"eval_strategy={args.eval_strategy.value!r} has nothing to evaluate; pass an eval_dataset.")


def make_groups(args: DiffusionGRPOConfig) -> ContextGroups:
    """Describe the groups of processes that share the sequence of each sample."""
    is_ring = args.context_parallel_type == "ring"
    return ContextGroups(args.context_parallel_size, args.world_size, args.process_index, is_ring)


def choose_backend(args: DiffusionGRPOConfig) -> DistributedBackend:
    """Choose what answers for the processes of a run.

    Raises:
        ValueError: a configuration of DeepSpeed or FSDP that cannot train here, or several GPUs without a launcher.
    """
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    groups = make_groups(args)
    if args.n_gpu > 1:
        raise ValueError("Several GPUs need a launcher: start with `accelerate launch`, or make one GPU visible.")
    if args.deepspeed_plugin is not None:
        hide_deepspeed()
        return DeepSpeedBackend(half, groups, args.deepspeed_plugin, args.ds3_gather_for_generation)
    if wants_fsdp(args.fsdp):
        return FSDP2Backend(half, groups, args.fsdp_plugin_args, args.fsdp_gather_for_generation, args.world_size)
    return DistributedBackend(half, groups)


def make_algorithm(args: DiffusionGRPOConfig, component: tuple[str, ...], weights: list[float]) -> Algorithm:
    """Make the algorithm that the settings name.

    Args:
        args: of the run.
        component: names of the trained networks.
        weights: one per reward.

    Raises:
        ValueError: an unknown loss.
    """
    return GRPO(
        get_loss(args.loss_type),
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        beta=args.beta,
        anchors_on_replay=args.old_log_prob == "replay",
        is_first_replay=args.batch_sizes.updates_per_rollout == 1,
        max_ratio_error=args.max_ratio_error,
        take_turns=len(component) > 1,
        by_sequence=args.importance_sampling_level == "sequence",
        reward_weights=weights if args.multi_objective_aggregation == "loss_per_reward" else None,
    )


def make_sampling_plan(args: DiffusionGRPOConfig) -> SamplingPlan:
    """Say with which seeds and steps rollouts are made."""
    return SamplingPlan(
        seed=args.seed,
        num_generations=args.num_generations,
        num_inference_steps=args.num_inference_steps,
        window=args.window,
        window_size=args.sde_window_size,
        timestep_fraction=args.timestep_fraction,
        permute_steps=args.permute_steps,
        same_initial_noise=args.same_initial_noise,
        deterministic_outside_window=args.deterministic_outside_window,
    )


def make_credit(args: DiffusionGRPOConfig, rewards: RunRewards, values: ValueModel | None) -> CreditAssigner:
    """Make what turns rewards into advantages."""
    return CreditAssigner(
        rewards.names,
        rewards.weights,
        num_generations=args.num_generations,
        num_batches=args.num_batches_per_step,
        kl_reward=args.kl_reward,
        scale_rewards=args.scale_rewards,
        reward_baseline=args.reward_baseline,
        multi_objective_aggregation=args.multi_objective_aggregation,
        advantage_clip=args.advantage_clip,
        reward_threshold=args.reward_threshold,
        values=values,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
    )


def make_sample_writer(
    args: DiffusionGRPOConfig, rewards: RunRewards, groups: ContextGroups, sampling_rate: int | None
) -> SampleWriter:
    """Make what writes tables and files of samples."""
    sizes = args.batch_sizes
    return SampleWriter(
        Path(args.output_dir) / "samples",
        reward_names=rewards.names,
        kept=KeptSamples(
            sizes.samples_per_rollout,
            sizes.updates_per_rollout,
            args.save_samples_steps,
            args.log_samples_steps if args.log_completions else None,
            args.num_completions_to_log,
        ),
        fps=args.fps,
        sampling_rate=sampling_rate,
        part=f"-rank{groups.index}" if groups.count > 1 else "",
        is_active=groups.is_first,
        writes_tables=args.log_completions,
    )


def evaluation_settings(args: DiffusionGRPOConfig, sampling_rate: int | None) -> EvaluationSettings:
    """Say how evaluations are made."""
    return EvaluationSettings(
        seed=args.seed,
        num_generations=args.num_generations_eval,
        num_inference_steps=args.eval_num_inference_steps or args.num_inference_steps,
        batch_size=args.per_device_eval_batch_size,
        watched=args.watch_rewards,
        shown=args.num_completions_to_log,
        aggregation=args.multi_objective_aggregation,
        fps=args.fps,
        sampling_rate=sampling_rate,
        folder=Path(args.output_dir),
    )


def add_value_parameters(optimizer: torch.optim.Optimizer, values: nn.Module, learning_rate: float) -> None:
    """Give the value model a group of its own in the optimizer, once."""
    parameters = list(values.parameters())
    if not any(parameter is parameters[0] for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.add_param_group({"params": parameters, "lr": learning_rate, "weight_decay": 0.0})


Progress = Callable[[int], None]
