"""Settings of the samples and of the process that draws them: a base of `DiffusionGRPOConfig`."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class SamplingSettings:
    """How samples are drawn: their number and size, the process, the tokens."""

    # Samples
    num_generations: int = field(
        default=16,
        metadata={
            "help": "Number of samples per prompt (the size of a group). Must be at least 2 if rewards are compared "
            "within a group."
        },
    )
    num_generations_eval: int = field(default=1, metadata={"help": "Number of samples per prompt in evaluations."})
    num_inference_steps: int = field(default=10, metadata={"help": "Number of denoising steps in a training rollout."})
    eval_num_inference_steps: int | None = field(
        default=None,
        metadata={"help": "Number of denoising steps in evaluations; by default the same as in training."},
    )
    sigmas: list[float] | None = field(
        default=None,
        metadata={
            "help": "Noise levels of the denoising steps in a training rollout, before the scheduler's shift: "
            "num_inference_steps numbers that start at 1.0 and decrease. Keep the trained steps as short as in "
            "evaluations, and make the others longer: for SD3, [1.0, 0.8, 0.53, 0.27] keeps the first of six steps "
            "and then takes three longer ones. Evaluations keep the pipeline's own spacing. Works with flow matching "
            "only, and only if the pipeline's call accepts sigmas."
        },
    )
    guidance_scale: float | None = field(
        default=None, metadata={"help": "Guidance scale; by default the pipeline's own."}
    )
    height: int | None = field(default=None, metadata={"help": "Height in pixels; by default the pipeline's own."})
    width: int | None = field(default=None, metadata={"help": "Width in pixels; by default the pipeline's own."})
    num_frames: int | None = field(
        default=None, metadata={"help": "Number of frames per video; by default the pipeline's own."}
    )
    fps: float | None = field(
        default=None,
        metadata={
            "help": "Frame rate of videos, in frames per second. It is passed to the rewards, and saved videos play "
            "at this rate. By default the rate in the pipeline's call if it has one (LTX), otherwise 16."
        },
    )
    pipeline_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Additional keyword arguments for every call of the pipeline."}
    )
    scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings to override in the pipeline's scheduler, for example {shift: 3.0}. Where the shift "
            "depends on the size (FLUX, Qwen-Image), also set use_dynamic_shifting: false, or shift has no effect."
        },
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples generated together in a rollout. By default per_device_train_batch_size, so "
            "that rollout and update use the same batches and the first ratio is exactly 1."
        },
    )
    decode_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples that the VAE decodes together, in rollouts and evaluations; by default all "
            "samples of a call. A smaller number saves memory and does not change the samples."
        },
    )
    vae_slicing: bool = field(
        default=False,
        metadata={"help": "Let the VAE encode and decode one sample at a time (enable_slicing in diffusers)."},
    )
    vae_tiling: bool = field(
        default=False,
        metadata={
            "help": "Let the VAE encode and decode large samples in overlapping tiles (enable_tiling in diffusers). "
            "The seams are blended, so the samples change slightly."
        },
    )
    same_initial_noise: bool | None = field(
        default=None,
        metadata={
            "help": "Start all samples of a prompt from the same initial latent. The samples are identical until "
            "noise is first drawn, so the network calls up to that point are made only once for all of them. Within a "
            "micro-batch, they also share the forward and backward pass of the first noisy step. By default true, but "
            "false with branches, with advantage_estimator gae and for losses on re-noised samples."
        },
    )
    branches: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples that share one initial latent. Network calls before their first noise are made "
            "only once for all of them (TempFlow-GRPO: num_generations 24 and branches 6 give 4 latents with 6 "
            "branches each). Must divide num_generations, and requires deterministic_outside_window. If this is not "
            "set, same_initial_noise decides which samples share a latent."
        },
    )
    best_of_n: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples per prompt to train on: the best half and the worst half of this number. Must "
            "be even. By default all samples are trained on."
        },
    )
    offload_trajectories: bool = field(
        default=False, metadata={"help": "Keep recorded latents in CPU memory until they are replayed."}
    )

    # Process
    sde_type: str = field(
        default="auto",
        metadata={
            "help": (
                "Stochastic process of the denoising steps: flow_sde, dance_sde, wan_sde, cps, precise, ddim or "
                "ancestral. auto selects flow_sde for flow matching, ancestral for EDM and ddim otherwise."
            )
        },
    )
    noise_level: float | None = field(
        default=None,
        metadata={
            "help": (
                "Noise level of the process. By default 0.7 for flow_sde, 0.3 for dance_sde, 0.8 for cps, 1.5 for "
                "precise and 1.0 for the others."
            )
        },
    )
    sde_window: list[int] | None = field(
        default=None,
        metadata={
            "help": "Range [start, stop) of the steps that may be trained. By default the first half of the steps. "
            "With timestep_fraction, permute_steps, noise_in_last_step or advantage_estimator gae, the default is all "
            "steps except the last; for losses on re-noised samples it is all steps except the first."
        },
    )
    sde_window_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of consecutive steps within sde_window to train; sde_window_order selects which ones. The "
            "default is 1 if sde_window is unset and its own default is the first half of the steps; otherwise it is "
            "the whole window."
        },
    )
    sde_window_order: Literal["random", "per_prompt", "sliding"] = field(
        default="random",
        metadata={
            "help": "How sde_window_size steps are selected from sde_window. random: at random for each rollout "
            "(Flow-GRPO-Fast). per_prompt: at random for each prompt of a rollout (Flash-GRPO). sliding: one step "
            "further every sde_window_interval updates, from the start of sde_window to its end, and then from the "
            "start again (MixGRPO)."
        },
    )
    sde_window_interval: int = field(
        default=25, metadata={"help": "Number of updates between two moves of a sliding window (sde_window_order)."}
    )
    timestep_fraction: float = field(
        default=1.0, metadata={"help": "Fraction of the steps in the window that is trained for each sample."}
    )
    permute_steps: bool = field(
        default=False,
        metadata={
            "help": "Select the trained steps at random for each sample. By default the first ones of the window are "
            "trained."
        },
    )
    deterministic_outside_window: bool | None = field(
        default=None,
        metadata={
            "help": "Draw no noise in steps outside the window (Flow-GRPO-Fast, MixGRPO). By default true, but false "
            "with noise_in_last_step."
        },
    )
    noise_in_last_step: bool = field(
        default=False,
        metadata={
            "help": "Draw noise in the last step of a rollout too, as Flow-GRPO's base scripts for SD3 and FLUX do. "
            "This noise remains in the finished sample, and the step is never trained. Works with flow_sde, "
            "dance_sde, wan_sde and ddim; cps, precise and ancestral have no noise in the last step."
        },
    )
    log_prob_type: str = field(
        default="gaussian",
        metadata={
            "help": "How the log-probability of a step is computed: gaussian, or squared_error. squared_error is "
            "minus the mean squared distance to the step's mean, without the division by 2 std^2 and the constants, "
            "as in Flow-GRPO's code for cps. It works with cps only."
        },
    )

    # Tokens, in pipelines with a language model
    temperature: float | None = field(
        default=None,
        metadata={"help": "Sampling temperature of tokens; by default the value in the model's generation config."},
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "help": "Sample tokens only from the N most probable ones; 0 means no limit. By default the value in the "
            "model's generation config, or transformers' 50 if it has none."
        },
    )
    top_p: float | None = field(
        default=None,
        metadata={
            "help": "Sample tokens only from the most probable ones that together reach this probability; by default "
            "the value in the model's generation config."
        },
    )
