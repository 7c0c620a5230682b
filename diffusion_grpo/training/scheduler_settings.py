"""Change settings of a pipeline's scheduler, and refuse a setting that has no effect.

Whether a setting has an effect is measured. The scheduler is built with and without it, set to a few steps as the
pipeline would do, and stepped on the same tensors by the class that training uses.
"""

import difflib
import inspect
import re
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from ..policy.schedulers import step_kind, stochastic_scheduler
from ..policy.stochastic_steps import CosineSteps, FlowSteps, StochasticScheduler

STEPS = 4  # number of steps of the schedules that are compared
NOISE_LEVEL = 0.5
MU = 0.8  # replaces the value that a pipeline computes from the size, if it has no `calculate_shift`
TOKENS = 1024  # between `calculate_shift`'s base and largest sequence length, so that both matter
# settings that decide whether others are read -> values that may be advised
SWITCHES = {"use_dynamic_shifting": (True, False), "use_flow_sigmas": (True,)}
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
OF_SHIFT = {  # setting of the scheduler -> argument of the pipelines' `calculate_shift`
    "base_image_seq_len": "base_seq_len",
    "max_image_seq_len": "max_seq_len",
    "base_shift": "base_shift",
    "max_shift": "max_shift",
}


def change_scheduler(
    scheduler: SchedulerMixin, settings: dict[str, Any], pipeline: type[DiffusionPipeline]
) -> SchedulerMixin:
    """Build the scheduler anew with some of its settings changed.

    Args:
        scheduler: the pipeline's own; it is not modified.
        settings: settings to change, e.g. `{"shift": 3.0}`.
        pipeline: the class that sets the scheduler's steps.

    Raises:
        ValueError: the scheduler has no such setting, or the setting changes no step; the message says what to set.
    """
    cls = type(scheduler)
    known = sorted(set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"})
    unknown = sorted(set(settings) - set(known))
    if unknown:
        near = [name for name in unknown for name in difflib.get_close_matches(name, known, n=1)]
        hint = f"; did you mean {', '.join(near)}?" if near else "."
        raise ValueError(
            f"scheduler_kwargs: {cls.__name__} has no setting {', '.join(unknown)}; it has {', '.join(known)}{hint}"
        )
    changed = cls.from_config(scheduler.config, **settings)
    for name in settings:
        if not _acts(name, changed, scheduler.config.get(name), pipeline):
            raise ValueError(_refusal(name, changed, scheduler.config.get(name), pipeline))
    return changed


def check_sigmas(scheduler: SchedulerMixin) -> None:
    """Refuse `sigmas` for a scheduler that does not take them as they are.

    Raises:
        ValueError: the scheduler is not for flow matching, or it spaces its steps itself.
    """
    name = type(scheduler).__name__
    if step_kind(scheduler) is not FlowSteps:
        raise ValueError(f"sigmas work with flow matching only; this pipeline's scheduler is {name}. Leave them out.")
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"sigmas: {name} spaces its steps itself; give the pipeline a FlowMatchEulerDiscreteScheduler, or leave "
            "them out."
        )
    for setting in SPACINGS:
        if scheduler.config.get(setting):
            raise ValueError(
                f"sigmas: {name} spaces its steps itself, since it has {setting}=True; set scheduler_kwargs: "
                f"{{{setting}: false}}, or leave them out."
            )


def _refusal(name: str, scheduler: SchedulerMixin, before: Any, pipeline: type[DiffusionPipeline]) -> str:
    """Return the error message, naming the switch, if any, that would make the setting take effect."""
    config = scheduler.config
    found = f"scheduler_kwargs: {name}={config[name]} changes no step of {pipeline.__name__}"
    for switch, advised in SWITCHES.items():
        if switch == name or switch not in config or (not config[switch]) not in advised:
            continue
        switched = type(scheduler).from_config(config, **{switch: not config[switch]})
        if _acts(name, switched, before, pipeline):
            advice = f"also set {switch}: {str(not config[switch]).lower()}"
            if config.get("shift_terminal"):
                advice += f", and shift_terminal: null, or the sigmas are stretched to {config['shift_terminal']}"
            return f"{found}, whose scheduler has {switch}={config[switch]}; {advice}, or leave it out."
    return f"{found} as its {type(scheduler).__name__} is set here; leave it out."


