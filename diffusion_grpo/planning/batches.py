"""Counts of prompts, samples, updates and network evaluations, from the settings and (evaluations) a measured call."""

import math

from ..algorithms.registry import load_algorithm
from ..config.settings import DiffusionGRPOConfig
from ..rollout.passes import PASSES_MEASURED
from .measure import Measurement

Batches = dict[str, int | None]


def count_batches(args: DiffusionGRPOConfig, prompts: int | None) -> Batches:
    """Count prompts, samples and updates, over all processes, of a run with that many prompts, if they are known."""
    sizes = args.batch_sizes
    rollouts = None if prompts is None else math.ceil(prompts / sizes.prompts_per_rollout)
    per_epoch = None if rollouts is None else rollouts * sizes.updates_per_rollout
    updates = None if per_epoch is None else math.ceil(args.num_train_epochs * per_epoch)
    return {
        "processes": args.world_size,
        "prompts_per_rollout": sizes.prompts_per_rollout,
        "samples_per_prompt": args.num_generations,
        "samples_per_rollout": sizes.samples_per_rollout,
        "trained_per_prompt": sizes.trained_per_prompt,
        "samples_per_process": sizes.rollout_share,
        "pipeline_calls": math.ceil(sizes.rollout_share / args.rollout_call_size),
        "micro_batch": sizes.micro_batch,
        "micro_batches_per_update": sizes.accumulation,
        "updates_per_rollout": sizes.updates_per_rollout,
        "samples_per_update": sizes.samples_per_update,
        "trained_steps": args.trained_count,
        "trained_tokens": 0,
        "num_inference_steps": args.num_inference_steps,
        "rollouts_per_epoch": rollouts,
        "updates_per_epoch": per_epoch,
        "updates": args.max_steps if args.max_steps > 0 else updates,
        "prompts": prompts,
    }


def count_evaluations(args: DiffusionGRPOConfig, counted: Measurement | None = None) -> dict[str, float]:
    """Count forward passes per sample; if `counted` is None, assume one pass per step and shared calls."""
    counted = counted or Measurement({}, 0, shares_prediction=args.shares_calls)
    one, update, iterations = counted.evaluations, counted.update_evaluations, args.num_iterations
    steps: float = 1 if counted.tokens else args.trained_count
    if args.takes_gradients:
        steps = sum(args.num_inference_steps - step for step in args.trainable_steps) / len(args.trainable_steps)
    shared_calls = args.shared_calls - (args.shares_calls and not counted.shares_prediction)
    rollout = one * (args.num_inference_steps - shared_calls * (1 - 1 / args.latent_sharing))
    if counted.shares_prediction and counted.is_batched:
        steps -= args.trained_share * (1 - 1 / min(args.trained_sharing, args.per_device_train_batch_size))
    passes = {"in one step": one, "rollout": rollout, "update, with gradient": update * steps * iterations}
    if counted.tokens:
        scores = {"scores of the rollout's tokens": 1.0, "update, with gradient": iterations}
        passes = {"rollout, one per token": float(counted.tokens), **scores}
    if args.beta > 0 or args.recording.reference:
        passes["reference in the update"] = update * steps * iterations
    if has_old_policy(args):
        passes["old policy"] = update * steps
    if args.anchor == "replay" and args.recording.old == "error":
        passes["errors before the first update"] = update * steps
    if args.kl_reward > 0:
        passes["policy and reference for kl_reward"] = 2 * one * steps
    updates = args.micro_batches_per_rollout * iterations / args.gradient_accumulation_steps
    if args.importance_sampling_level == "sequence" and updates > 1:
        passes["sequence ratio"] = one * steps * iterations * (1 - 1 / updates)
    if args.target_change is not None or args.learning_rate is None:  # two predictions before and after each update
        measured = 1 if args.takes_gradients else min(PASSES_MEASURED, steps)
        passes["change of the predictions"] = 4 * update * measured * iterations / args.gradient_accumulation_steps
    return passes


def has_old_policy(args: DiffusionGRPOConfig) -> bool:
    return (
        args.is_renoised and load_algorithm(args.loss_type, args.loss_kwargs, anchor=args.anchor).old_decay is not None
    )
