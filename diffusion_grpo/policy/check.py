"""Check whether a pipeline can be trained, by one small rollout and its replay."""

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from torch import Tensor, nn

from .drivers import UnsupportedPipeline
from .networks import avoid_cudnn_attention
from .rollout import DenoisingPolicy, replay, rollout, sample_seed
from .schedulers import UnsupportedScheduler

MAX_RATIO_ERROR = 1e-5


@dataclasses.dataclass
class ReplayReport:
    """What `check_pipeline` found.

    Attributes:
        pipeline, scheduler: class names.
        policy: name of the network that would be trained, or names joined by ", " if experts take turns.
        steps: number of replayed steps.
        max_log_prob_error: largest |log p of the replay - log p of the rollout|.
        max_ratio_error: largest |ratio - 1|, over samples and steps; 0 for an exact replay.
        grad_norm: gradient norm of the replayed log-probabilities, over the networks' parameters; NaN if a step has no
            gradient.
        trains: whether the ratio is 1 within 1e-5 and gradients reach the networks.
        reason: why the pipeline cannot be trained, in one sentence; None if it can.

    Examples:
        >>> from diffusers import HeliosScheduler
        >>> own, pipe.scheduler = pipe.scheduler, HeliosScheduler()
        >>> report = check_pipeline(pipe, inputs)
        >>> pipe.scheduler = own
        >>> report.trains
        False
        >>> report.reason[:43]
        'HeliosScheduler belongs to a rollout over c'
    """

    pipeline: str
    scheduler: str
    policy: str | None = None
    steps: int = 0
    max_log_prob_error: float = float("nan")
    max_ratio_error: float = float("nan")
    grad_norm: float = float("nan")
    trains: bool = False
    reason: str | None = None


def check_pipeline(
    pipe: DiffusionPipeline | ModularPipeline,
    inputs: dict[str, Any],
    num_inference_steps: int = 4,
    sde_type: str = "auto",
    noise_level: float | None = None,
    seed: int = 0,
) -> ReplayReport:
    """Roll the pipeline out once, to the end as in training, and replay every step.

    Scheduler, forward, gradients, training mode and frozen parameters of the pipeline are left as they were.

    Args:
        pipe: any diffusers pipeline, classic or modular.
        inputs: keyword arguments of its `__call__`, e.g. `{"prompt": ["a cat", "a dog"], "height": 512}`.
        num_inference_steps: length of the loop, at least 2; the last step has no noise and is not replayed.
        sde_type, noise_level: the SDE, see [`~diffusion_grpo.policy.schedulers.stochastic_scheduler`].
        seed: seed of the samples.

    Returns:
        Whether the pipeline can be trained, how exact its replay is, and, if it cannot be trained, the reason. An
        error inside the pipeline is such a reason and is not raised.

    Raises:
        ValueError: fewer than 2 steps, or a noise level that is not above 0.
        torch.OutOfMemoryError: the call, or its gradient, does not fit into memory, which says nothing about
            the pipeline.

    Examples:
        >>> report = check_pipeline(pipe, inputs)
        >>> report.trains, report.policy, report.max_ratio_error
        (True, 'transformer', 0.0)
    """
    report = ReplayReport(type(pipe).__name__, type(getattr(pipe, "scheduler", None)).__name__)
    if num_inference_steps < 2:
        raise ValueError(f"num_inference_steps must be at least 2 to replay a step, got {num_inference_steps}.")
    if noise_level is not None and noise_level <= 0:
        raise ValueError(f"noise_level must be above 0 for a step to have a density, got {noise_level}.")
    try:
        policy = DenoisingPolicy(pipe, sde_type=sde_type)
    except (UnsupportedScheduler, UnsupportedPipeline) as error:
        return dataclasses.replace(report, reason=str(error))
    report.policy = ", ".join(policy.component)
    try:
        differences, squares = _replay_steps(policy, inputs, num_inference_steps, noise_level, seed)
    except (UnsupportedScheduler, UnsupportedPipeline) as error:
        return dataclasses.replace(report, reason=str(error))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the pipeline counts as an answer
        return dataclasses.replace(report, reason=_inner_error(error))
    report.steps = len(differences)
    report.grad_norm = float(torch.stack(squares).sum().sqrt())
    report.max_log_prob_error = float(torch.stack(differences).abs().max())
    report.max_ratio_error = float(torch.stack(differences).expm1().abs().max())
    report.reason = _why_not(report, policy)
    report.trains = report.reason is None
    return report


