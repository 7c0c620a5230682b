"""Counts of prompts, samples and updates, computed from the settings alone. `plan.py` adds the memory."""

import math
from dataclasses import dataclass

from ..config.settings import DiffusionGRPOConfig


@dataclass
class Batches:
    """Counts of prompts, samples and updates of a run, over all processes unless a field says otherwise.

    Attributes:
        processes: number of processes on all machines.
        prompts_per_rollout, samples_per_prompt, samples_per_rollout: counts of what is generated and scored.
        trained_per_prompt: samples per prompt that are trained on: the whole group, or `best_of_n` samples of it.
        samples_per_process: samples that one process generates per rollout.
        pipeline_calls: pipeline calls of one process per rollout.
        micro_batch: samples in one forward and backward pass of one process.
        micro_batches_per_update: micro-batches of one process in an update.
        updates_per_rollout: updates between two rollouts.
        samples_per_update: samples that one update trains on.
        trained_steps: steps trained per sample.
        num_inference_steps: denoising steps per sample.
        rollouts_per_epoch, updates_per_epoch: counts per epoch; None if the size of the dataset is unknown.
        updates: updates of the whole run; None if its length is in epochs and the size of the dataset is unknown.
        prompts: rows of the dataset; None if unknown.
        trained_tokens: tokens trained per sample, in one step; 0 where denoising steps are trained.
    """

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
        """Compute the counts.

        Args:
            args: the settings.
            prompts: number of rows in the dataset; None if unknown.
        """
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