def _acts(name: str, scheduler: SchedulerMixin, before: Any, pipeline: type[DiffusionPipeline]) -> bool:
    """Return whether a setting of `scheduler` gives other steps than the value `before` does."""
    value = scheduler.config[name]
    if value == before:
        if not isinstance(before, float):
            return True  # it only states the current value
        before = value + 1.0  # would another value change anything?
    try:
        other = type(scheduler).from_config(scheduler.config, **{name: before})
    except ValueError:  # the settings depend on each other
        return True
    kind = step_kind(scheduler)
    if kind is None or kind is not step_kind(other) or (name not in OF_SHIFT and _is_read(name, pipeline)):
        return True
    pairs = zip_longest(_steps(scheduler, pipeline), _steps(other, pipeline), fillvalue=torch.empty(0))
    return not all(torch.equal(one, another) for one, another in pairs)


def _is_read(name: str, pipeline: type[DiffusionPipeline]) -> bool:
    """Return whether the pipeline itself reads this setting of its scheduler."""
    pattern = re.compile(rf"scheduler\.config(\.|\[[\"']|\.get\([\"']){name}\b")
    classes = pipeline.__mro__[: pipeline.__mro__.index(DiffusionPipeline)]
    try:
        return any(pattern.search(inspect.getsource(cls)) for cls in classes)
    except OSError:  # no source: it may read the setting
        return True


def _steps(scheduler: SchedulerMixin, pipeline: type[DiffusionPipeline]) -> list[Tensor]:
    """Return what a pipeline call takes from the scheduler, for each way of setting its timesteps."""
    seen = []
    for arguments in _ways(scheduler, pipeline):
        stochastic = stochastic_scheduler(scheduler)
        known = inspect.signature(stochastic.set_timesteps).parameters
        stochastic.set_timesteps(**{name: value for name, value in arguments.items() if name in known})
        seen.append(stochastic.timesteps.double())
        # steps of flow matching depend on the sigmas alone
        seen += [stochastic.sigmas.double()] if isinstance(stochastic, FlowSteps) else _walk(stochastic)
    return seen


def _ways(scheduler: SchedulerMixin, pipeline: type[DiffusionPipeline]) -> list[dict[str, Any]]:
    """Return arguments of `set_timesteps` as the pipeline would give them."""
    ways: list[dict[str, Any]] = [{"num_inference_steps": STEPS}]
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        ways.append({"sigmas": np.linspace(1.0, 1 / STEPS, STEPS).tolist()})  # as FLUX and most others do
    if not scheduler.config.get("use_dynamic_shifting"):
        return ways
    shift: Callable | None = inspect.unwrap(pipeline.__call__).__globals__.get("calculate_shift")
    if shift is None:
        return [way | {"mu": MU} for way in ways]
    config, known = scheduler.config, inspect.signature(shift).parameters
    given = {theirs: config[ours] for ours, theirs in OF_SHIFT.items() if ours in config and theirs in known}
    return [way | {"mu": shift(TOKENS, **given)} for way in ways]


def _walk(scheduler: StochasticScheduler) -> list[Tensor]:
    """Return the scale of the latents and, for each step, the scaled input, mean, std and noise-free result."""
    noise = torch.Generator().manual_seed(0)
    latents, prediction = (
        30 * torch.randn(1, 4, 4, 4, generator=noise) for _ in range(2)
    )  # large enough to be clipped
    scheduler.driver = walked = _Walk()
    walked.seen.append(torch.as_tensor(getattr(scheduler, "init_noise_sigma", 1.0)))
    timesteps = scheduler.timesteps
    if isinstance(scheduler, CosineSteps):  # its pipeline passes one per sample, and not the last
        timesteps = timesteps[:-1, None]
    for timestep in timesteps:
        walked.seen.append(scheduler.scale_model_input(latents, timestep))
        scheduler.step(prediction, timestep, latents)
    return walked.seen


class _Walk:
    """A driver that records the values of each step."""

    def __init__(self):
        self.seen: list[Tensor] = []

    def step(self, scheduler: StochasticScheduler, index: int, prediction: Tensor, timestep: Any, sample: Tensor):
        """Record the step and return the sample unchanged."""
        mean, std = scheduler.distribution(prediction, timestep, sample, NOISE_LEVEL)
        self.seen += [mean, torch.as_tensor(std), scheduler.deterministic(prediction, timestep, sample)]
        return sample
