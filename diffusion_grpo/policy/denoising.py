"""The policy whose actions are denoising steps, taken by a stochastic scheduler in the pipeline.

A `DenoisingPolicy` rolls the pipeline out, replays a recorded step, or predicts clean samples. In each case it calls
the pipeline as a user would, while a driver decides what each step does. Gates (`networks.py`) skip networks whose
output is known.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin, ModularPipeline, SchedulerMixin
from torch import Tensor, nn

from ..media.samples import extract_samples
from .base import POLICY_COMPONENTS, Policy, without_filters
from .drivers import (
    Driver,
    EntryRecorder,
    FinishDriver,
    PrefixDriver,
    ProbeDriver,
    Recorder,
    SolverRecorder,
    StepScored,
    UnsupportedPipeline,
    join_latents,
)
from .modular import as_pipeline, ask_for_latents
from .networks import NetworkAccess, NetworkGates, replace_attribute
from .replaying import LastStepsDriver, RenoiseDriver, ReplayDriver
from .schedulers import StochasticScheduler, stochastic_scheduler, watch_solver
from .trajectory import CleanSamples, Denoised, Finished, Prefix, RolloutRequest, StepDistribution, Trajectory
from .unguided import switch_guidance_off


class DenoisingPolicy(Policy):
    """A pipeline whose scheduler takes Gaussian steps.

    Args:
        pipe: any diffusers pipeline with such a scheduler.
        component: names of the trained networks; see [`~diffusion_grpo.policy.base.policy_component`].
        sde_type, log_prob_type: the SDE, and the form of its log-probability; see
            [`~diffusion_grpo.policy.schedulers.stochastic_scheduler`].
        access, sampling: see [`~diffusion_grpo.policy.base.Policy`].

    Raises:
        ValueError: `sde_type` or `log_prob_type` does not fit, or `sampling` is given but no tokens are drawn.
        UnsupportedPipeline: the pipeline has no network or no scheduler to train.
        UnsupportedScheduler: the scheduler takes no Gaussian steps.

    Examples:
        >>> policy = DenoisingPolicy(pipe, sde_type="cps")
        >>> policy.component
        ('transformer',)
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        component: str | Sequence[str] | None = None,
        sde_type: str = "auto",
        access: NetworkAccess | None = None,
        sampling: dict[str, float | None] | None = None,
        log_prob_type: str = "gaussian",
    ):
        pipe = as_pipeline(pipe)
        self.scheduler = _make_scheduler(pipe, sde_type, log_prob_type)
        # of modular pipelines, where each has a schedule of its own and takes its steps in the same loop
        parts = pipe.components.items() if isinstance(pipe, ModularPipeline) else ()
        others = {k: v for k, v in parts if isinstance(v, SchedulerMixin) and k != "scheduler"}
        self.others = {k: stochastic_scheduler(v, sde_type, log_prob_type) for k, v in others.items()}
        super().__init__(pipe, component, access, sampling)
        # one latent is written over before the step of the other is scored
        self.gates.copies_inputs = bool(self.others)
        for part in pipe.components.values():  # Z-Image's ControlNet reads this where gradients flow, but lacks it
            if isinstance(part, ModelMixin) and not hasattr(part, "gradient_checkpointing"):
                part.gradient_checkpointing = False

    @property
    def default_noise_level(self) -> float:
        return self.scheduler.sde.noise_level

    def check_noise_level(self, noise_level: float | None) -> None:
        sde = self.scheduler.sde
        if noise_level is not None and noise_level > sde.max_noise_level:
            raise ValueError(
                f"noise_level must lie in (0, {sde.max_noise_level:g}] for the SDE {sde.name!r} of "
                f"{type(self.pipe).__name__}, got {noise_level}."
            )

    @property
    def loop_length(self) -> int | None:
        """Number of steps of the last call; None before the first, or if the pipeline steps scheduler copies."""
        return None if self.scheduler.first is None else self.scheduler.loop_length

    def rollout(self, inputs: dict[str, Any], request: RolloutRequest) -> tuple[Any, Trajectory | CleanSamples | None]:
        """Call the pipeline with noise in its steps and record the trained ones, or keep the finished latents."""
        if request.keeps != "steps":
            return self._roll_out_clean(inputs, request)
        noise_level = self.scheduler.sde.noise_level if request.noise_level is None else request.noise_level
        recorder = Recorder(request, noise_level)
        samples = self._sample(inputs, request, recorder)
        return samples, recorder.trajectory() if recorder.records_steps else None

    def _roll_out_clean(self, inputs: dict[str, Any], request: RolloutRequest) -> tuple[Any, CleanSamples]:
        """Sample without noise, by the pipeline's own solver or, if that draws noise, by a deterministic one.

        The deterministic one also makes samples whose last steps are taken again: its steps need no memory of others.
        """
        recorder: Recorder | SolverRecorder = SolverRecorder(request.initial_seeds)
        takes_steps_again = request.keeps == "entered"
        scheduler = None if takes_steps_again else watch_solver(self.pipe.scheduler, recorder.leave)
        if scheduler is None:
            recorder = (EntryRecorder if takes_steps_again else Recorder)(request, noise_level=0.0)
        samples = self._sample(inputs, request, recorder, scheduler)
        return samples, CleanSamples(
            latents=recorder.join_left().to(request.device),
            steps=torch.tensor([list(row) for row in request.steps], dtype=torch.int64),
            seeds=request.seeds,
            initial_seeds=request.initial_seeds,
            num_inference_steps=request.num_inference_steps,
            tokens=None if recorder.tokens is None else recorder.tokens.to(request.device),
            entered=getattr(recorder, "entered", None),
        )

    def _sample(
        self,
        inputs: dict[str, Any],
        request: RolloutRequest,
        recorder: Recorder | SolverRecorder,
        scheduler: Any = None,
    ) -> Any:
        """Run the pipeline under the recorder and return its samples; add their latents to the request if wanted."""
        shown = inputs if request.is_decoded else inputs | ask_for_latents(self.pipe)
        arguments = self.call_arguments(shown, request.num_inference_steps, request.initial_seeds)
        samples = None
        with self.acting(recorder, scheduler=scheduler), contextlib.suppress(StepScored):
            samples = extract_samples(self.pipe, self.pipe(**arguments))
            if not isinstance(samples, (list, tuple, Tensor, np.ndarray)):
                raise UnsupportedPipeline(
                    f"{type(self.pipe).__name__} returned a {type(samples).__name__} in place of samples, which are a "
                    "list, a tensor or an array."
                )
        if request.latents is None:
            return samples
        found = samples if not request.is_decoded else self._call_for_latents(inputs, request, recorder)
        request.latents.extend(self._split_latents(found, recorder))
        return samples if request.is_decoded else None

    def run_prefix(
        self,
        inputs: dict[str, Any],
        length: int,
        *,
        num_inference_steps: int,
        initial_seeds: Tensor | Sequence[int],
        device: str | torch.device = "cpu",
    ) -> Prefix:
        """Take the first steps of the loop without noise; see [`~diffusion_grpo.policy.rollout.run_prefix`]."""
        driver = PrefixDriver(length, torch.as_tensor(initial_seeds, dtype=torch.int64), device)
        arguments = self.call_arguments(inputs, num_inference_steps, driver.initial_seeds)
        with self.acting(driver), contextlib.suppress(StepScored):
            self.pipe(**arguments)
        if driver.prefix is None:
            raise UnsupportedPipeline(
                f"{type(self.pipe).__name__} ended before step {length}, where its samples were to branch."
            )
        return driver.prefix

    def replay(
        self,
        inputs: dict[str, Any],
        trajectory: Trajectory,
        step: int,
        forwards: Sequence[Callable] | None = None,
        sources: Tensor | None = None,
    ) -> StepDistribution:
        """Score one recorded step under the current networks; see [`~diffusion_grpo.policy.rollout.replay`]."""
        driver = ReplayDriver(step, trajectory, sources)
        self._call_until_scored(driver, inputs, trajectory.num_inference_steps, forwards)
        if driver.scored is None:
            raise RuntimeError(f"{type(self.pipe).__name__} ended before step {step}; it was not replayed.")
        return driver.scored

    def denoise(
        self, inputs: dict[str, Any], samples: CleanSamples, step: int, forwards: Sequence[Callable] | None = None
    ) -> Denoised:
        """Predict clean samples from re-noised ones; see [`~diffusion_grpo.policy.rollout.denoise`]."""
        if step < 1:
            raise ValueError("Step 0 has no step before it that could hand over a noised sample; train at 1 or later.")
        driver = RenoiseDriver(step, samples, self.networks)
        unguided = switch_guidance_off(self.pipe, self.networks, inputs)
        with driver.watch.closing():
            self._call_until_scored(driver, unguided, samples.num_inference_steps, forwards)
        if driver.denoised is None:
            raise RuntimeError(f"{type(self.pipe).__name__} ended before step {step}; nothing was predicted there.")
        return driver.denoised

    def finish(
        self,
        inputs: dict[str, Any],
        samples: CleanSamples,
        forwards: Sequence[Callable] | None = None,
        is_decoded: bool = True,
    ) -> Finished:
        """Take the last steps of recorded samples again and decode, with gradient where grad mode is on."""
        driver, pixels = LastStepsDriver(samples), None
        refusal = UnsupportedPipeline(
            f"{type(self.pipe).__name__} gives no tensor of pixels through which a gradient could flow (a safety "
            "checker may stand between), so rewards cannot be differentiated; use another loss_type."
        )
        wanted = {"output_type": "pt"} if is_decoded else ask_for_latents(self.pipe)
        arguments = self.call_arguments(inputs | wanted, samples.num_inference_steps, driver.initial_seeds)
        try:
            with self.acting(driver, forwards):
                found = extract_samples(self.pipe, self.undecorated(self.pipe, **arguments))
        except RuntimeError as error:
            raise (refusal if "requires grad" in str(error) else error) from None  # of `numpy()`
        latents = driver.join_left()
        if is_decoded:
            pixels = found
            if not torch.is_tensor(pixels) or pixels.requires_grad < latents.requires_grad:
                raise refusal
        return Finished(pixels, latents)

    @torch.no_grad()
    def predict_entry(self, inputs: dict[str, Any], samples: CleanSamples) -> Tensor:
        """Return the (batch, ...) prediction in the first of the last steps, without gradient."""
        driver = LastStepsDriver(samples, is_one_step=True)
        self._call_until_scored(driver, inputs | ask_for_latents(self.pipe), samples.num_inference_steps, None)
        return join_latents(driver.predictions)

    def _call_until_scored(
        self, driver: Driver, inputs: dict[str, Any], num_inference_steps: int, forwards: Sequence[Callable] | None
    ) -> None:
        """Call the pipeline with gradients allowed, until the driver leaves it."""
        arguments = self.call_arguments(inputs, num_inference_steps, driver.initial_seeds)
        with self.acting(driver, forwards), contextlib.suppress(StepScored):
            self.undecorated(self.pipe, **arguments)

    def find_passing_steps(self, inputs: dict[str, Any], num_inference_steps: int) -> dict[str, set[int]]:
        """Return, for each trained network, the indices of the steps that call it.

        Calls before the loop count as step 0. Each network runs only once, for the shape of its output.
        """
        driver = ProbeDriver(torch.zeros(1, dtype=torch.int64))
        frozen = NetworkGates(
            lambda: [getattr(self.pipe, name) for name in self.frozen_experts],
            NetworkAccess(self.access.forward_context, self.access.casts_outputs),
            self.family.network_call,
        )
        arguments = self.call_arguments(inputs, num_inference_steps, driver.initial_seeds)
        with self.acting(driver), frozen.put_up(ProbeDriver(driver.initial_seeds)), contextlib.suppress(StepScored):
            self.pipe(**arguments)
        return {name: driver.passing.get(number, set()) for number, name in enumerate(self.component)}

    def encode_prompts(
        self, inputs: dict[str, Any], num_inference_steps: int, calls: int | None = None
    ) -> list[list[str]]:
        """Encode and keep the prompts of a call of the pipeline, which ends before its first network.

        Returns the keys of what is kept for each call of `encode_prompt`; after `calls` of them it ends too.
        Errors after prompts have been encoded are ignored: the rollout, which has other batches, will report them.
        """
        encode, keys = self.pipe.encode_prompt, []

        def keep(*args: Any, **kwargs: Any) -> Any:
            keys.append(self.prompts.keep(encode, *args, **kwargs))
            return _stop() if len(keys) == calls else self.prompts.call(encode, *args, **kwargs)

        seeds = torch.zeros(1, dtype=torch.int64)
        with self._until_network(seeds), replace_attribute(self.pipe, "encode_prompt", keep):
            try:
                self.pipe(**self.call_arguments(inputs, num_inference_steps, seeds))
            except (StepScored, UnsupportedPipeline, torch.OutOfMemoryError):
                raise
            except Exception:
                if not keys:
                    raise
        return keys

    @contextlib.contextmanager
    def _until_network(self, seeds: Tensor) -> Iterator[None]:
        """End calls of the pipeline inside the context when its first network would run."""
        names = {*self.component, *POLICY_COMPONENTS, *(f"{name}_2" for name in POLICY_COMPONENTS)}
        networks = [
            part for name, part in self.pipe.components.items() if name in names and isinstance(part, nn.Module)
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._calling(seeds))
            for network in networks:
                stack.enter_context(replace_attribute(network, "forward", _stop))
            stack.enter_context(contextlib.suppress(StepScored))
            yield

    @contextlib.contextmanager
    def acting(
        self, driver: Driver, forwards: Sequence[Callable] | None = None, scheduler: Any = None
    ) -> Iterator[None]:
        """Give the pipeline a stochastic scheduler, gates and cached prompts; restore it on leaving."""
        pipe, original = self.pipe, self.pipe.scheduler
        inner = {k: v for k, v in pipe.__dict__.items() if isinstance(v, DiffusionPipeline)}  # inner pipelines
        holders = [holder for holder in (pipe, *inner.values()) if getattr(holder, "scheduler", None) is original]
        for each in (self.scheduler, *self.others.values()):
            each.driver = driver
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.gates.put_up(driver, forwards))
            stack.enter_context(self._calling(driver.initial_seeds))
            if self.writer is not None:
                stack.enter_context(self._writing(driver))
            # in __dict__: a pipeline's own __setattr__ would write our class into its config
            for holder in holders:
                stack.enter_context(replace_attribute(holder, "scheduler", scheduler or self.scheduler))
            for name, other in self.others.items():
                stack.enter_context(replace_attribute(pipe, name, other))
            stack.enter_context(without_filters(pipe))
            for name, part in inner.items():
                stack.enter_context(replace_attribute(part, "_progress_bar_config", {"disable": True}))
                stack.enter_context(without_filters(part))
                stack.enter_context(replace_attribute(pipe, name, _Undecorated(part)))
            try:
                yield
                if self.access.hook is not None:
                    self.access.hook.finish()
            finally:
                for each in (self.scheduler, *self.others.values()):
                    each.driver = None

    @contextlib.contextmanager
    def _writing(self, driver: Driver) -> Iterator[None]:
        """Draw the tokens of a language model once, from the initial seeds; every replay gets the same tokens."""

        def generate(**call: Any) -> Tensor:
            if driver.tokens is None:
                driver.tokens = self.draw_tokens(call, driver.initial_seeds).ids
            return torch.cat([call["input_ids"], driver.tokens.to(call["input_ids"].device)], dim=1)

        with self.family.bridged(self.pipe), replace_attribute(self.writer, "generate", generate):
            yield

    # Latents, for rewards that take them

    def check_latents(self) -> None:
        if not ask_for_latents(self.pipe):
            raise UnsupportedPipeline(
                f"A reward takes latents, but {type(self.pipe).__name__} gives none; use rewards that take the "
                "finished samples."
            )

    def _call_for_latents(self, inputs: dict[str, Any], request: RolloutRequest, recorder: Recorder) -> Any:
        """Return the latents of the same call, without running a network or a decoder for them."""
        inputs = inputs | ask_for_latents(self.pipe)
        arguments = self.call_arguments(inputs, request.num_inference_steps, recorder.initial_seeds)
        with self.acting(FinishDriver(recorder)):
            return extract_samples(self.pipe, self.pipe(**arguments))

    def _split_latents(self, found: Any, recorder: Recorder) -> list[Tensor]:
        """Return one float32 latent per sample; refuse other results, or larger ones than the steps left."""
        left = FinishDriver(recorder).latents
        is_tensor = torch.is_tensor(found) and found.ndim > 1 and len(found) == recorder.count
        if not is_tensor or found[0].numel() > left[0].numel():
            shape = tuple(found.shape) if torch.is_tensor(found) else type(found).__name__
            raise UnsupportedPipeline(
                f'{type(self.pipe).__name__} returned {shape} for output_type="latent" where its last step left '
                f"{tuple(left.shape)}; use rewards that take the finished samples."
            )
        return list(found.float().unbind())


def _make_scheduler(pipe: DiffusionPipeline, sde_type: str, log_prob_type: str) -> StochasticScheduler:
    original = getattr(pipe, "scheduler", None)
    if original is None:
        raise UnsupportedPipeline(
            f"{type(pipe).__name__} has no scheduler (a component of that name), whose steps are what is trained."
        )
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    takes_latents = {"latents", "image_latents"} & set(parameters)
    if hasattr(type(pipe), "invert") and not takes_latents:
        raise UnsupportedPipeline(
            f"{type(pipe).__name__} starts from what its method invert has computed from a given image; only "
            "pipelines that make a sample with their call alone can be trained."
        )
    return stochastic_scheduler(original, sde_type, log_prob_type)


def _stop(*args: Any, **kwargs: Any) -> NoReturn:
    raise StepScored


class _Undecorated:
    """A pipeline inside a pipeline that is called without its `torch.no_grad`, so that gradients can flow."""

    def __init__(self, pipe: DiffusionPipeline):
        self.__dict__["_pipe"] = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pipe, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inspect.unwrap(type(self._pipe).__call__)(self._pipe, *args, **kwargs)
