"""From the settings to the objects that the trainer holds; packages below this one are given values, not `args`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler

from ..algorithms.advantage_fn import load_advantage_fn
from ..algorithms.base import Algorithm
from ..algorithms.batch import Rows
from ..algorithms.choose import find_algorithm, load_algorithm
from ..config.checks import check_token_settings
from ..config.settings import DiffusionGRPOConfig
from ..data.held_out import count_prompts, name_prompts
from ..data.inputs import PipelineInputs
from ..data.sampler import GroupSampler
from ..distributed.backend import DistributedBackend
from ..distributed.context_parallel import ContextGroups
from ..distributed.failure import ProcessGroupMonitor
from ..distributed.generation import NetworkPasses
from ..distributed.weights import TrainedWeights
from ..media.files import find_sampling_rate
from ..policy.base import Policy
from ..rewards.overlap import Overlap
from ..rewards.reward_processes import SampleChannel
from ..rewards.unscored import UnscoredRollouts
from ..rollout.credit import CreditAssigner
from ..rollout.feed import RolloutFeed
from ..rollout.generation import RolloutGenerator
from ..rollout.reference import AdapterReference, CopiedReference
from ..rollout.replays import Replays
from ..rollout.sampling_plan import SamplingPlan
from ..rollout.scoring import RewardScorer, takes_only_latents
from ..rollout.value_model import ValueCallback, ValueModel
from ..run.adapters import list_kept_adapters
from ..run.card_data import pipeline_tag
from ..run.sample_writer import KeptSamples, SampleWriter
from ..run.weights import lora_loader
from .average import PolicyAverage
from .callbacks import (
    CollapseCallback,
    ReportCallback,
    SampleGridCallback,
    SyncRefModelCallback,
    ValidationCallback,
)
from .evaluation import EvaluationSettings, Evaluator
from .metrics import Metrics
from .progress import UpdateProgress
from .quantization import describe_quantization
from .show_progress import replace_progress
from .start import RunRewards
from .trackers import replace_trackers

AnyReference = AdapterReference | CopiedReference


def check_policy(args: DiffusionGRPOConfig, policy: Policy, rewards: RunRewards) -> None:
    """Refuse settings and rewards that do not fit the policy.

    Raises:
        ValueError: settings of another kind of policy, or rewards that take latents where there are none.
    """
    if policy.draws_tokens:
        check_token_settings(args)
        if getattr(find_algorithm(args.loss_type), "needs_old_mean", False):
            raise ValueError(
                f"loss_type={args.loss_type!r} compares means of denoising steps, which tokens lack; use a loss "
                "without @needs_old_mean, or train the denoising network."
            )
    elif args.noise_in_last_step:
        policy.check_noise_in_last_step()
    if any(map(takes_only_latents, rewards.all)):
        policy.check_latents()


def make_algorithm(args: DiffusionGRPOConfig, networks: list[nn.Module], weights: list[float]) -> Algorithm:
    """Make the algorithm that the settings name.

    Args:
        args: of the run.
        networks: the trained ones.
        weights: one per reward.

    Raises:
        ValueError: an unknown loss, or settings in `loss_kwargs` that it does not have.
    """
    return load_algorithm(
        args.loss_type,
        args.loss_kwargs,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        beta=args.beta,
        anchors_on_replay=args.old_log_prob != "rollout",
        is_first_replay=args.batch_sizes.updates_per_rollout == 1,
        max_ratio_error=args.max_ratio_error,
        is_half_precision=args.bf16 or args.fp16 or any(map(is_half_precision, networks)),
        take_turns=len(networks) > 1,
        reward_weights=weights if args.multi_objective_aggregation == "loss_per_reward" else None,
    )


def is_half_precision(network: nn.Module) -> bool:
    """Return whether some weights of a network are in bfloat16 or float16."""
    return any(weight.dtype in (torch.bfloat16, torch.float16) for weight in network.parameters())


def replays_anchor(args: DiffusionGRPOConfig, algorithm: Algorithm) -> bool:
    """Return whether the ratio's denominator is replayed right after each rollout, before its first update.

    With a single update per rollout the update's own replay gives it. With several, "auto" leaves it to the rollout
    unless means are compared, whose differences from one batch to another would count. Re-noised samples have nothing
    that the rollout recorded.
    """
    is_replayed = args.old_log_prob == "replay" or args.old_log_prob == "auto" and algorithm.needs_old_mean
    return (is_replayed or args.traits.is_renoised) and args.batch_sizes.updates_per_rollout > 1


def make_sampling_plan(args: DiffusionGRPOConfig) -> SamplingPlan:
    """Say with which seeds and steps rollouts are made."""
    return SamplingPlan(
        seed=args.seed,
        num_generations=args.num_generations,
        num_inference_steps=args.num_inference_steps,
        window=args.window,
        window_size=args.sde_window_size,
        window_order=args.sde_window_order,
        window_interval=args.sde_window_interval,
        updates_per_rollout=args.batch_sizes.updates_per_rollout,
        timestep_fraction=args.timestep_fraction,
        permute_steps=args.permute_steps,
        same_initial_noise=args.same_initial_noise,
        branches=args.branches,
        deterministic_outside_window=args.deterministic_outside_window,
        is_renoised=args.traits.is_renoised,
        shares_noise=args.traits.shares_noise,
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
        advantage_fn=load_advantage_fn(args.advantage_fn),
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


def make_evaluation_settings(args: DiffusionGRPOConfig, sampling_rate: int | None) -> EvaluationSettings:
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


def make_sampler(args: DiffusionGRPOConfig, num_rows: int, copies: int) -> GroupSampler:
    """Make what chooses the dataset rows of each rollout.

    Args:
        args: of the run.
        num_rows: of the dataset.
        copies: processes that share the sequence of a sample, and so need the same rows.
    """
    sizes = args.batch_sizes
    return GroupSampler(
        num_rows=num_rows,
        num_generations=sizes.num_generations,
        prompts_per_rollout=sizes.prompts_per_rollout,
        repeat_count=sizes.slots,
        shuffle=args.shuffle_dataset,
        seed=args.data_seed if args.data_seed is not None else args.seed,
        processes=sizes.data_processes,
        copies=copies,
    )


def make_reference(
    args: DiffusionGRPOConfig, policy: Policy, model: nn.Module, backend: DistributedBackend, is_full_training: bool
) -> AnyReference | None:
    """Make the frozen reference; None where full training does without a second copy of the weights."""
    if not is_full_training:
        return AdapterReference(policy, model)
    if not args.needs_reference:
        return None
    return CopiedReference(policy, model, backend, args.device, args.offload_ref_model)


def make_scorer(
    args: DiffusionGRPOConfig,
    rewards: RunRewards,
    *,
    policy: Policy,
    backend: DistributedBackend,
    monitor: ProcessGroupMonitor,
    state: Callable[[], TrainerState],
) -> RewardScorer:
    """Make what calls the rewards."""
    return RewardScorer(
        rewards.trained,
        backend=backend,
        monitor=monitor,
        reward_processes=args.reward_processes,
        channel=SampleChannel(monitor, args.device, args.ddp_timeout) if args.scores_on_some else None,
        overlap=Overlap(args.overlap_rewards, lambda: policy.draws_globally, lambda: backend.passes_together),
        fps=args.fps,
        sampling_rate=find_sampling_rate(policy.pipe),
        state=state,
        failures=Path(args.output_dir) / "failures",
    )


def make_replays(
    args: DiffusionGRPOConfig,
    policy: Policy,
    reference: AnyReference | None,
    inputs: PipelineInputs,
    backend: DistributedBackend,
) -> Replays:
    """Make what measures recorded steps, in batches as large as those of the rollout."""
    batch_size = args.rollout_batch_size or args.per_device_train_batch_size
    return Replays(policy, reference, inputs, backend, batch_size)


def make_generator(
    args: DiffusionGRPOConfig,
    rewards: RunRewards,
    *,
    algorithm: Algorithm,
    policy: Policy,
    old_policy: PolicyAverage | None,
    inputs: PipelineInputs,
    read_rows: Callable[[list[int]], Rows],
    scorer: RewardScorer,
    values: ValueModel | None,
    replays: Replays,
    backend: DistributedBackend,
    monitor: ProcessGroupMonitor,
    run_passes: NetworkPasses,
    metrics: Metrics,
    progress: UpdateProgress,
) -> RolloutGenerator:
    """Make what makes rollouts."""
    return RolloutGenerator(
        policy=policy,
        inputs=inputs,
        read_rows=read_rows,
        plan=make_sampling_plan(args),
        scorer=scorer,
        credit=make_credit(args, rewards, values),
        replays=replays,
        writer=make_sample_writer(args, rewards, backend.groups, find_sampling_rate(policy.pipe)),
        unscored=UnscoredRollouts(rewards.names, is_warning=args.process_index == 0),
        backend=backend,
        monitor=monitor,
        run_passes=run_passes,
        metrics=metrics,
        progress=progress,
        noise_level=args.noise_level or policy.default_noise_level,
        noise_in_last_step=args.noise_in_last_step,
        measures_divergence=args.kl_reward > 0,
        anchors_on_replay=replays_anchor(args, algorithm),
        needs_old_mean=algorithm.needs_old_mean
        and (args.batch_sizes.updates_per_rollout > 1 or args.old_log_prob == "rollout"),
        step_weight=args.step_weight,
        weighted_steps=range(*args.window),
        drops_zero_advantages=args.drop_zero_advantages,
        trajectory_device=trajectory_device(args),
        device=args.device,
        keeps_clean=args.traits.is_renoised,
        old_policy=old_policy,
        rolls_out_old=algorithm.rolls_out_old,
    )


def make_feed(args: DiffusionGRPOConfig, generator: RolloutGenerator, backend: DistributedBackend) -> RolloutFeed:
    """Make what hands out micro-batches."""
    return RolloutFeed(
        generator,
        sizes=args.batch_sizes,
        seed=args.seed,
        backend=backend,
        device=args.device,
        trajectory_device=trajectory_device(args),
    )


def make_evaluator(
    args: DiffusionGRPOConfig,
    rewards: RunRewards,
    *,
    policy: Policy,
    inputs: PipelineInputs,
    scorer: RewardScorer,
    generator: RolloutGenerator,
    feed: RolloutFeed,
    replays: Replays,
    reference: AnyReference | None,
    average: PolicyAverage | None,
    backend: DistributedBackend,
    monitor: ProcessGroupMonitor,
    run_passes: NetworkPasses,
) -> Evaluator:
    """Make what measures held-out prompts."""
    return Evaluator(
        policy=policy,
        inputs=inputs,
        scorer=scorer,
        generator=generator,
        feed=feed,
        replays=replays,
        average=average,
        eval_rewards=rewards.evaluated,
        reward_weights=rewards.weights,
        backend=backend,
        monitor=monitor,
        run_passes=run_passes,
        settings=lambda: make_evaluation_settings(args, find_sampling_rate(policy.pipe)),
        has_reference=reference is not None and not policy.draws_tokens and not args.traits.is_renoised,
    )


def trajectory_device(args: DiffusionGRPOConfig) -> str | torch.device:
    """Return where trajectories are kept between rollout and update."""
    return "cpu" if args.offload_trajectories else args.device


def make_average(
    args: DiffusionGRPOConfig, weights: TrainedWeights, backend: DistributedBackend, metrics: Metrics
) -> PolicyAverage | None:
    """Make the moving average of the policy, if the settings ask for one; its distance to the policy is logged."""
    if args.ema_decay is None:
        return None

    def note(squares: torch.Tensor) -> None:
        distance, size = backend.reduce_sum(squares).tolist()  # whole copies count several times in both
        metrics.add("ema/distance", (distance / size) ** 0.5 if size else 0.0)

    return PolicyAverage(weights, args.ema_decay, args.ema_update_interval, note)


def make_old_policy(args: DiffusionGRPOConfig, weights: TrainedWeights, algorithm: Algorithm) -> PolicyAverage | None:
    """Make the old policy of the algorithm, which moves once per rollout; None where it has none."""
    if algorithm.old_decay is None:
        return None
    return PolicyAverage(weights, 0.0, args.batch_sizes.updates_per_rollout, schedule=algorithm.old_decay)


def describe_model(
    pipe: DiffusionPipeline,
    model: nn.Module,
    component: tuple[str, ...],
    inputs: PipelineInputs,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
) -> dict[str, Any]:
    """Return what run.json says of the model and the data once they are loaded."""
    given = {*inputs.fixed, *(train_dataset.column_names if train_dataset is not None else [])}
    found = {
        "pipeline": type(pipe).__name__,
        "component": ", ".join(component),
        "prompts": count_prompts(train_dataset, eval_dataset),
        "loads_by": lora_loader(pipe, component[0]),
        "pipeline_tag": pipeline_tag(type(pipe), given),
    }
    found |= {"quantized": methods} if (methods := describe_quantization(pipe)) else {}
    kept = list_kept_adapters(pipe, model, component)
    return found | ({"kept_adapters": kept} if kept else {})


def add_callbacks(
    handler: CallbackHandler,
    args: DiffusionGRPOConfig,
    *,
    values: ValueModel | None,
    average: PolicyAverage | None,
    old_policy: PolicyAverage | None,
    weights: TrainedWeights,
    reference: AnyReference | None,
    accelerator: Accelerator,
    progress: UpdateProgress,
    prompts: dict[str, int | None],
    write_validation: Callable[[], Path],
) -> None:
    """Add what acts on the trainer's events, in the order in which it acts.

    Args:
        handler: of the trainer's callbacks.
        args: of the run.
        values, average, old_policy, weights, reference: what is moved after updates.
        accelerator: prepares the value model.
        progress: of the running update.
        prompts: how many there are; see [`~diffusion_grpo.data.held_out.count_prompts`].
        write_validation: samples the validation prompts and returns their folder.
    """
    if values is not None:
        handler.add_callback(ValueCallback(values, accelerator))
    for moving in filter(None, (average, old_policy)):
        handler.add_callback(moving)
    if args.sync_ref_model:
        alpha, interval = args.ref_model_mixup_alpha, args.ref_model_sync_steps
        handler.add_callback(SyncRefModelCallback(weights, lambda: reference.weights, alpha, interval))
    replace_trackers(handler)
    handler.add_callback(SampleGridCallback(handler))
    replace_progress(handler, args, progress, name_prompts(prompts))  # after the grid, which it may show
    handler.add_callback(CollapseCallback)
    if args.validation_prompts:
        handler.add_callback(ValidationCallback(write_validation, handler))
    handler.add_callback(ReportCallback)
