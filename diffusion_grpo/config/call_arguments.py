"""Which arguments of a pipeline's call are not the user's to give."""

from typing import Any

# arguments of a pipeline's call that are the rollout's own
RESERVED = {"num_inference_steps", "generator", "output_type", "return_dict", "latents", "timesteps", "sigmas"}
SAMPLE_COUNTS = {"num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"}
# and what sets them in their place
SETTINGS = {"num_inference_steps": "num_inference_steps, eval_num_inference_steps", "sigmas": "the setting sigmas"}


def check_pipeline_kwargs(given: dict[str, Any] | None) -> None:
    """Refuse arguments of the pipeline's call that the trainer sets, or that would make more samples.

    Raises:
        ValueError: there is such an argument.
    """
    for name in given or {}:
        if reason := explain_reserved(name):
            raise ValueError(f"pipeline_kwargs: {reason}; leave it out.")


def explain_reserved(name: str) -> str | None:
    """Return why an argument of the pipeline's call is not the user's to give, or None if it is."""
    if name in SAMPLE_COUNTS:
        return f"{name} would hide samples from the groups, whose size is num_generations"
    own = f" ({SETTINGS[name]})" if name in SETTINGS else ""
    return f"{name} is set by the trainer{own}" if name in RESERVED else None
