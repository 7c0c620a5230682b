"""The base of all policies: the pipeline, its trained networks, and how they are called.

Calls are made with seeds, and without the safety checkers and watermarkers of the pipeline.
"""

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from ..pipelines import Family, family_of
from .drivers import UnsupportedPipeline
from .language_model import Drawn, draw
from .modular import as_pipeline
from .networks import NetworkAccess, NetworkGates, replace_attribute
from .prompt_cache import PromptCache
from .token_process import Sampling, TokenDistribution, TokenTrajectory
from .trajectory import CleanSamples, Prefix, RolloutRequest, StepDistribution, Trajectory, make_generators

POLICY_COMPONENTS = ("transformer", "unet", "prior", "decoder")


class UntrainedStepError(ValueError):
    """A step that is to be trained calls none of the trained networks.

    Examples:
        It is raised if only one of two experts is trained, and a step belongs to the other one:

        >>> from diffusion_grpo.policy.token import make_policy
        >>> make_policy(pipe).refuse_step(3)
        Traceback (most recent call last):
        UntrainedStepError: Step 3 of StableDiffusion3Pipeline's loop does not pass transformer ...
    """


class Policy(ABC):
    """A pipeline seen as a policy: it acts in a rollout and is scored in a replay."""

    draws_tokens: bool = False

    def __init__(
        self,
        pipe: DiffusionPipeline,
        component: str | Sequence[str] | None = None,
        access: NetworkAccess | None = None,
        sampling: dict[str, float | None] | None = None,
    ):
        self.pipe = pipe = as_pipeline(pipe)
        self.undecorated = inspect.unwrap(type(pipe).__call__)  # the original, without torch.no_grad
        self.component = policy_component(pipe, component)
        self.family = family_of(pipe)
        self.access = access or NetworkAccess()
        self.sampling = self._make_sampling(sampling or {})
        self.gates = NetworkGates(lambda: self.networks, self.access, self.family.network_call)
        self.prompts = PromptCache()
        self.draws_globally = False

    @property
    @abstractmethod
    def default_noise_level(self) -> float | None:
        """The usual noise level of the SDE; None for a policy without one."""

    @abstractmethod
    def check_noise_level(self, noise_level: float | None) -> None:
        """Refuse a noise level that the SDE does not have."""

    @abstractmethod
    def rollout(
        self, inputs: dict[str, Any], request: RolloutRequest
    ) -> tuple[Any, Trajectory | TokenTrajectory | CleanSamples | None]:
        """Call the pipeline and record the trained steps or tokens; see [`~diffusion_grpo.policy.rollout.rollout`]."""

    @abstractmethod
    def run_prefix(self, inputs: dict[str, Any], length: int, **settings: Any) -> Prefix:
        """Take the first steps of the loop; see [`~diffusion_grpo.policy.rollout.run_prefix`]."""

    @abstractmethod
    def replay(
        self,
        inputs: dict[str, Any],
        trajectory: Trajectory | TokenTrajectory,
        step: int,
        forwards: Sequence[Callable] | None = None,
        sources: Tensor | None = None,
    ) -> StepDistribution | TokenDistribution:
        """Score one recorded step; see [`~diffusion_grpo.policy.rollout.replay`]."""

    @abstractmethod
    def check_latents(self) -> None:
        """Refuse a pipeline that has no denoised latents to give to a reward."""

    @property
    def networks(self) -> list[nn.Module]:
        """The trained networks, as the pipeline calls them; several if experts take turns over the steps."""
        return [getattr(self.pipe, name) for name in self.component]

    @property
    def network(self) -> nn.Module:
        """The trained network, or the first of several."""
        return self.networks[0]

    @property
    def writer(self) -> nn.Module | None:
        """The language model that writes tokens in the pipeline's call; None if there is none."""
        return getattr(self.pipe, self.family.language_model or "", None)

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the networks that take turns over the steps and are trained by default."""
        try:
            return policy_component(self.pipe)
        except UnsupportedPipeline:  # its networks have other names
            return ()

    @property
    def frozen_experts(self) -> list[str]:
        """Names of the experts that are not trained."""
        return [name for name in self.experts if name not in self.component]

    def refuse_step(self, step: int, passing: Collection[int] = ()) -> NoReturn:
        """Refuse to train on a step that calls none of the trained networks, such as a step of another expert."""
        trained, others = ", ".join(self.component), self.frozen_experts
        window = f" ({min(passing)} to {max(passing)})" if passing else ""
        both = f", or train them all with train_component={', '.join(sorted([*self.component, *others]))!r}"
        raise UntrainedStepError(
            f"Step {step} of {type(self.pipe).__name__}'s loop does not pass {trained} (train_component), so there is "
            f"nothing to train in it; set trained_steps to the steps that {trained} takes{window}"
            f"{both if others else ''}."
        )

    def draw_tokens(self, call: dict[str, Any], seeds: Tensor) -> Drawn:
        """Draw tokens with the pipeline's language model; `call` holds the arguments of its `generate`."""
        return draw(
            self.writer,
            call,
            count=self.family.token_count(call),
            vocabulary=self.family.vocabulary(self.pipe),
            sampling=self.sampling,
            seeds=seeds,
        )

    def _make_sampling(self, wanted: dict[str, float | None]) -> Sampling | None:
        if self.writer is not None:
            return Sampling.of(self.writer.generation_config, **wanted)
        named = [name for name, value in wanted.items() if value is not None]
        if named:
            raise ValueError(f"{type(self.pipe).__name__} does not sample tokens; leave out {', '.join(named)}.")
        return None

    def call_arguments(
        self, inputs: dict[str, Any], num_inference_steps: int | None, initial_seeds: Tensor
    ) -> dict[str, Any]:
        """Build the arguments of a call of the pipeline; see the function of this name."""
        return call_arguments(self.pipe, inputs, num_inference_steps, initial_seeds, self.family)

    @contextlib.contextmanager
    def _calling(self, seeds: Tensor) -> Iterator[None]:
        """Answer prompts from the cache, show no bars, and seed torch's generator in calls of the pipeline inside."""
        no_bar = replace_attribute(self.pipe, "_progress_bar_config", {"disable": True})
        devices, seed_all = [], torch.default_generator.manual_seed
        if torch.accelerator.is_available():  # otherwise, this would take as long as a pass of a small network
            device = self.pipe._execution_device  # its first part may be on another device
            devices, seed_all = [device] if device.type == "cuda" else [], torch.manual_seed
        states = [torch.get_rng_state, *(partial(torch.cuda.get_rng_state, device) for device in devices)]
        with self.prompts.serve(self.pipe), no_bar, torch.random.fork_rng(devices=devices):
            seed_all(int(seeds[0]))
            before = [state() for state in states]
            try:
                yield
            finally:
                after = [state() for state in states]
                self.draws_globally |= not all(map(torch.equal, before, after))


