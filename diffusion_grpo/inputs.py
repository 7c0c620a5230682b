"""Keyword arguments of one pipeline call.

In: settings and dataset rows. Out: what the pipeline's `__call__` gets, the same for the same rows in rollout, replay
and evaluation. Which columns a pipeline takes is read off its signature.
"""

import inspect
from typing import Any

from diffusers import DiffusionPipeline

from .config import RESERVED, DiffusionGRPOConfig
from .data import pipeline_inputs

FROM_CONFIG = ("guidance_scale", "height", "width", "num_frames")


class PipelineInputs:
    """Builds the keyword arguments of a pipeline call from dataset rows.

    Args:
        pipe: the pipeline.
        args: its `guidance_scale`, `height`, `width`, `num_frames` and `pipeline_kwargs` go into every call.

    Raises:
        ValueError: a setting that the pipeline's `__call__` does not take, with the list of what it does.
    """

    def __init__(self, pipe: DiffusionPipeline, args: DiffusionGRPOConfig):
        self.accepted = set(inspect.signature(type(pipe).__call__).parameters) - {"self", *RESERVED}
        self.fixed = {name: getattr(args, name) for name in FROM_CONFIG if getattr(args, name) is not None}
        self.fixed |= args.pipeline_kwargs or {}
        unknown = sorted(set(self.fixed) - self.accepted)
        if unknown:
            raise ValueError(
                f"{type(pipe).__name__} does not take {', '.join(unknown)} from the settings; it takes "
                f"{', '.join(sorted(self.accepted))}."
            )

    def __call__(self, rows: list[dict[str, Any]], **overrides: Any) -> dict[str, Any]:
        """The keyword arguments for these rows; columns win over settings, `overrides` over both."""
        return {**self.fixed, **pipeline_inputs(rows, self.accepted), **overrides}
