"""How many prompts, samples and updates a training has: settings enter, counts leave.

A module of its own because nothing but settings is asked; `plan.py` adds the bytes.
"""

import math
from dataclasses import dataclass

from ..config.settings import DiffusionGRPOConfig
from ..rewards.reward_processes import Assignment, scoring_process
from ..rollout.order import RolloutOrder


@dataclass
class Batches:
    """How prompts, samples and updates relate. Samples and prompts are those of all processes together.

    Attributes:
        processes: of all machines.
        prompts_per_rollout, samples_per_prompt, samples_per_rollout: what is generated and scored.
        trained_per_prompt: samples of a prompt that are trained on: the group, or `best_of_n`.
        samples_per_process: rolled out by one process.
        reward_processes: those that compute rewards.
        samples_per_reward_process: scored by the one of them that scores the most.
        pipeline_calls: of one process for that.
        micro_batch: samples in one forward and backward pass.
        micro_batches_per_update, updates_per_rollout: for one process.
        samples_per_update: trained on in one update.
        trained_steps: of a sample, of `num_inference_steps`.
        rollouts_per_epoch, updates_per_epoch: None where the dataset's size is not known.
    """

    processes: int
    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    trained_per_prompt: int
    samples_per_process: int
    reward_processes: int
    samples_per_reward_process: int
    pipeline_calls: int
    micro_batch: int
    micro_batches_per_update: int
    updates_per_rollout: int
    samples_per_update: int
    trained_steps: int
    num_inference_steps: int
    rollouts_per_epoch: int | None
    updates_per_epoch: int | None

    @classmethod
    def of(cls, args: DiffusionGRPOConfig, prompts: int | None) -> "Batches":
        """Of settings, and the number of rows in the dataset."""
        start, stop = args.window
        window = args.sde_window_size or stop - start
        updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        rollouts = None if prompts is None else math.ceil(prompts / args.batch_sizes.prompts_per_rollout)
        size = args.rollout_batch_size or args.per_device_train_batch_size
        scored = _scored(args)
        accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return cls(
            processes=args.world_size,
            prompts_per_rollout=args.batch_sizes.prompts_per_rollout,
            samples_per_prompt=args.num_generations,
            samples_per_rollout=args.batch_sizes.prompts_per_rollout * args.num_generations,
            trained_per_prompt=args.batch_sizes.trained_per_prompt,
            samples_per_process=args.batch_sizes.rollout_share,
            reward_processes=len(scored),
            samples_per_reward_process=max(scored),
            pipeline_calls=math.ceil(args.batch_sizes.rollout_share / size),
            micro_batch=args.per_device_train_batch_size,
            micro_batches_per_update=args.gradient_accumulation_steps,
            updates_per_rollout=updates,
            samples_per_update=accumulated * args.data_processes,
            trained_steps=max(1, round(args.timestep_fraction * window)),
            num_inference_steps=args.num_inference_steps,
            rollouts_per_epoch=rollouts,
            updates_per_epoch=None if rollouts is None else rollouts * updates,
        )


def _scored(args: DiffusionGRPOConfig) -> list[int]:
    """How many samples of a rollout each process scores that computes rewards."""
    if not args.scores_on_some:
        return [args.batch_sizes.rollout_share] * args.world_size
    order, copies = RolloutOrder(args.batch_sizes, args.seed, 0), args.context_parallel_size
    made = [order.of_process(order.made, process).tolist() for process in range(args.data_processes)]
    ranks = {copies * scoring_process(process, len(made), args.reward_processes) for process in range(len(made))}
    return [
        len(Assignment.of(made, args.num_generations, args.reward_processes, rank, copies).taken) for rank in ranks
    ]
