"""Settings of the samples and of the process that draws them: a base of `DiffusionGRPOConfig`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SamplingSettings:
    """How samples are drawn: their number and size, the process, the tokens."""

    # Samples
    num_generations: int = field(default=16, metadata={"help": "Samples per prompt: the group. At least 2."})
    num_generations_eval: int = field(default=1, metadata={"help": "Samples per prompt in evaluation."})
    num_inference_steps: int = field(default=10, metadata={"help": "Denoising steps of a training rollout."})
    eval_num_inference_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps in evaluation; by default those of training."}
    )
    sigmas: list[float] | None = field(
        default=None,
        metadata={
            "help": "Noise levels of the steps of a training rollout, num_inference_steps of them, falling from 1.0, "
            "before the scheduler's shift. Keep the trained steps as short as in evaluation, and make the others "
            "longer: for SD3, [1.0, 0.8, 0.53, 0.27] has the first of six steps, then three longer ones. Evaluations "
            "keep the pipeline's own spacing. For flow matching, if the pipeline's call takes sigmas."
        },
    )
    guidance_scale: float | None = field(default=None, metadata={"help": "Guidance; by default the pipeline's own."})
    height: int | None = field(default=None, metadata={"help": "Height in pixels; by default the pipeline's own."})
    width: int | None = field(default=None, metadata={"help": "Width in pixels; by default the pipeline's own."})
    num_frames: int | None = field(
        default=None, metadata={"help": "Frames of a video; by default the pipeline's own."}
    )
    fps: float | None = field(
        default=None,
        metadata={
            "help": "Frames per second of videos. It is passed to rewards, and saved videos play at this speed. By "
            "default that of the pipeline's call if it has one (LTX), otherwise 16."
        },
    )
    pipeline_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further keyword arguments for every call of the pipeline."}
    )
    scheduler_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings that replace those of the pipeline's scheduler, for instance {shift: 3.0}. A setting "
            "that changes no step is refused, and the message says what to set instead."
        },
    )
    rollout_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples rolled out together. By default per_device_train_batch_size, so that rollout and update "
            "see the same batches and the first ratio is exactly 1."
        },
    )
    decode_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples that the VAE decodes together, in rollouts and evaluations; by default all "
            "samples of a call. A small number saves memory, and the samples are the same."
        },
    )
    vae_slicing: bool = field(
        default=False,
        metadata={"help": "Let the VAE encode and decode one sample at a time (diffusers' enable_slicing)."},
    )
    vae_tiling: bool = field(
        default=False,
        metadata={
            "help": "Let the VAE encode and decode large samples in overlapping tiles (diffusers' enable_tiling); "
            "seams are blended, so samples differ slightly."
        },
    )
    same_initial_noise: bool | None = field(
        default=None,
        metadata={
            "help": "Start all samples of a prompt from one initial latent. They are identical until they draw their "
            "first noise, so the network calls before it are made once for all of them. Within a micro-batch they "
            "also share the pass with gradient through the first noisy step. By default true, but false with "
            "branches, with advantage_estimator gae and on re-noised samples."
        },
    )
    branches: int | None = field(
        default=None,
        metadata={
            "help": "Number of samples that share one initial latent. Network calls before their first noise are made "
            "once for all of them (TempFlow-GRPO: num_generations 24 and branches 6 give 4 latents with 6 branches "
            "each). Must divide num_generations; needs deterministic_outside_window. If this is not set, "
            "same_initial_noise decides which samples share a latent."
        },
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
                "auto, flow_sde, dance_sde, wan_sde, cps, precise, ddim or ancestral. auto: flow_sde for flow "
                "matching, ancestral for EDM, else ddim."
            )
        },
    )
    noise_level: float | None = field(
        default=None,
        metadata={
            "help": (
                "Noise of the process. By default flow_sde 0.7, dance_sde 0.3, cps 0.8, precise 1.5, the others 1.0."
            )
        },
    )
    sde_window: list[int] | None = field(
        default=None,
        metadata={
            "help": "Range [start, stop) of the steps that may be trained. By default the first half of the steps. "
            "With timestep_fraction, permute_steps, noise_in_last_step or advantage_estimator gae, the default is all "
            "steps but the last; on re-noised samples it is all steps but the first."
        },
    )
    sde_window_size: int | None = field(
        default=None,
        metadata={
            "help": "Train only N consecutive steps within sde_window; sde_window_order says which. If sde_window is "
            "unset and its default is the first half of the steps, the default is 1; otherwise it is the whole of "
            "sde_window."
        },
    )
    sde_window_order: str = field(
        default="random",
        metadata={
            "help": "Which sde_window_size steps of sde_window are trained. random: drawn anew for each rollout "
            "(Flow-GRPO-Fast). per_prompt: drawn for each prompt of a rollout (Flash-GRPO). sliding: one step "
            "further every sde_window_interval updates, from the start of sde_window to its end, and then from the "
            "start again (MixGRPO)."
        },
    )
    sde_window_interval: int = field(
        default=25, metadata={"help": "Updates between two moves of a sliding window (sde_window_order)."}
    )
    timestep_fraction: float = field(
        default=1.0, metadata={"help": "Share of the steps in the window that is trained for each sample."}
    )
    permute_steps: bool = field(
        default=False,
        metadata={
            "help": "Draw the trained steps anew for each sample; otherwise the first ones of the window are taken."
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
            "help": "Draw noise in the last step of a rollout too; it stays on the finished sample and is never "
            "trained (Flow-GRPO's base scripts for SD3 and FLUX). For flow_sde, dance_sde, wan_sde and ddim; cps, "
            "precise and ancestral have no noise in the last step."
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
        default=None, metadata={"help": "Temperature of tokens; by default the one in the model's generation config."}
    )
    top_k: int | None = field(
        default=None,
        metadata={
            "help": "Draw tokens from the N most probable ones; 0 for all. By default the value in the model's "
            "generation config, or transformers' 50 if it has none."
        },
    )
    top_p: float | None = field(
        default=None,
        metadata={
            "help": "Draw tokens from the most probable ones that together have this probability; by default the "
            "value in the model's generation config."
        },
    )
