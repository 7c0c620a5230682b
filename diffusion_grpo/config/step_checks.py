"""Refuse settings of the denoising steps: windows, branches, noise levels, the last step."""

import numbers

from .call_arguments import check_pipeline_kwargs
from .defaults import Sizes


def check_steps(args: Sizes) -> None:
    """Refuse steps and noise levels that a rollout cannot have.

    Raises:
        ValueError: in one sentence, what was found and what to change.
    """
    check_pipeline_kwargs(args.pipeline_kwargs)
    _check_sigmas(args)
    _check_last_step(args)
    last = args.num_inference_steps - 1
    window = list(args.sde_window or args.window)
    if args.is_renoised:
        if len(window) != 2 or not 1 <= window[0] < window[1] <= last + 1:
            raise ValueError(
                f"sde_window={window} must be [start, stop) with 1 <= start < stop <= {last + 1}: "
                f"loss_type={args.loss_type!r} needs a step before the trained one to pass on the noised sample, so "
                "step 0 cannot be trained."
            )
    elif len(window) != 2 or not 0 <= window[0] < window[1] <= last:
        raise ValueError(
            f"sde_window={window} must be [start, stop) with 0 <= start < stop <= {last}: of {last + 1} steps the "
            "last has no noise and is never trained."
        )
    if args.window_size > window[1] - window[0]:
        raise ValueError(
            f"sde_window_size={args.sde_window_size} does not fit into the steps {window[0]} to {window[1] - 1} "
            "that may be trained; lower it, or widen sde_window."
        )
    if args.sde_window_order != "random" and args.window_size == window[1] - window[0]:
        chooses = f"sde_window_order={args.sde_window_order!r} chooses"
        if args.window_size == 1:
            raise ValueError(
                f"{chooses} which steps of the window are trained, but the window has only one step; widen sde_window."
            )
        raise ValueError(
            f"{chooses} which part of the window is trained, but all {args.window_size} steps of the window are "
            "trained; set sde_window_size to a smaller number."
        )
    _check_branches(args)


def _check_branches(args: Sizes) -> None:
    if args.branches is None:
        return
    if args.num_generations % args.branches:
        raise ValueError(
            f"branches={args.branches} does not divide num_generations={args.num_generations}: each initial "
            "latent of a prompt needs the same number of samples; change one of them."
        )
    if not args.silent_outside_window:
        raise ValueError(
            f"branches={args.branches} lets samples share the steps before their first noisy one, but all steps draw "
            "noise; set deterministic_outside_window=True and leave noise_in_last_step out."
        )
    if args.same_initial_noise and args.branches != args.num_generations:
        raise ValueError(
            f"same_initial_noise=True gives each prompt one initial latent, but branches={args.branches} gives it "
            f"{args.num_generations // args.branches}; leave one of them out."
        )
    if args.advantage_estimator == "gae":
        raise ValueError(
            "advantage_estimator='gae' reads the conditions of each sample in its first step, but branches share that "
            "step; leave one of them out."
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


def _check_last_step(args: Sizes) -> None:
    if args.noise_in_last_step and args.deterministic_outside_window:
        raise ValueError(
            "noise_in_last_step=True and deterministic_outside_window=True contradict each other: the last step is "
            "outside every window; set one of them to False."
        )
