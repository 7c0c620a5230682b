"""What is checked and decided before a model is loaded."""

import dataclasses
from typing import Any

import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import PeftConfig

from ..config.settings import DiffusionGRPOConfig
from ..data.prompts import check_dataset, name_datasets
from ..distributed.backend import DistributedBackend
from ..distributed.context_parallel import ContextGroups
from ..distributed.deepspeed import DeepSpeedBackend, hide_deepspeed, set_learning_rate
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
from ..run.adapters import continues_lora
from ..run.card_data import find_license
from ..run.records import make_record
from ..tiny import default_settings
from .model import check_args, check_model, check_peft_config, name_model
from .watched_rewards import load_watched_rewards

LORA_LEARNING_RATE, FULL_LEARNING_RATE = 3e-4, 1e-5  # where the settings give none


def prepare_args(model: str | DiffusionPipeline, args: DiffusionGRPOConfig | None) -> DiffusionGRPOConfig:
    """Return the settings of a run: those that are given, with the tiny model's own defaults, or the usual ones.

    Raises:
        TypeError: `model` or `args` is something else.
    """
    check_model(model)
    check_args(args)
    args = args or DiffusionGRPOConfig(f"{name_model(model).split('/')[-1]}-GRPO")
    if model == "tiny":
        args.fill(default_settings(args.given))
    return args


def prepare_training(args: DiffusionGRPOConfig, peft_config: PeftConfig | None) -> bool:
    """Check what is trained, and fill in the learning rate where the settings give none.

    Returns:
        whether all weights of the network are trained, without a LoRA.

    Raises:
        ValueError: an adapter that cannot be trained here, or a moving reference without full training.
    """
    check_peft_config(peft_config, args.beta or args.kl_reward)
    continues = continues_lora(args.lora_path, args.lora_adapter, peft_config)  # refuses a peft_config beside a LoRA
    is_full_training = peft_config is None and not continues
    if args.sync_ref_model and not is_full_training:
        raise ValueError("sync_ref_model=True needs full training: a LoRA's reference is the frozen base.")
    if args.learning_rate is None:
        set_learning_rate(args, FULL_LEARNING_RATE if is_full_training else LORA_LEARNING_RATE)
    return is_full_training


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
    watched = load_watched_rewards(args.watch_rewards, None, trained)  # refuses unknown names
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
    for name, dataset in name_datasets(train_dataset, eval_dataset):
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


def describe_run(
    model: str | DiffusionPipeline, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, rewards: RunRewards
) -> dict[str, Any]:
    """Return what run.json says before the model is loaded."""
    evaluated = [reward.name for reward in rewards.evaluated]
    run = make_record(name_model(model), args, peft_config, rewards.names, evaluated, rewards.weights)
    run["reward_options"] = {reward.name: reward.options() for reward in rewards.all}
    run["license"] = find_license(name_model(model))
    return run
