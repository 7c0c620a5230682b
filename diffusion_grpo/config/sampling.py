"""Settings of the samples and how they are drawn (SDE, tokens): a base class of `DiffusionGRPOConfig`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .declare import Count, Fraction, Positive, Range, setting


@dataclass
class SamplingSettings:
    """How samples are drawn: their number and size, the SDE, the tokens."""

    # Samples
    num_generations: Count = setting(
        16,
        "Number of samples per prompt (the size of a group); at least 2 if rewards are compared within a group.",
    )
    num_generations_eval: Count = setting(1, "Number of samples per prompt in evaluations.")
    num_inference_steps: Annotated[int, Range(2)] = setting(10, "Number of denoising steps in a training rollout.")
    eval_num_inference_steps: Count | None = setting(
        None, "Number of denoising steps in evaluations; by default as in training."
    )
    eval_pipeline_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Arguments of the pipeline's call in evaluations and for validation_prompts, in place of those of training "
        "and of dataset columns, such as another height or guidance_scale.",
    )
    sigmas: list[float] | str | None = setting(
        None,
        "Noise levels of the denoising steps in a training rollout, before the scheduler's shift: "
        "num_inference_steps numbers that start at 1.0 and decrease, or even: equal steps down to 0 "
        "(docs/algorithms/noise.md).",
    )
    guidance_scale: float | None = setting(None, "Guidance scale; by default the pipeline's own.")
    height: Count | None = setting(None, "Height in pixels; by default the pipeline's own.")
    width: Count | None = setting(None, "Width in pixels; by default the pipeline's own.")
    num_frames: Count | None = setting(None, "Number of frames per video; by default the pipeline's own.")
    fps: Positive | None = setting(
        None,
        "Frame rate of videos, for rewards and saved files. By default that of the pipeline's call (LTX), otherwise "
        "16.",
    )
    pipeline_kwargs: dict[str, Any] | str | None = setting(None, "More arguments for every call of the pipeline.")
    scheduler_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Settings to override in the pipeline's scheduler, such as {shift: 3.0}. Where the shift depends on the size "
        "(FLUX, Qwen-Image), also set use_dynamic_shifting: false, or shift has no effect.",
    )
    rollout_batch_size: Count | None = setting(
        None,
        "Number of samples generated together in a rollout. By default per_device_train_batch_size, so that the "
        "first ratio is exactly 1.",
    )
    decode_batch_size: Count | None = setting(
        None,
        "Number of samples that the VAE decodes together; by default all samples of a call. A smaller number saves "
        "memory and does not change the samples.",
    )
    vae_slicing: bool = setting(False, "Let the VAE encode and decode one sample at a time.")
    vae_tiling: bool = setting(
        False,
        "Let the VAE encode and decode large samples in overlapping tiles. The seams are blended, so the samples "
        "change slightly.",
    )
    samples_per_latent: int | str | None = setting(
        None,
        "Number of samples that share one initial latent, and the network calls until noise is drawn "
        "(docs/algorithms/noise.md): a divisor of num_generations, or group. By default group, but 1 with "
        "advantage_estimator gae and for losses on re-noised samples.",
    )
    best_of_n: int | None = setting(
        None,
        "Even number of samples per prompt to train on, half of them the best, half the worst. By default all are "
        "trained on.",
    )
    offload_trajectories: bool = setting(False, "Keep recorded latents in CPU memory until they are replayed.")
    ds3_gather_for_generation: bool = setting(
        True,
        "Under ZeRO-3, gather the whole network once per rollout and per part of an evaluation, which is fast but "
        "takes memory for it; otherwise layer by layer.",
    )
    fsdp_gather_for_generation: bool = setting(
        False,
        "Under FSDP2, gather each block once per rollout and per part of an evaluation, which is fast but takes "
        "memory for the whole network; otherwise for each of its calls.",
    )

    # SDE
    sde_type: str = setting(
        "auto",
        "SDE of the denoising steps: flow_sde, dance_sde, wan_sde, cps, precise, ddim, ancestral, consistency or "
        "tcd. auto selects the usual one for the pipeline's scheduler.",
    )
    noise_level: Positive | None = setting(
        None,
        "Noise level of the SDE. By default 0.7 for flow_sde, 0.3 for dance_sde, 0.8 for cps, 1.5 for precise and "
        "1.0 for the others.",
    )
    trained_steps: list[int] | str | None = setting(
        None,
        "The denoising steps that may be trained: a range [start, stop), or all (but the last, or but the first for "
        "losses on re-noised samples). By default the first half of the steps, but all with advantage_estimator gae "
        "and for losses on re-noised samples. For draft, the steps at one of which gradients end.",
    )
    num_trained_steps: Count | None = setting(
        None,
        "How many of trained_steps are trained. By default all of them, but 1 of the default first half. For draft "
        "without trained_steps, the number of last steps with a gradient, by default 1.",
    )
    step_selection: Literal["rollout", "prompt", "sliding", "sample"] = setting(
        "rollout",
        "How num_trained_steps are selected from trained_steps (docs/algorithms/noise.md). rollout, prompt: "
        "consecutive steps, drawn for each rollout or prompt. sliding: consecutive steps that move every "
        "step_interval updates. sample: steps drawn one by one for each sample.",
    )
    step_interval: Count = setting(25, "Number of updates between two moves of step_selection sliding.")
    noisy_steps: Literal["trained", "all", "all_and_last"] = setting(
        "trained",
        "The denoising steps that draw noise. trained: those that are trained, or may be with step_selection sample. "
        "all: all but the last. all_and_last: the last too, which is never trained (cps, precise and ancestral have "
        "no noise there).",
    )
    log_prob_type: Literal["gaussian", "squared_error"] = setting(
        "gaussian",
        "How the log-probability of a step is computed: gaussian, or squared_error, minus the mean squared distance "
        "to the mean (only for cps, as in Flow-GRPO's code).",
    )

    # Tokens, in pipelines with a language model
    temperature: Positive | None = setting(
        None, "Sampling temperature of tokens; by default that of the model's generation config."
    )
    top_k: Annotated[int, Range(0)] | None = setting(
        None,
        "Sample tokens only from the N most probable ones; 0 means no limit. By default that of the model's "
        "generation config, or 50.",
    )
    top_p: Fraction | None = setting(
        None,
        "Sample tokens only from the most probable ones that together reach this probability; by default that of the "
        "model's generation config.",
    )
