"""Refuse denoising steps and noise levels that a rollout cannot have."""

import numbers

from .call_arguments import check_pipeline_kwargs
from .defaults import Sizes


def check_steps(args: Sizes) -> None:
    """Refuse steps and noise levels that a rollout cannot have."""
    check_pipeline_kwargs(args.pipeline_kwargs)
    _check_sigmas(args)
    _check_trained_steps(args)
    sharing = args.samples_per_latent
    if sharing not in (None, "group") and (
        not isinstance(sharing, int) or sharing < 1 or args.num_generations % sharing
    ):
        raise ValueError(
            f"samples_per_latent={sharing!r} must be group or a divisor of num_generations={args.num_generations}."
        )


def _check_trained_steps(args: Sizes) -> None:
    steps, first = args.trained_steps, int(args.is_renoised)
    last = args.num_inference_steps - 1 + first
    if steps not in (None, "all"):
        is_range = isinstance(steps, (list, tuple)) and len(steps) == 2 and all(isinstance(at, int) for at in steps)
        if not is_range or not first <= steps[0] < steps[1] <= last:
            why = "step 0 cannot be handed a noised sample" if first else "the last step has no noise"
            raise ValueError(
                f"trained_steps={steps!r} must be all or [start, stop) with {first} <= start < stop <= {last} (of "
                f"num_inference_steps={args.num_inference_steps}, {why})."
            )
    if args.trained_count > len(args.trainable_steps):
        raise ValueError(
            f"num_trained_steps={args.num_trained_steps} is more than the {len(args.trainable_steps)} steps that may "
            "be trained; lower it, or widen trained_steps."
        )


def _check_sigmas(args: Sizes) -> None:
    """Refuse noise levels that do not form a schedule of the rollout's steps."""
    if args.sigmas is None:
        return
    is_list = isinstance(args.sigmas, (list, tuple)) and all(isinstance(level, numbers.Real) for level in args.sigmas)
    if not is_list or len(args.sigmas) < 2:
        raise ValueError(f"sigmas must be a list of at least two numbers, one per step, got {args.sigmas!r}.")
    if len(args.sigmas) != args.num_inference_steps:
        raise ValueError(
            f"sigmas holds {len(args.sigmas)} noise levels, one per step, but num_inference_steps="
            f"{args.num_inference_steps}; set num_inference_steps: {len(args.sigmas)}, or leave sigmas out (on the "
            "command line: --sigmas null)."
        )
    falls = all(high > low for high, low in zip(args.sigmas, [*args.sigmas[1:], 0.0], strict=True))
    if args.sigmas[0] != 1 or not falls:
        raise ValueError(
            f"sigmas={args.sigmas} must begin with 1.0, which is pure noise, and fall with every step to a last value "
            "above 0, from which the last step leads to the finished sample."
        )
    if args.eval_num_inference_steps is None:
        raise ValueError(
            "sigmas are for training rollouts, and evaluations keep the pipeline's own spacing; set "
            "eval_num_inference_steps to say with how many steps."
        )
