"""Which SDE a diffusers scheduler can run, and the scheduler that runs it.

`stochastic_scheduler` keeps class, config and schedule of a pipeline's scheduler if possible, so that the pipeline
sees no difference. The `step` of its result asks a driver for the next latent (`stochastic_steps.py`). Schedulers that
cannot be trained are refused with a reason. `change_scheduler` sets settings, `watch_solver` reports steps.
"""

import copy
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CosineDPMSolverMultistepScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    MiniMaxH3Scheduler,
    PNDMScheduler,
    SchedulerMixin,
    UnCLIPScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from .consistency import CONSISTENCY_STEPS
from .sde import LOG_PROBS, SDES, check_log_prob, sdes_of
from .stochastic_steps import (
    EDM_SCHEDULERS,
    CosineSteps,
    DDIMSteps,
    FlowMapSteps,
    FlowSteps,
    PackedFlowSteps,
    SigmaSteps,
    StochasticScheduler,
    UnsupportedScheduler,
    stochastic_class,
)

_FLOW_SCHEDULERS = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler)
_FLOW_CAPABLE = (
    UniPCMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    DEISMultistepScheduler,
)
_VARIANCE_PRESERVING = (
    DDIMScheduler,
    DDPMScheduler,
    PNDMScheduler,
    EulerDiscreteScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    UnCLIPScheduler,
    *_FLOW_CAPABLE,
)
_DDIM_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
_REFUSED = {  # part of a scheduler's name -> why it cannot be scored
    "Amused": "draws discrete tokens, which have no Gaussian density",
    "VQDiffusion": "draws discrete tokens, which have no Gaussian density",
    "BlockRefinement": "draws discrete tokens, which have no Gaussian density",
    "Discrete": "draws discrete tokens, which have no Gaussian density",
    "Helios": "belongs to a rollout over chunks that build on each other, whose steps cannot be replayed one by one",
    "RePaint": "jumps back and forth in time and draws its own noise on the way",
}


def _kind(scheduler: SchedulerMixin) -> tuple[type[StochasticScheduler], type] | None:
    """Return the mixin and the diffusers class for a scheduler; None if there are none."""
    for base, kind in CONSISTENCY_STEPS.items():
        if isinstance(scheduler, base):
            return kind, type(scheduler)
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and scheduler.config.get("sigma_max", 1.0) > 1:
        return SigmaSteps, type(scheduler)  # Cosmos 2 converts its network's output to that of EDM
    if isinstance(scheduler, MiniMaxH3Scheduler):
        return PackedFlowSteps, type(scheduler)
    if isinstance(scheduler, FlowMapEulerDiscreteScheduler):
        return FlowMapSteps, type(scheduler)
    is_flow = isinstance(scheduler, _FLOW_CAPABLE) and scheduler.config.prediction_type == "flow_prediction"
    if is_flow or isinstance(scheduler, _FLOW_SCHEDULERS):
        is_heun = isinstance(scheduler, FlowMatchHeunDiscreteScheduler)
        base = FlowMatchEulerDiscreteScheduler if is_heun else type(scheduler)
        return FlowSteps, base
    if isinstance(scheduler, (CogVideoXDDIMScheduler, CogVideoXDPMScheduler)):
        return DDIMSteps, CogVideoXDDIMScheduler
    if isinstance(scheduler, EDM_SCHEDULERS):
        return SigmaSteps, type(scheduler)
    if isinstance(scheduler, DDPMWuerstchenScheduler):
        return CosineSteps, type(scheduler)
    if isinstance(scheduler, EulerDiscreteScheduler) and scheduler.config.timestep_type == "continuous":
        return SigmaSteps, type(scheduler)
    if isinstance(scheduler, _VARIANCE_PRESERVING):
        return DDIMSteps, DDIMScheduler
    return None


def _refusal(scheduler: SchedulerMixin) -> UnsupportedScheduler:
    name = type(scheduler).__name__
    reasons = [reason for part, reason in _REFUSED.items() if name.startswith(part)]
    if reasons:
        return UnsupportedScheduler(f"{name} {reasons[0]}.")
    return UnsupportedScheduler(
        f"{name} takes no Gaussian steps that can be scored here; give the pipeline a flow-matching Euler, UniPC, "
        "DPM-Solver, DDIM, DDPM, PNDM or Euler scheduler."
    )


def _ddim_config(scheduler: SchedulerMixin) -> dict[str, Any]:
    """Return a config that gives DDIM the noise schedule of any variance-preserving scheduler."""
    config = {"clip_sample": False, **scheduler.config}  # DDIM clips by default; here only if the config says so
    if config.get("beta_schedule", "linear") not in _DDIM_BETA_SCHEDULES:
        config["trained_betas"] = scheduler.betas.tolist()
        config["_use_default_values"] = ()  # or from_config would drop values that were defaults before
    return config


