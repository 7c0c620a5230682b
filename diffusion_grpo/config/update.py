"""Settings of the update (loss, advantages, value model, reference, EMA): a base class of `DiffusionGRPOConfig`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .declare import Count, Fraction, NotNegative, Positive, Range, setting


@dataclass
class UpdateSettings:
    """How rewards move the policy, and what it is compared with."""

    # Optimisation
    loss_type: str = setting(
        "grpo",
        "Algorithm: grpo, grpo_guard, dppo and fdfo train on the recorded steps of a rollout; nft, awm, dgpo and dpo "
        "on re-noised samples; draft follows the gradient of rewards; or the dotted path of a loss function or of an "
        "algorithm's class (docs/algorithms/own.md).",
    )
    loss_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Settings of the loss or algorithm, which its page lists (docs/algorithms/index.md).",
    )
    target_change: Positive | None = setting(
        None,
        "Regulate the learning rate: each update changes the policy's predictions, relative to their size, by "
        "target_change / sqrt(number of updates), and the change is measured in every update. learning_rate becomes "
        "the upper limit (by default 0.01); the first update has a thousandth of it. By default 0.25, unless "
        "learning_rate is set.",
    )
    beta: NotNegative = setting(
        0.0,
        "Weight of the KL divergence to the reference. For losses on re-noised samples, weight of the squared "
        "distance between the predictions of the policy and the reference.",
    )
    step_weight: Literal["none", "noise", "velocity", "guard"] = setting(
        "none",
        "Weight of the policy term of each step: none, noise (TempFlow-GRPO), velocity (Flash-GRPO) or guard "
        "(GRPO-Guard); docs/algorithms/grpo.md has the formulas.",
    )
    kl_reward: NotNegative = setting(
        0.0,
        "Weight of the KL divergence to the reference, averaged over a sample's trained steps, that is subtracted "
        "from its reward. This takes two more forward passes per step.",
    )
    epsilon: NotNegative = setting(
        1e-4,
        "Lower end of the clip range, 1 - epsilon. For tokens use about 0.2. grpo_guard and dppo have limits of "
        "their own in loss_kwargs.",
    )
    epsilon_high: NotNegative | None = setting(
        None,
        "Upper end of the clip range, 1 + epsilon_high. By default equal to epsilon.",
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token",
        "token: each denoising step or token has its own ratio. sequence: all of a sample share the geometric mean "
        "of their ratios (GSPO), which takes one more forward pass per step if a rollout is trained on more than "
        "once.",
    )
    num_iterations: Count = setting(1, "Number of times each rollout is trained on.")
    steps_per_generation: Count | None = setting(
        None,
        "Number of micro-batches in one rollout, a multiple of gradient_accumulation_steps. By default equal to it, "
        "which gives one update per rollout.",
    )
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group",
        "group or batch: divide rewards by the standard deviation of the group or of the batch. none: do not divide "
        "them. true and false, as in TRL, mean group and none.",
    )
    reward_baseline: Literal["group", "batch"] = setting(
        "group",
        "Mean that rewards are compared with: of the group, or of the batch (num_generations may then be 1).",
    )
    num_batches_per_step: Count = setting(
        1,
        "Number of batches in one rollout, each with statistics of its own (scale_rewards, reward_baseline, the "
        "scale of gae). Must divide the number of prompts in a rollout.",
    )
    reward_weights: list[float] | None = setting(None, "One weight per reward function; by default 1 each.")
    multi_objective_aggregation: Literal[
        "sum_then_normalize", "normalize_then_sum", "min_then_normalize", "product_then_normalize", "loss_per_reward"
    ] = setting(
        "sum_then_normalize",
        "How several rewards are combined (docs/rewards/hacking.md): sum_then_normalize, normalize_then_sum (GDPO), "
        "min_then_normalize, product_then_normalize or loss_per_reward.",
    )
    advantage_fn: str | None = setting(
        None,
        "Dotted path of a function that computes the advantages in place of scale_rewards, reward_baseline and "
        "multi_objective_aggregation (docs/algorithms/own.md).",
    )
    advantage_clip: Positive | None = setting(
        5.0, "Clamp advantages to the range from -advantage_clip to advantage_clip; null for no limit."
    )
    reward_threshold: float | None = setting(
        None, "Mean reward below which a group contributes nothing to the update. By default all groups contribute."
    )
    drop_zero_advantages: bool = setting(
        False,
        "Average the loss only over samples whose advantage is not 0 (as in Flow-GRPO's code).",
    )
    old_log_prob: Literal["auto", "rollout", "replay"] = setting(
        "auto",
        "What the ratio compares with: log-probabilities of the rollout (rollout), or of a replay before the first "
        "update (replay). auto chooses (docs/how_it_works.md).",
    )
    max_ratio_error: Positive | None = setting(
        1e-4,
        "Stop the run if the first ratio after a rollout differs from 1 by more than this, or on re-noised samples a "
        "prediction by more, relative to its size, unless rounding in bf16 or fp16 explains it. null: never stop.",
    )

    # Value model
    advantage_estimator: Literal["group", "gae"] = setting(
        "group",
        "group: compare rewards within the group (GRPO). gae: generalized advantage estimation with a value model "
        "that is trained together with the policy (PPO); num_generations may be 1.",
    )
    value_learning_rate: NotNegative = setting(1e-3, "Learning rate of the value model.")
    value_clip: Positive | None = setting(
        0.2,
        "Limit on how far a value may move in the updates on one rollout, in standard deviations of the first "
        "rollout's rewards; null for no limit.",
    )
    gamma: Fraction = setting(
        1.0, "Discount factor of the reward, applied once for each trained step that precedes it."
    )
    gae_lambda: Fraction = setting(0.95, "Lambda of GAE: 1 uses only the reward, 0 only the value of the next step.")

    # Reference and average
    sync_ref_model: bool = setting(False, "Move the reference towards the policy every ref_model_sync_steps updates.")
    ref_model_mixup_alpha: float = setting(0.6, "Weight of the policy when it is mixed into the reference.")
    ref_model_sync_steps: Count = setting(512, "Number of updates between two synchronisations of the reference.")
    offload_ref_model: bool = setting(False, "Keep the reference copy in CPU memory between its uses (full training).")
    ema_decay: Annotated[float, Range(0, 1, is_open=True)] | None = setting(
        None,
        "Decay of a moving average of the policy, which is evaluated, saved and pushed in place of the policy (saved "
        "in the subfolder `policy`). By default there is none.",
    )
    ema_update_interval: Count = setting(
        8, "Number of updates between two moves of the average, which also moves after the last update."
    )
