"""Does this pipeline train? One small rollout and its replay answer in seconds, without touching the pipeline.

In: a pipeline and keyword arguments of its `__call__`. Out: a `ReplayReport`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from .rollout import Policy, replay, rollout, sample_seed
from .schedulers import UnsupportedScheduler

MAX_RATIO_ERROR = 1e-5


@dataclasses.dataclass
class ReplayReport:
    """What `check_pipeline` found.

    Attributes:
        pipeline, scheduler: class names.
        policy: name of the network that would be trained.
        steps: replayed steps.
        max_log_prob_error: largest |log p of the replay - log p of the rollout|.
        max_ratio_error: largest |ratio - 1|, over samples and steps; 0 is what on-policy means.
        grad_norm: of the replayed log-probabilities, over the network's parameters.
        trains: whether the ratio is 1 within 1e-5 and gradients arrive.
        reason: a sentence, where it does not train.
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
    pipe: DiffusionPipeline,
    inputs: dict[str, Any],
    num_inference_steps: int = 4,
    sde_type: str = "auto",
    noise_level: float | None = None,
    seed: int = 0,
) -> ReplayReport:
    """Rolls the pipeline out once and replays every step.

    The pipeline is left as it was: scheduler, forward, gradients, training mode and frozen parameters.

    Args:
        pipe: any diffusers pipeline.
        inputs: keyword arguments of its `__call__`, e.g. `{"prompt": ["a cat", "a dog"], "height": 512}`.
        num_inference_steps: at least 2; the last step has no noise and is not replayed.
        sde_type, noise_level: the process, see [`~diffusion_grpo.schedulers.stochastic_scheduler`].
        seed: of the samples.
    """
    report = ReplayReport(type(pipe).__name__, type(pipe.scheduler).__name__)
    if num_inference_steps < 2:
        raise ValueError(f"num_inference_steps must be at least 2 to replay a step, got {num_inference_steps}.")
    try:
        policy = Policy(pipe, sde_type=sde_type)
    except UnsupportedScheduler as error:
        return dataclasses.replace(report, reason=str(error))
    report.policy = policy.component
    seeds = [sample_seed(seed, row) for row in range(_count(inputs))]
    with _untouched(pipe, policy.network) as parameters:
        _, trajectory = rollout(
            policy, inputs, seeds=seeds, num_inference_steps=num_inference_steps, noise_level=noise_level
        )
        squares = [torch.zeros(()) for _ in parameters]
        differences = []
        for column, step in enumerate(trajectory.steps[0].tolist()):
            with torch.enable_grad():
                log_prob = replay(policy, inputs, trajectory, step).log_prob
                gradients = torch.autograd.grad(log_prob.sum(), parameters, allow_unused=True)
            squares += [gradient.float().square().sum().cpu() for gradient in gradients if gradient is not None]
            differences.append((log_prob.detach().cpu() - trajectory.log_probs[:, column]).double())
    report.steps = len(differences)
    report.grad_norm = float(torch.stack(squares).sum().sqrt())
    report.max_log_prob_error = float(torch.stack(differences).abs().max())
    report.max_ratio_error = float(torch.stack(differences).expm1().abs().max())
    report.reason = _why_not(report)
    report.trains = report.reason is None
    return report


def _count(inputs: dict[str, Any]) -> int:
    """Samples in one call: prompts times images a prompt."""
    prompts = inputs.get("prompt", inputs.get("prompt_embeds"))
    count = 1 if prompts is None or isinstance(prompts, str) else len(prompts)
    return count * max(inputs.get("num_images_per_prompt") or 1, inputs.get("num_videos_per_prompt") or 1)


def _why_not(report: ReplayReport) -> str | None:
    if not report.max_ratio_error <= MAX_RATIO_ERROR:
        return (
            f"the replay does not reproduce the rollout: the ratio is off by {report.max_ratio_error:.1e}, more than "
            f"{MAX_RATIO_ERROR:.0e}; something in the pipeline is random or stateful between two calls."
        )
    if not 0 < report.grad_norm < float("inf"):
        return f"the gradient that reaches {report.policy} has norm {report.grad_norm}."
    return None


@contextlib.contextmanager
def _untouched(pipe: DiffusionPipeline, network: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Every module in eval mode and the network's parameters trainable, as long as the check runs."""
    modules = [module for part in pipe.components.values() if isinstance(part, nn.Module) for module in part.modules()]
    modes = [module.training for module in modules]
    parameters = [parameter for parameter in network.parameters() if parameter.is_floating_point()]
    frozen = [not parameter.requires_grad for parameter in parameters]
    for module in modules:
        module.training = False
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield parameters
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for parameter, was_frozen in zip(parameters, frozen, strict=True):
            parameter.requires_grad_(not was_frozen)
