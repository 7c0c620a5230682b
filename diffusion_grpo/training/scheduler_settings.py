"""Change settings of a pipeline's scheduler, and check that it takes `sigmas` as they are."""

import difflib
import inspect
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin

from ..policy.schedulers import step_kind
from ..policy.stochastic_steps import FlowSteps

SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")


def change_scheduler(scheduler: SchedulerMixin, settings: dict[str, Any]) -> SchedulerMixin:
    """Build a scheduler anew with some of its settings changed, e.g. `{"shift": 3.0}`; refuse unknown settings."""
    cls = type(scheduler)
    known = sorted(set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"})
    unknown = sorted(set(settings) - set(known))
    if unknown:
        near = [name for name in unknown for name in difflib.get_close_matches(name, known, n=1)]
        hint = f"; did you mean {', '.join(near)}?" if near else "."
        raise ValueError(
            f"scheduler_kwargs: {cls.__name__} has no setting {', '.join(unknown)}; it has {', '.join(known)}{hint}"
        )
    return cls.from_config(scheduler.config, **settings)


def check_sigmas(scheduler: SchedulerMixin) -> None:
    """Refuse `sigmas` for a scheduler that does not take them as they are."""
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