def _replay_steps(
    policy: DenoisingPolicy, inputs: dict[str, Any], num_inference_steps: int, noise_level: float | None, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the differences of the log-probabilities and the squared gradients, for each trained step."""
    seeds = [sample_seed(seed, row) for row in range(_count(inputs))]
    with _left_untouched(policy) as parameters, avoid_cudnn_attention():
        settings = dict(num_inference_steps=num_inference_steps, noise_level=noise_level)
        _, trajectory = rollout(policy, inputs, seeds=seeds, **settings)
        squares = [torch.zeros(())]
        differences = []
        for column, step in enumerate(trajectory.steps[0].tolist()):
            with torch.enable_grad():
                log_prob = replay(policy, inputs, trajectory, step).log_prob
            squares.append(_square_gradients(log_prob.sum(), parameters))
            differences.append(log_prob.detach().cpu() - trajectory.log_probs[:, column])
    return differences, squares


def _square_gradients(value: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Return the sum of the squared gradients of `value`; NaN if no gradient reaches the parameters."""
    if not value.requires_grad:
        return torch.tensor(float("nan"))
    squares: list[Tensor] = []

    def take(parameter: nn.Parameter) -> None:
        squares.append(parameter.grad.float().square().sum().cpu())
        parameter.grad = None  # at once: together they would take as much memory as the weights

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        value.backward(inputs=parameters)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(squares).sum() if squares else torch.tensor(float("nan"))


def _inner_error(error: Exception) -> str:
    """Describe an exception by class, message and place, in one sentence."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    message = f"{message[:300]}..." if len(message) > 300 else message
    return (
        f"The call ended with {type(error).__name__}: {message.rstrip('.')} "
        f"(in {place.name}, {Path(place.filename).name} line {place.lineno})."
    )


def _count(inputs: dict[str, Any]) -> int:
    """Count the samples of one call: prompts times images per prompt."""
    names = ("prompt", "prompt_embeds", "class_labels", "image_embeds", "image_embeddings", "image", "video")
    given: Any = next((inputs[name] for name in names if inputs.get(name) is not None), None)
    counts = isinstance(given, list) and not isinstance(given[0], list) or torch.is_tensor(given) and given.ndim > 1
    count = len(given) if counts else inputs.get("batch_size") or 1
    return count * max(inputs.get("num_images_per_prompt") or 1, inputs.get("num_videos_per_prompt") or 1)


def _why_not(report: ReplayReport, policy: DenoisingPolicy) -> str | None:
    if math.isnan(report.max_ratio_error):
        return (
            "The log-probabilities are not finite: something in the pipeline's weights or inputs is not finite either."
        )
    if not report.max_ratio_error <= MAX_RATIO_ERROR:
        precise = all(network.dtype in (torch.float32, torch.float64) for network in policy.networks)
        rounding = "" if precise else " Rounding in half precision may cause this too; check it in float32."
        return (
            f"The replay does not reproduce the rollout: the ratio is off by {report.max_ratio_error:.1e}, more than "
            f"{MAX_RATIO_ERROR:.0e}; something in the pipeline is random or stateful between two calls.{rounding}"
        )
    if not 0 < report.grad_norm < float("inf"):
        return f"In some step no finite gradient reaches {report.policy} (norm {report.grad_norm})."
    return None


@contextlib.contextmanager
def _left_untouched(policy: DenoisingPolicy) -> Iterator[list[nn.Parameter]]:
    """Put modules into eval mode and make the networks' parameters trainable; restore all on leaving."""
    pipe = policy.pipe
    modules = [module for part in pipe.components.values() if isinstance(part, nn.Module) for module in part.modules()]
    modes = [module.training for module in modules]
    parameters = [p for network in policy.networks for p in network.parameters() if p.is_floating_point()]
    frozen = [not parameter.requires_grad for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    attributes = dict(pipe.__dict__)  # a call sets attributes such as its guidance scale
    for module in modules:
        module.training = False
    for parameter in parameters:
        parameter.requires_grad_(True)
        parameter.grad = None
    try:
        yield parameters
    finally:
        pipe.__dict__.clear()
        pipe.__dict__.update(attributes)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for parameter, was_frozen, gradient in zip(parameters, frozen, gradients, strict=True):
            parameter.requires_grad_(not was_frozen)
            parameter.grad = gradient