def call_arguments(
    pipe: DiffusionPipeline,
    inputs: dict[str, Any],
    num_inference_steps: int | None,
    initial_seeds: Tensor,
    family: Family | None = None,
) -> dict[str, Any]:
    """Build the arguments of a pipeline call with (batch,) seeds; they are the same in rollout and replay."""
    drawn = make_generators(initial_seeds)
    parameters = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    arguments = dict((family or family_of(pipe)).arguments(pipe, inputs))
    if num_inference_steps is not None and "num_inference_steps" in parameters:  # pure token writers have no loop
        arguments["num_inference_steps"] = num_inference_steps
    if "generator" in parameters:  # not every pipeline takes a list
        arguments["generator"] = drawn if len(drawn) > 1 else drawn[0]
    is_image = {"height", "num_frames"} & set(parameters)  # not sound or depth maps
    if "output_type" in parameters and (is_image or parameters["output_type"].default == "pil"):
        arguments.setdefault("output_type", "pil")
    if hasattr(pipe, "sample_outputs"):  # a modular pipeline
        arguments.setdefault("output", pipe.sample_outputs)
    return arguments


def list_filters(pipe: DiffusionPipeline) -> list[str]:
    """List the parts that blacken or mark finished samples: safety checkers and watermarkers.

    Cosmos, whose licence demands its checker, refuses to run without it, and keeps it.
    """
    names = ["watermark", "watermarker", *(["safety_checker"] if hasattr(pipe, "run_safety_checker") else [])]
    return [name for name in names if getattr(pipe, name, None) is not None]


@contextlib.contextmanager
def without_filters(pipe: DiffusionPipeline) -> Iterator[None]:
    """Leave these parts out of calls inside the context: a reward would score what they did to a sample."""
    with contextlib.ExitStack() as stack:
        for name in list_filters(pipe):
            stack.enter_context(replace_attribute(pipe, name, None))
        yield


def policy_component(pipe: DiffusionPipeline, component: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the networks that are trained."""
    is_network = {name: isinstance(getattr(pipe, name, None), nn.Module) for name in pipe.components}
    if component is None:
        names = [name for name in POLICY_COMPONENTS if is_network.get(name) or is_network.get(f"{name}_2")]
        names = [name for name in (*names[:1], *(f"{name}_2" for name in names[:1])) if is_network.get(name)]
        missing = f"none of the networks {', '.join(POLICY_COMPONENTS)}"
    else:
        wanted = split_component(component)
        names = list(wanted) if all(is_network.get(name) for name in wanted) else []
        missing = f"no network {', '.join(wanted)!r}"
    if names:
        return tuple(names)
    raise UnsupportedPipeline(
        f"{type(pipe).__name__} has {missing}; set train_component to one of its modules: "
        f"{', '.join(name for name, is_there in is_network.items() if is_there)}."
    )


def split_component(component: str | Sequence[str]) -> tuple[str, ...]:
    """Split the setting `train_component` into names: "transformer, transformer_2" names two."""
    return tuple(name.strip() for name in component.split(",")) if isinstance(component, str) else tuple(component)
