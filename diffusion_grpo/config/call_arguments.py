"""Which arguments of a pipeline's call the user must not give."""

from typing import Any

# arguments of a pipeline's call that the rollout sets
RESERVED = {"num_inference_steps", "generator", "output_type", "return_dict", "latents", "timesteps", "sigmas"}
SAMPLE_COUNTS = {"num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"}
# the settings to use instead of them
SETTINGS = {"num_inference_steps": "num_inference_steps, eval_num_inference_steps", "sigmas": "the setting sigmas"}


def check_pipeline_kwargs(given: dict[str, Any] | None) -> None:
    """Refuse arguments of the pipeline's call that the trainer sets, that would make more samples, or that list
    texts.
    """
    for name, value in (given or {}).items():
        if reason := explain_reserved(name):
            raise ValueError(f"pipeline_kwargs: {reason}; leave it out.")
        if "prompt" in name and isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value):
            raise ValueError(
                f"pipeline_kwargs: {name} is a list of {len(value)} texts, but it applies to every prompt of the run; "
                f"give one text, or add a column {name!r} with one text per prompt."
            )


def explain_reserved(name: str) -> str | None:
    """Return why the user must not give an argument of the pipeline's call, or None if it is allowed."""
    if name in SAMPLE_COUNTS:
        return f"{name} would hide samples from the groups, whose size is num_generations"
    own = f" ({SETTINGS[name]})" if name in SETTINGS else ""
    return f"{name} is set by the trainer{own}" if name in RESERVED else None
