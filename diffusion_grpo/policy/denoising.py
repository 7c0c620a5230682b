"""A pipeline seen as a policy: its trained networks, its stochastic scheduler, its cached prompts.

In: a diffusers pipeline. Out: a `Policy`, inside whose `acting` the pipeline is called as any user would call it,
while a driver decides what each step does. The pipeline itself is left as it was.
"""

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..pipelines import family_of
from .drivers import Driver, UnsupportedPipeline
from .language_model import Drawn, draw
from .processes import DEFAULT_NOISE_LEVELS
from .prompt_cache import PromptCache
from .schedulers import StochasticScheduler, stochastic_scheduler
from .token_process import Sampling

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
DONE, PLAIN, GRAPH = 0, 1, 2  # what a process does next: no more calls of the network, one without or with gradient
POLICY_COMPONENTS = ("transformer", "unet", "prior", "decoder")


class Policy:
    """A pipeline seen as a policy. Holds what rollouts and replays share; the pipeline itself is left as it was.

    Args:
        pipe: any diffusers pipeline whose scheduler takes Gaussian steps.
        component: name of the trained network, or several joined by ", "; by default the first of transformer, unet,
            prior, decoder, with its second expert where the pipeline has one (`transformer_2`).
        sde_type: see [`~diffusion_grpo.policy.schedulers.stochastic_scheduler`].
        forward_context: entered around each real call of the network, e.g. `accelerator.autocast`.
        is_mixed_precision: whether that context computes in another dtype than it is given.
        sampling: how a language model in the pipeline's call draws tokens: `temperature`, `top_k` and `top_p` where
            they are not to be those of its own generation config.
        log_prob_type: see [`~diffusion_grpo.policy.schedulers.stochastic_scheduler`].

    Attributes:
        draws_globally: whether a call has drawn from torch's global generator so far.

    Raises:
        ValueError: no such component, or an `sde_type` or `log_prob_type` that does not fit.
        UnsupportedPipeline: it has no network or no scheduler to train.
        UnsupportedScheduler: the scheduler takes no Gaussian steps.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        component: str | None = None,
        sde_type: str = "auto",
        forward_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        is_mixed_precision: bool = False,
        sampling: dict[str, float | None] | None = None,
        log_prob_type: str = "gaussian",
    ):
        self.pipe = pipe
        self.undecorated = inspect.unwrap(type(pipe).__call__)  # the original under torch.no_grad
        self.scheduler = self._make_scheduler(sde_type, log_prob_type)
        self.component = policy_component(pipe, component)
        self.family = family_of(pipe)
        self.sampling = self._make_sampling(sampling or {})
        self.forward_context = forward_context
        self.is_mixed_precision = is_mixed_precision
        self.prompts = PromptCache()
        self.draws_globally = False
        # where a call gathers weights: what this process does next goes in, what each of all does comes out
        self.next_of_all: Callable[[int], list[int]] | None = None
        self._blank_outputs: dict[Any, Any] = {}
        # where hooks gather weights: entered where a network runs for the shape of its output alone, without them and
        # uncounted (None: that is a call as any other); and whether hooks stay out of the calls that are skipped
        self.shapes_only: Callable[[], contextlib.AbstractContextManager] | None = None
        self.skips_hooks = False
        self._last_calls: dict[int, Callable] = {}  # of each network, in this call of the pipeline
        self._spare: list[Tensor] = []

    def _make_scheduler(self, sde_type: str, log_prob_type: str) -> StochasticScheduler | None:
        original = getattr(self.pipe, "scheduler", None)
        if original is None:
            raise UnsupportedPipeline(
                f"{type(self.pipe).__name__} has no scheduler, so it takes no denoising steps that could be trained."
            )
        takes_latents = {"latents", "image_latents"} & set(inspect.signature(self.undecorated).parameters)
        if hasattr(type(self.pipe), "invert") and not takes_latents:
            raise UnsupportedPipeline(
                f"{type(self.pipe).__name__} starts from what its method invert has read off a given image before; "
                "only pipelines whose call alone makes a sample can be trained."
            )
        return stochastic_scheduler(original, sde_type, log_prob_type)

    def _make_sampling(self, wanted: dict[str, float | None]) -> Sampling | None:
        if self.writer is not None:
            return Sampling.of(self.writer.generation_config, **wanted)
        named = [name for name, value in wanted.items() if value is not None]
        if named:
            raise ValueError(f"{type(self.pipe).__name__} draws no tokens; leave out {', '.join(named)}.")
        return None

    @property
    def writer(self) -> nn.Module | None:
        """The language model that writes tokens in the pipeline's call; None where it has none, or was left out."""
        return getattr(self.pipe, self.family.language_model or "", None)

    @property
    def default_noise_level(self) -> float | None:
        """The usual noise of the process; None for a policy without one."""
        return DEFAULT_NOISE_LEVELS[self.scheduler.process]

    @property
    def networks(self) -> list[nn.Module]:
        """The trained networks, as the pipeline calls them; several where experts share the steps out."""
        return [getattr(self.pipe, name) for name in self.component.split(", ")]

    @property
    def network(self) -> nn.Module:
        """The trained network, the first where there are several."""
        return self.networks[0]

    @contextlib.contextmanager
    def acting(self, driver: Driver, forwards: Sequence[Callable] | None = None) -> Iterator[None]:
        """The pipeline with stochastic scheduler, gated networks and cached prompts; restored on leaving.

        Args:
            driver: what each scheduler step does, and whether the network must really run for it.
            forwards: in place of the networks' own forwards, e.g. a reference model's.
        """
        pipe, original = self.pipe, self.pipe.scheduler
        inner = {k: v for k, v in pipe.__dict__.items() if isinstance(v, DiffusionPipeline)}  # combined pipelines
        holders = [holder for holder in (pipe, *inner.values()) if getattr(holder, "scheduler", None) is original]
        self.scheduler.driver = driver
        with contextlib.ExitStack() as stack:
            for number, network in enumerate(self.networks):
                real = forwards[number] if forwards else network.forward
                run = _with_hooks(network, real) if self.skips_hooks and not forwards else real
                stack.enter_context(replaced(network, "forward", self._gate(driver, number, network, real, run)))
                for hooks in HOOKS if self.skips_hooks else ():
                    stack.enter_context(replaced(network, hooks, OrderedDict()))
            stack.enter_context(self.prompts.serving(pipe))
            stack.enter_context(self._writing(driver))
            stack.enter_context(seeded(driver.initial_seeds, self))
            # __dict__, not setattr: a pipeline's own __setattr__ would write our class into its config
            for holder in holders:
                stack.enter_context(replaced(holder, "scheduler", self.scheduler))
            for holder in (pipe, *inner.values()):
                stack.enter_context(replaced(holder, "_progress_bar_config", {"disable": True}))
            for name, part in inner.items():
                stack.enter_context(replaced(pipe, name, _Undecorated(part)))
            self._last_calls = {}
            try:
                yield
                self._keep_in_step(DONE)
            finally:
                self.scheduler.driver = None

    def _keep_in_step(self, own: int) -> None:
        """Returns when it is the turn of what this process does next.

        Where a call gathers weights, processes make the same calls one after the other: of each network those without
        gradient that any of them is to make, then those with. How many there are depends on the samples: on whether a
        step is guided, and on which output shapes are known already. Who has none to make calls for nothing, with
        gradient for a term of zero, so that backward passes come as often too.
        """
        if self.next_of_all is None:
            return
        while (turn := min(filter(None, self.next_of_all(own)), default=DONE)) != own:
            number, kind = divmod(turn - 1, GRAPH)
            with torch.set_grad_enabled(kind + 1 == GRAPH):
                output = pytree.tree_leaves(self._last_calls[number]())
            if kind + 1 == GRAPH:
                self._spare.append(sum((leaf * 0.0).sum() for leaf in output if torch.is_tensor(leaf)))

    def spare(self) -> Tensor | float:
        """Zero, with the gradient of calls that were only made to keep in step; once."""
        spare, self._spare = self._spare, []
        return sum(spare, 0.0)

    @contextlib.contextmanager
    def _writing(self, driver: Driver) -> Iterator[None]:
        """What a language model writes is drawn once, from the initial seeds, and is the same in every replay."""
        if self.writer is None:
            yield
            return

        def generate(**call: Any) -> Tensor:
            if driver.tokens is None:
                driver.tokens = self.drawn(call, driver.initial_seeds).ids
            return torch.cat([call["input_ids"], driver.tokens.to(call["input_ids"].device)], dim=1)

        with self.family.bridged(self.pipe), replaced(self.writer, "generate", generate):
            yield

    def drawn(self, call: dict[str, Any], seeds: Tensor) -> Drawn:
        """Tokens by the language model of the pipeline's family; `call` are the arguments of its `generate`."""
        family = self.family
        return draw(
            self.writer,
            call,
            count=family.token_count(call),
            vocabulary=family.vocabulary(self.pipe),
            sampling=self.sampling,
            seeds=seeds,
        )

    def _gate(self, driver: Driver, number: int, network: nn.Module, real: Callable, run: Callable) -> Callable:
        """The network's forward, which does not run where its result is known already; `run` has its hooks too."""

        def gate(*args, **kwargs):
            kwargs, must_run = self.family.network_call(kwargs)
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [x for x in leaves if torch.is_tensor(x)]
            key = (
                id(network),
                tuple((x.shape, x.dtype) for x in tensors),
                tuple(x for x in leaves if isinstance(x, (str, bool))),
            )
            is_skipped = not (driver.needs_network or must_run)
            if is_skipped and key not in self._blank_outputs:
                with torch.no_grad():
                    self._remember(key, self._shaped(number, real, run, tensors, args, kwargs))
            if is_skipped and key in self._blank_outputs:
                return self._blank_outputs[key]
            output = self._passed(number, run, tensors, args, kwargs)
            self._remember(key, output)
            return output

        return gate

    def _shaped(
        self, number: int, real: Callable, run: Callable, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """An output of which only the shape is looked at."""
        if self.shapes_only is None:
            return self._passed(number, run, tensors, args, kwargs)
        with self.shapes_only():
            return self._cast(self._called(real, args, kwargs), tensors)

    def _passed(self, number: int, run: Callable, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        call = functools.partial(self._called, run, args, kwargs)
        if self.next_of_all is not None:
            self._last_calls[number] = call
            self._keep_in_step(number * GRAPH + (GRAPH if torch.is_grad_enabled() else PLAIN))
        return self._cast(call(), tensors)

    def _cast(self, output: Any, tensors: list[Tensor]) -> Any:
        """The network's output, in the dtype of the latents that the pipeline gave: autocast leaves half precision."""
        if not self.is_mixed_precision:
            return output
        dtype = next(x.dtype for x in tensors if x.is_floating_point())
        return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)

    def _called(self, real: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self.forward_context():
            return real(*args, **kwargs)

    def _remember(self, key: Any, output: Any) -> None:
        if all(_is_blankable(leaf) for leaf in pytree.tree_leaves(output)):
            self._blank_outputs[key] = _blank(output)


def _with_hooks(network: nn.Module, forward: Callable) -> Callable:
    """The network's call as it is now, hooks and all."""
    hooks = [(name, network.__dict__[name]) for name in HOOKS]

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in [*hooks, ("forward", forward)]:
                stack.enter_context(replaced(network, name, value))
            return network(*args, **kwargs)

    return run


class _Undecorated:
    """A pipeline inside a pipeline, called without its `torch.no_grad` where gradients are wanted."""

    def __init__(self, pipe: DiffusionPipeline):
        self.__dict__["_pipe"] = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pipe, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return inspect.unwrap(type(self._pipe).__call__)(self._pipe, *args, **kwargs)


def _is_blankable(leaf: Any) -> bool:
    """Whether an output can be remembered as its shape: objects such as key-value caches carry state onwards."""
    return leaf is None or isinstance(leaf, (Tensor, int, float, str))


def _blank(output: Any) -> Any:
    """The shape of a network's output without its memory, for steps whose result is known already."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), output
    )


def policy_component(pipe: DiffusionPipeline, component: str | None = None) -> str:
    """Name of the network that is trained: `component`, or the first usual one the pipeline has.

    Several are joined by ", ": the experts of a pipeline that switches between them, such as Wan 2.2's.
    """
    is_network = {name: isinstance(getattr(pipe, name, None), nn.Module) for name in pipe.components}
    if component is None:
        names = [name for name in POLICY_COMPONENTS if is_network.get(name) or is_network.get(f"{name}_2")]
        names = [name for name in (*names[:1], *(f"{name}_2" for name in names[:1])) if is_network.get(name)]
    else:
        names = [name for name in component.split(", ") if is_network.get(name)]
    if names and (component is None or component == ", ".join(names)):
        return ", ".join(names)
    missing = f"no network {component!r}" if component else f"none of the networks {', '.join(POLICY_COMPONENTS)}"
    raise UnsupportedPipeline(
        f"{type(pipe).__name__} has {missing}; set train_component to one of its modules: "
        f"{', '.join(name for name, found in is_network.items() if found)}."
    )


@contextlib.contextmanager
def seeded(seeds: Tensor, policy: Policy) -> Iterator[None]:
    """What a pipeline draws from torch's global generator is the same in rollout and replay, and leaves no trace.

    Whether it does is noted in `policy.draws_globally`.
    """
    device = policy.pipe._execution_device  # which is not where the first of its parts waits
    devices = [device] if device.type == "cuda" else []
    states = [torch.get_rng_state, *(partial(torch.cuda.get_rng_state, device) for device in devices)]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(seeds[0]))
        before = [state() for state in states]
        try:
            yield
        finally:
            after = [state() for state in states]
            policy.draws_globally |= not all(map(torch.equal, before, after))


@contextlib.contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute, put back afterwards exactly as it was: present or absent."""
    before = instance.__dict__.get(name)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before
