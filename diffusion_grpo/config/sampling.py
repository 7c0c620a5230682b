"""Settings of what is sampled and by which process: a base of `DiffusionGRPOConfig`.

In: nothing. Out: fields, each with a `help`; `config.py` checks them together. A theme of settings is a file.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SamplingSettings:
    """How samples are made: their number and size, the process that draws them, the tokens."""

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
        metadata={
            "help": "Settings of the pipeline's scheduler in place of its own, for instance {shift: 3.0}; one that "
            "changes no step is refused with what to set."
        },
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

    noise_in_last_step: bool = field(
        default=False,
        metadata={
            "help": "Draw noise in the last step of a rollout too, which stays on the finished sample and is never "
            "trained (Flow-GRPO's base scripts for SD3 and FLUX). For flow_sde, dance_sde and ddim; in the last step "
            "cps and ancestral have none."
        },
    )
    log_prob_type: str = field(
        default="gaussian",
        metadata={
            "help": "gaussian, or squared_error: minus the mean squared distance to the step's mean, without the "
            "division by 2 std^2 and the constants (Flow-GRPO's code for cps, and for cps only)."
        },
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
