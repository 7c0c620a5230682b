"""Settings of the update (loss, advantages, value model, reference): a base of `DiffusionGRPOConfig`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class UpdateSettings:
    """How rewards move the policy, and what it is compared with."""

    # Optimisation
    loss_type: str = field(
        default="grpo",
        metadata={
            "help": "The algorithm. On recorded steps: grpo, grpo_guard, dppo. On finished samples that are noised "
            "again: nft (DiffusionNFT), awm (advantage-weighted matching), dgpo, dpo (online). Or the dotted path of "
            "a loss function or of an algorithm's class."
        },
    )
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings of the loss or algorithm that loss_type names, as JSON on the command line. Each "
            "algorithm has a page that lists them (docs/algorithms/index.md); grpo has none."
        },
    )
    beta: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the KL divergence to the reference model. On re-noised samples, weight of the squared "
            "distance between the predictions of the policy and the reference."
        },
    )
    step_weight: str = field(
        default="none",
        metadata={
            "help": "Weight of the policy term of each step. none: all steps have weight 1. noise: 2.25 times the "
            "step's std (TempFlow-GRPO). velocity: std / |J|, divided by its mean over the steps, so that all steps "
            "count alike (Flash-GRPO). guard: std / |J|. J is the derivative of the step's mean with respect to the "
            "prediction. The KL is not weighted."
        },
    )
    kl_reward: float = field(
        default=0.0,
        metadata={
            "help": "Weight of a penalty that is subtracted from each sample's reward: the KL divergence to the "
            "reference, averaged over the sample's trained steps (Flow-GRPO's kl_reward). This takes two more forward "
            "passes per step."
        },
    )
    epsilon: float = field(
        default=1e-4,
        metadata={
            "help": "Lower end of the clip range: the ratio is clipped to at least 1 - epsilon. The default is for "
            "denoising steps; for tokens (a language model in train_component) use about 0.2."
        },
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper end of the clip range, 1 + epsilon_high; by default epsilon."}
    )
    importance_sampling_level: str = field(
        default="token",
        metadata={
            "help": "token: each denoising step or token has its own ratio. sequence: all steps or tokens of a sample "
            "share the geometric mean of their ratios (GSPO, https://huggingface.co/papers/2507.18071). sequence "
            "takes one more forward pass per step if a rollout is trained on more than once."
        },
    )
    num_iterations: int = field(default=1, metadata={"help": "How many times each rollout is trained on."})
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches in one rollout, a multiple of gradient_accumulation_steps; by default equal to it, "
            "which is one update per rollout."
        },
    )
    scale_rewards: str = field(
        default="group",
        metadata={
            "help": "group or batch: divide rewards by the std of the group or of the batch. none: do not divide them."
        },
    )
    reward_baseline: str = field(
        default="group",
        metadata={
            "help": "group or batch: compare rewards with the mean of the group or of the batch. With batch, "
            "num_generations may be 1."
        },
    )
    num_batches_per_step: int = field(
        default=1,
        metadata={
            "help": "Batches in one rollout; statistics of the batch (scale_rewards, reward_baseline, the scale of "
            "gae) are computed for each separately. Must divide the number of prompts in a rollout."
        },
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per reward function; by default 1 each."}
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "How several rewards are combined. sum_then_normalize, normalize_then_sum (GDPO), "
            "min_then_normalize and product_then_normalize give one advantage per sample. loss_per_reward gives each "
            "reward an advantage of its own and sums the clipped losses (DanceGRPO's VQ and MQ)."
        },
    )
    advantage_fn: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of a function that computes the advantages in place of scale_rewards, "
            "reward_baseline and multi_objective_aggregation. It is called as my_advantages(rewards, groups, *, "
            "weights, batches) and returns one advantage per sample. rewards has the shape (samples, functions), with "
            "NaN where a function left a sample out. groups and batches hold the index of each sample's group and "
            "batch, and weights holds one weight per function."
        },
    )
    advantage_clip: float | None = field(default=5.0, metadata={"help": "Clamp advantages to +- this."})
    reward_threshold: float | None = field(
        default=None, metadata={"help": "Groups whose mean reward is below this contribute nothing."}
    )
    drop_zero_advantages: bool = field(
        default=False,
        metadata={
            "help": "Ignore samples whose advantage is 0: the loss is averaged over the other samples only, and the "
            "ignored ones have no KL term (as in Flow-GRPO's code). By default they count as samples with a policy "
            "loss of 0."
        },
    )
    old_log_prob: str = field(
        default="auto",
        metadata={
            "help": "Where the denominator of the ratio comes from. rollout: the rollout. replay: a replay before the "
            "first update, in the batches that are trained, so that the first ratio is 1 by construction. auto: "
            "replay if a rollout serves only one update (the replay then costs nothing) or if loss_type is grpo_guard "
            "or dppo, else rollout. The difference between rollout and replay is always measured and checked."
        },
    )
    max_ratio_error: float | None = field(
        default=1e-4,
        metadata={
            "help": "Stop if a replay right after the rollout gives a ratio that differs from 1 by more than this. In "
            "bf16 and fp16, the run only warns once if rounding explains the difference. On re-noised samples, it is "
            "the difference of first predictions, relative to their size. None never stops."
        },
    )

    # Value model
    advantage_estimator: str = field(
        default="group",
        metadata={
            "help": "group: compare rewards within the group (GRPO). gae: generalized advantage estimation with a "
            "value model trained beside the policy (PPO); num_generations may be 1."
        },
    )
    value_learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the value model."})
    value_clip: float | None = field(
        default=0.2,
        metadata={
            "help": "How far a value may move on one rollout (PPO's clipped value loss), in standard deviations of "
            "the first rollout's rewards; null for no limit."
        },
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount of a reward for each trained step before it."})
    gae_lambda: float = field(
        default=0.95, metadata={"help": "GAE's lambda: 1 uses the reward alone, 0 the next step's value."}
    )

    # Reference and average
    sync_ref_model: bool = field(
        default=False, metadata={"help": "Move the reference towards the policy every ref_model_sync_steps updates."}
    )
    ref_model_mixup_alpha: float = field(
        default=0.6, metadata={"help": "Share of the policy in the reference at each synchronisation."}
    )
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Updates between two synchronisations."})
    ds3_gather_for_generation: bool = field(
        default=True,
        metadata={
            "help": "Under DeepSpeed ZeRO-3, gather the whole network once per rollout and evaluation, which is fast "
            "but takes the memory of the whole network; False gathers layer by layer."
        },
    )
    fsdp_gather_for_generation: bool = field(
        default=False,
        metadata={
            "help": "Under FSDP2, gather each block once per rollout or evaluation and keep it, which is fast but "
            "takes the memory of the whole network; by default a block is gathered for each of its calls."
        },
    )
    offload_ref_model: bool = field(
        default=False, metadata={"help": "Keep the reference copy in CPU memory between its uses (full training)."}
    )
    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Decay of a moving average of the policy, which is evaluated, saved and pushed in its place; the "
            "policy itself is saved in the subfolder `policy`. By default there is no average."
        },
    )
    ema_update_interval: int = field(default=8, metadata={"help": "Updates between two steps of the average."})
