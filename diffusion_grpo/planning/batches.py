"""Counts of prompts, samples and updates, computed from the settings alone. `plan.py` adds the memory."""

import math
from dataclasses import dataclass

from ..config.settings import DiffusionGRPOConfig


@dataclass
class Batches:
    """Counts of prompts, samples and updates of a run, over all processes unless a field says otherwise."""

    processes: int
    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    trained_per_prompt: int
    samples_per_process: int
    pipeline_calls: int
    micro_batch: int
    micro_batches_per_update: int
    updates_per_rollout: int
    samples_per_update: int
    trained_steps: int
    num_inference_steps: int
    rollouts_per_epoch: int | None
    updates_per_epoch: int | None
    updates: int | None = None
    prompts: int | None = None
    trained_tokens: int = 0

    @classmethod
    def of(cls, args: DiffusionGRPOConfig, prompts: int | None) -> "Batches":
        """Compute the counts."""
        per_rollout = args.micro_batches_per_rollout * args.num_iterations // args.gradient_accumulation_steps
        rollouts = None if prompts is None else math.ceil(prompts / args.batch_sizes.prompts_per_rollout)
        per_epoch = None if rollouts is None else rollouts * per_rollout
        total = None if per_epoch is None else math.ceil(args.num_train_epochs * per_epoch)
        size = args.rollout_call_size
        accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return cls(
            processes=args.world_size,
            prompts_per_rollout=args.batch_sizes.prompts_per_rollout,
            samples_per_prompt=args.num_generations,
            samples_per_rollout=args.batch_sizes.prompts_per_rollout * args.num_generations,
            trained_per_prompt=args.batch_sizes.trained_per_prompt,
            samples_per_process=args.batch_sizes.rollout_share,
            pipeline_calls=math.ceil(args.batch_sizes.rollout_share / size),
            micro_batch=args.per_device_train_batch_size,
            micro_batches_per_update=args.gradient_accumulation_steps,
            updates_per_rollout=per_rollout,
            samples_per_update=accumulated * args.data_processes,
            trained_steps=args.trained_count,
            num_inference_steps=args.num_inference_steps,
            rollouts_per_epoch=rollouts,
            updates_per_epoch=per_epoch,
            updates=args.max_steps if args.max_steps > 0 else total,
            prompts=prompts,
        )
