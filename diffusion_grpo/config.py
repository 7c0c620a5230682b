"""All settings of a training run. Names are TRL's where TRL has one.

In: what the user wrote. Out: a `DiffusionGRPOConfig` without contradictions; what cannot work is refused here, in one
sentence, before any model is loaded.
"""

import dataclasses
import difflib
import functools
import json
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from .config_checks import check_settings

WATCHING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # learning rates that follow the evaluations


@dataclass
class DiffusionGRPOConfig(TrainingArguments):
    r"""Settings of [`DiffusionGRPOTrainer`]; everything of [`~transformers.TrainingArguments`] holds too.

    Only what this library adds, or gives another default, is listed in the class body; each field says what it does in
    its `help`. The defaults are Flow-GRPO's recipe for LoRA on SD3.5-M (https://huggingface.co/papers/2505.05470) with
    smaller batches; they have not been run on a model of that size yet.

    Raises:
        ValueError: a setting is out of range, unknown, or contradicts another one.
        TypeError: there is no such setting; the message names the nearest one.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "pipeline_kwargs",
        "scheduler_kwargs",
        "model_init_kwargs",
    ]

    # TrainingArguments with other defaults
    learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate. By default 3e-4 for LoRA and 1e-5 for full training."}
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "Any of transformers' learning rate schedules."}
    )
    weight_decay: float = field(default=1e-4, metadata={"help": "AdamW's weight decay."})
    per_device_train_batch_size: int = field(
        default=4, metadata={"help": "Samples in one forward and backward pass; rollouts use the same size."}
    )
    gradient_accumulation_steps: int = field(default=32, metadata={"help": "Micro-batches in one optimizer update."})
    activation_checkpointing: bool | None = field(
        default=True,
        metadata={"help": "Recompute activations in the backward pass: less memory, more time."},
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "Mixed bfloat16 precision. By default on wherever an accelerator has it."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every so many updates."})
    save_steps: float = field(default=50, metadata={"help": "Write a checkpoint every so many updates."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "DDP's search for unused parameters; a policy uses all of them."}
    )
    dataloader_pin_memory: bool = field(
        default=False,
        metadata={"help": "Pin batches in memory; a batch is prompts here, so there is nothing to gain."},
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must stay False: every column reaches the reward functions."}
    )

    # Samples
    num_generations: int = field(default=16, metadata={"help": "Samples of each prompt: the group. At least 2."})
    num_generations_eval: int = field(default=1, metadata={"help": "Samples of each prompt in evaluation."})
    num_inference_steps: int = field(default=10, metadata={"help": "Denoising steps of a training rollout."})
    eval_num_inference_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps in evaluation; by default those of training."}
    )
    guidance_scale: float | None = field(default=None, metadata={"help": "Guidance; by default the pipeline's own."})
    height: int | None = field(default=None, metadata={"help": "Height in pixels; by default the pipeline's own."})
    width: int | None = field(default=None, metadata={"help": "Width in pixels; by default the pipeline's own."})
    num_frames: int | None = field(
        default=None, metadata={"help": "Frames of a video; by default the pipeline's own."}
    )
    fps: float = field(
        default=16.0, metadata={"help": "Frames a second of videos: what rewards are told and saved videos play at."}
    )
    pipeline_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further keyword arguments of every call of the pipeline."}
    )
    scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Settings of the pipeline's scheduler in place of its own, for instance {shift: 3.0}."},
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples rolled out at once. By default per_device_train_batch_size, so that rollout and update "
            "see the same batches and the first ratio is exactly 1."
        },
    )
    same_initial_noise: bool = field(
        default=False, metadata={"help": "All samples of a prompt start from one initial latent."}
    )
    best_of_n: int | None = field(
        default=None, metadata={"help": "Train only on the best n/2 and the worst n/2 samples of each prompt."}
    )
    offload_trajectories: bool = field(
        default=False, metadata={"help": "Keep recorded latents in CPU memory until they are replayed."}
    )

    # Process
    sde_type: str = field(
        default="auto",
        metadata={
            "help": (
                "auto, flow_sde, dance_sde, cps, ddim or ancestral. auto: flow_sde for flow matching, ancestral for "
                "EDM, else ddim."
            )
        },
    )
    noise_level: float | None = field(
        default=None,
        metadata={
            "help": ("Noise of the process. By default flow_sde 0.7, dance_sde 0.3, cps 0.8, ddim and ancestral 1.0.")
        },
    )
    sde_window: list[int] | None = field(
        default=None, metadata={"help": "[start, stop) of the steps that may be trained; by default all but the last."}
    )
    sde_window_size: int | None = field(
        default=None,
        metadata={
            "help": "Train so many consecutive steps only, drawn anew within sde_window for each rollout "
            "(Flow-GRPO-Fast). By default the whole of sde_window."
        },
    )
    timestep_fraction: float = field(
        default=1.0, metadata={"help": "Share of the steps in the window that is trained for each sample."}
    )
    permute_steps: bool = field(
        default=False,
        metadata={
            "help": "Each sample draws its own trained steps; otherwise the first ones of the window are taken."
        },
    )
    deterministic_outside_window: bool = field(
        default=False, metadata={"help": "No noise in steps outside the window (Flow-GRPO-Fast, MixGRPO)."}
    )

    # Tokens, of pipelines in which a language model writes some
    temperature: float | None = field(
        default=None, metadata={"help": "Temperature of tokens; by default that of the model's generation config."}
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "help": "Draw tokens from the so many most probable ones; 0 for all. By default that of the model's "
            "generation config, or where it has none transformers' 50."
        },
    )
    top_p: float | None = field(
        default=None,
        metadata={
            "help": "Draw tokens from the most probable ones that together have this probability; by default that of "
            "the model's generation config."
        },
    )

    # Optimisation
    loss_type: str = field(default="grpo", metadata={"help": "grpo, or the dotted path of a loss function."})
    beta: float = field(default=0.0, metadata={"help": "Weight of the KL divergence to the reference model."})
    kl_reward: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the KL divergence to the reference, the mean over a sample's trained steps, that is "
            "subtracted from its reward (Flow-GRPO's kl_reward); measured by two more forward passes a step."
        },
    )
    epsilon: float = field(default=1e-4, metadata={"help": "The ratio is clipped below 1 - epsilon."})
    epsilon_high: float | None = field(
        default=None, metadata={"help": "The ratio is clipped above 1 + epsilon_high; by default epsilon."}
    )
    importance_sampling_level: str = field(
        default="token",
        metadata={
            "help": "token: each denoising step or token has its own ratio. sequence: all those of a sample share the "
            "geometric mean of theirs (GSPO, https://huggingface.co/papers/2507.18071), at the price of one more "
            "forward pass a step where a rollout is trained on more than once."
        },
    )
    num_iterations: int = field(default=1, metadata={"help": "How often each rollout is trained on."})
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches in one rollout, a multiple of gradient_accumulation_steps; by default equal to it, "
            "which is one update a rollout."
        },
    )
    scale_rewards: str = field(
        default="group", metadata={"help": "Rewards are divided by the std of the group, of the batch, or none."}
    )
    reward_baseline: str = field(
        default="group",
        metadata={
            "help": "Rewards are compared with the mean of the group or of the batch; with batch, num_generations may "
            "be 1."
        },
    )
    num_batches_per_step: int = field(
        default=1,
        metadata={
            "help": "Batches in one rollout: what is taken over the batch (scale_rewards, reward_baseline, the scale "
            "of gae) is taken over each by itself. It divides the prompts of a rollout."
        },
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight a reward function; 1 each by default."}
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "How several rewards become one advantage: sum_then_normalize, normalize_then_sum (GDPO), "
            "min_then_normalize or product_then_normalize; with loss_per_reward each has its own, and the clipped "
            "losses are summed (DanceGRPO's VQ and MQ)."
        },
    )
    advantage_clip: float | None = field(default=5.0, metadata={"help": "Advantages are clamped to +- this."})
    reward_threshold: float | None = field(
        default=None, metadata={"help": "Groups whose mean reward is below it contribute nothing."}
    )
    old_log_prob: str = field(
        default="rollout",
        metadata={
            "help": "Where the ratio's denominator comes from: the rollout, or the first replay (then the ratio is 1 "
            "by construction and the drift between the two is only reported)."
        },
    )
    max_ratio_error: float | None = field(
        default=1e-4,
        metadata={"help": "Stop where the first ratio after a rollout is further from 1. None never stops."},
    )

    # Value model
    advantage_estimator: str = field(
        default="group",
        metadata={
            "help": "group: rewards are compared within the group (GRPO). gae: with a value model that is trained "
            "beside the policy, by generalized advantage estimation (PPO); num_generations may be 1."
        },
    )
    value_learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the value model."})
    value_clip: float | None = field(
        default=0.2,
        metadata={
            "help": "How far a value may move on one rollout (PPO's clipped value loss), in standard deviations of "
            "the first rollout's rewards; null for no bound."
        },
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount of a reward, for each trained step before it."})
    gae_lambda: float = field(
        default=0.95, metadata={"help": "GAE's lambda: 1 goes by the reward alone, 0 by the next step's value."}
    )

    # Reference and average
    sync_ref_model: bool = field(
        default=False, metadata={"help": "Move the reference towards the policy every ref_model_sync_steps updates."}
    )
    ref_model_mixup_alpha: float = field(
        default=0.6, metadata={"help": "Share of the policy in the reference at each synchronisation."}
    )
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Updates between two synchronisations."})
    offload_ref_model: bool = field(
        default=False, metadata={"help": "Keep a reference copy in CPU memory between its uses (full training)."}
    )
    ema_decay: float | None = field(
        default=None, metadata={"help": "Keep a moving average of the policy, evaluate with it and save it."}
    )
    ema_update_interval: int = field(default=8, metadata={"help": "Updates between two steps of the average."})

    # Model, data, log
    offload_frozen: str | None = field(
        default=None,
        metadata={
            "help": "cpu: text encoders, image encoders and the VAE wait in CPU memory and are on the accelerator "
            "only while they are used, never while the trained network is."
        },
    )
    train_component: str | None = field(
        default=None, metadata={"help": "Name of the trained network; by default transformer, unet, prior or decoder."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of DiffusionPipeline.from_pretrained."}
    )
    selective_checkpointing: float = field(
        default=1.0,
        metadata={
            "help": "Share of the network's blocks, evenly spread, whose activations are recomputed; 0.5 is every "
            "other one: more memory than all, less time."
        },
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle the prompts in each epoch."})
    log_completions: bool = field(
        default=True, metadata={"help": "Write prompts, rewards and advantages of each rollout to a parquet file."}
    )
    num_completions_to_log: int = field(
        default=16, metadata={"help": "Evaluation pictures that are saved and drawn in the grid."}
    )
    save_samples_steps: int | None = field(
        default=None,
        metadata={
            "help": "Every so many updates, save all samples of the rollout (PNG, MP4 or WAV) beside the table of its "
            "prompts, rewards and advantages."
        },
    )
    validation_prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Prompts that are sampled from fixed seeds every validation_steps, saved and sent to report_to, "
            "and never scored."
        },
    )
    validation_steps: int = field(
        default=10,
        metadata={"help": "Updates between two rounds of validation_prompts; the first is before training."},
    )

    def __post_init__(self):
        if self.gradient_checkpointing is not None:  # the name that TRL's users know
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None
        if self.bf16 is None:
            self.bf16 = (
                not self.fp16 and not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            )
        for name in ("pipeline_kwargs", "scheduler_kwargs", "model_init_kwargs"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, json.loads(getattr(self, name)))
        watches = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type) in WATCHING_SCHEDULES
        if self.metric_for_best_model is None and (
            watches or self.load_best_model_at_end or self.save_strategy == "best"
        ):
            self.metric_for_best_model = "eval_reward"  # there is no eval_loss here
        if watches and self.metric_for_best_model.endswith("reward"):
            kwargs = self.lr_scheduler_kwargs or {}
            kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
            self.lr_scheduler_kwargs = {"mode": "max", **kwargs}  # a reward that rises is no plateau
        # accelerate would compile the whole network; `loading.py` compiles its repeated blocks instead
        compiles = bool(self.torch_compile or self.torch_compile_backend or self.torch_compile_mode)
        backend, mode = self.torch_compile_backend or ("inductor" if compiles else None), self.torch_compile_mode
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None
        super().__post_init__()
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = compiles, backend, mode
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        check_settings(self)

    def to_dict(self) -> dict[str, Any]:
        """`TrainingArguments.to_dict`, with tensors and pictures among the settings named by their kind and size."""
        return {name: described(value) for name, value in super().to_dict().items()}

    @property
    def samples_per_update_group(self) -> int:
        """Samples of a prompt that are trained on: `best_of_n`, or the whole group."""
        return self.best_of_n or self.num_generations

    @property
    def prompts_per_generation(self) -> int:
        """Prompts in one rollout, over all processes."""
        trained = self.per_device_train_batch_size * self.world_size * self.steps_per_generation
        return trained // self.samples_per_update_group

    @property
    def rollout_size(self) -> int:
        """Samples that one process rolls out for one generation."""
        return self.prompts_per_generation * self.num_generations // self.world_size

    @property
    def needs_reference(self) -> bool:
        """Whether the KL divergence to a reference is measured."""
        return self.beta > 0 or self.kl_reward > 0

    @property
    def window(self) -> tuple[int, int]:
        """[start, stop) of the steps that may be trained."""
        start, stop = self.sde_window or (0, self.num_inference_steps - 1)
        return start, stop

    def window_of(self, generation: int) -> tuple[int, int]:
        """[start, stop) of the steps that may be trained in a rollout: the window, or a part drawn by the seed."""
        start, stop = self.window
        if self.sde_window_size is None:
            return start, stop
        start = random.Random(f"window {self.seed} {generation}").randint(start, stop - self.sde_window_size)
        return start, start + self.sde_window_size


def described(value: Any) -> Any:
    """Settings as JSON can hold them: a tensor or a picture becomes its kind and size."""
    if isinstance(value, dict):
        return {str(name): described(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    size = getattr(value, "shape", getattr(value, "size", None))
    return f"{type(value).__name__} {tuple(size)}" if isinstance(size, tuple) else type(value).__name__


def _with_suggestions(init):
    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        known = [setting.name for setting in dataclasses.fields(DiffusionGRPOConfig) if setting.init]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"DiffusionGRPOConfig has no setting {name!r}; did you mean {near!r}?")
        init(self, *args, **kwargs)

    return checked


DiffusionGRPOConfig.__init__ = _with_suggestions(DiffusionGRPOConfig.__init__)