_DRAWS_NOISE = (  # or hands over a sample without an axis of the batch
    MiniMaxH3Scheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    EulerAncestralDiscreteScheduler,
    CogVideoXDPMScheduler,
    CosineDPMSolverMultistepScheduler,
    UnCLIPScheduler,
    *CONSISTENCY_STEPS,
)


def change_scheduler(scheduler: SchedulerMixin, settings: dict[str, Any]) -> SchedulerMixin:
    """Build a scheduler anew with some settings changed, e.g. `{"shift": 3.0}`; diffusers ignores unknown ones."""
    cls = type(scheduler)
    known = sorted(set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"})
    for name in settings:
        if name not in known:
            hint = "".join(f" Did you mean {near!r}?" for near in difflib.get_close_matches(name, known, n=1))
            raise ValueError(
                f"scheduler_kwargs: {cls.__name__} has no setting {name!r}; it has {', '.join(known)}.{hint}"
            )
    return cls.from_config(scheduler.config, **settings) if settings else scheduler


def watch_solver(scheduler: SchedulerMixin, keep: Callable[[Any, Tensor], None]) -> SchedulerMixin | None:
    """Return a copy of the pipeline's own scheduler that reports the output of each of its steps."""
    draws = scheduler.config.get("stochastic_sampling") or "sde" in scheduler.config.get("algorithm_type", "")
    if draws or isinstance(scheduler, _DRAWS_NOISE):
        return None
    watched = copy.copy(scheduler)
    watched.__class__ = _watched_class(type(scheduler))
    watched.__dict__["keep"] = keep
    return watched


@functools.cache
def _watched_class(base: type) -> type:
    @functools.wraps(base.step)
    def step(self, *args, **kwargs):
        output = base.step(self, *args, **kwargs)
        self.keep(self, output[0])
        return output

    def copied(self, memo: dict):  # copies report to the same function
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__ = {k: v if k == "keep" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()}
        return clone

    return type(f"Watched{base.__name__}", (base,), {"step": step, "__deepcopy__": copied})


def stochastic_scheduler(
    scheduler: SchedulerMixin, sde_type: str = "auto", log_prob_type: str = "gaussian"
) -> StochasticScheduler:
    """Return the scheduler to train with: the schedule of `scheduler`, with the SDE `sde_type` on top.

    Flow matching (Euler, Heun, or UniPC, DPM-Solver and DEIS set to flow prediction), EDM and Euler with continuous
    timesteps keep their own class, sigmas and shift. Other variance-preserving schedulers become DDIM built from their
    config. A flow-matching Euler with sigmas above 1 counts as EDM: its latents are data + sigma * noise.

    Args:
        scheduler: the pipeline's own scheduler; it is not modified.
        sde_type: a key of `SDES`, or "auto" for the first that fits: `flow_sde` for flow matching, `ancestral` for
            EDM, `consistency` and `tcd` for consistency samplers, `ddim` otherwise.
        log_prob_type: "gaussian", or "squared_error" for Flow-GRPO's form of the log-probability under `cps`.

    Raises:
        ValueError: `sde_type` is unknown or does not fit the scheduler, or `log_prob_type` does not fit the SDE.
        UnsupportedScheduler: the scheduler takes no Gaussian steps that can be scored here.

    Examples:
        >>> scheduler = stochastic_scheduler(pipe.scheduler, "cps")
        >>> isinstance(scheduler, type(pipe.scheduler))  # its sigmas and its shift
        True
    """
    name = type(scheduler).__name__
    match = _kind(scheduler)
    if match is None:
        raise _refusal(scheduler)
    kind, base = match
    fitting = [each.name for each in sdes_of(kind.coordinates)]
    if sde_type != "auto" and sde_type not in fitting:
        raise ValueError(f"sde_type={sde_type!r} does not fit {name}; use auto or one of {', '.join(fitting)}.")
    sde_type = fitting[0] if sde_type == "auto" else sde_type
    check_log_prob(log_prob_type, sde_type)
    if base is type(scheduler):  # keeps what was set after construction, such as by set_shift
        stochastic = copy.copy(scheduler)
        stochastic.__class__ = stochastic_class(kind, base)
    else:
        config = _ddim_config(scheduler) if base is DDIMScheduler else dict(scheduler.config)
        stochastic = stochastic_class(kind, base).from_config(config)
        stochastic.original = copy.deepcopy(scheduler)
    stochastic.sde, stochastic.log_prob = SDES[sde_type], LOG_PROBS[log_prob_type]
    return stochastic
