"""Gates in front of the trained networks: a network runs only for the step that needs it.

While a driver is active, the forward of each trained network is replaced by a gate. If the driver already knows the
result of a step, the gate returns an empty output of the right shape, which takes no memory and no time.
"""

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .drivers import Driver

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
DONE, PLAIN, GRAPH = 0, 1, 2  # next action of a process: no more calls, a call without gradient, one with gradient


@dataclasses.dataclass(frozen=True)
class NetworkAccess:
    """How the networks of a policy are called. The defaults suit a single process in full precision."""

    forward_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    casts_outputs: bool = False
    ask_all: Callable[[int], list[int]] | None = None
    shapes_only: Callable[[], contextlib.AbstractContextManager] | None = None
    skips_hooks: bool = False


class NetworkGates:
    """The gates in front of a policy's trained networks."""

    def __init__(
        self,
        networks: Callable[[], list[nn.Module]],
        access: NetworkAccess,
        adjust_call: Callable[[dict[str, Any]], tuple[dict[str, Any], bool]],
    ):
        self._networks, self._access, self._adjust_call = networks, access, adjust_call
        self._blank_outputs: dict[Any, Any] = {}
        self._last_calls: dict[int, Callable] = {}  # latest call of each network, also of earlier pipeline calls
        self._own_calls: dict[int, Callable] = {}  # the same, with the networks' own forwards only
        self._calls_own = True
        self._spare: list[Tensor] = []

    @contextlib.contextmanager
    def put_up(self, driver: Driver, forwards: Sequence[Callable] | None = None) -> Iterator[None]:
        """Replace the networks' forwards by gates; restore them on leaving."""
        skips_hooks = self._access.skips_hooks
        with contextlib.ExitStack() as stack:
            for number, network in enumerate(self._networks()):
                real = forwards[number] if forwards else network.forward
                run = _with_hooks(network, real) if skips_hooks and not forwards else real
                stack.enter_context(
                    replace_attribute(network, "forward", self._gate(driver, number, network, real, run))
                )
                for hooks in HOOKS if skips_hooks else ():
                    stack.enter_context(replace_attribute(network, hooks, OrderedDict()))
            self._calls_own = forwards is None
            self._last_calls = dict(self._own_calls) if self._calls_own else {}
            yield

    def finish(self) -> None:
        """Make the calls that other processes still have to make in this call of the pipeline."""
        self._keep_in_step(DONE)

    def take_spare(self) -> Tensor | float:
        """Return zero, once, with the gradient of calls that were made only to stay in step."""
        spare, self._spare = self._spare, []
        return sum(spare, 0.0)

    def _keep_in_step(self, own: int) -> None:
        """Make the calls that must come before the next action of this process, `own`, then return.

        If calls gather weights, all processes must make the same calls in the same order: for each network, first the
        calls without gradient that any process has to make, then those with gradient. Their number depends on the
        samples: on whether a step is guided, and on which output shapes are known already. A process without a call of
        its own repeats its last one, with gradient for a term of zero, so that it takes part in every backward pass.
        """
        if self._access.ask_all is None:
            return
        while (turn := min(filter(None, self._access.ask_all(own)), default=DONE)) != own:
            number, kind = divmod(turn - 1, GRAPH)
            with torch.set_grad_enabled(kind + 1 == GRAPH):
                output = pytree.tree_leaves(self._last_calls[number]())
            if kind + 1 == GRAPH:
                self._spare.append(sum((leaf * 0.0).sum() for leaf in output if torch.is_tensor(leaf)))

    def _gate(self, driver: Driver, number: int, network: nn.Module, real: Callable, run: Callable) -> Callable:
        """Build a forward that is skipped if its result is known; `run` is the forward with its hooks."""

        def gate(*args, **kwargs):
            kwargs, must_run = self._adjust_call(kwargs)
            driver.note_call(number)
            if driver.needs_network:
                args, kwargs = driver.take_inputs(args, kwargs)
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
                    self._remember(key, self._run_for_shape(number, real, run, tensors, args, kwargs))
            if is_skipped and key in self._blank_outputs:
                return self._blank_outputs[key]
            output = self._run(number, run, tensors, args, kwargs)
            self._remember(key, output)
            return output

        return gate

    def _run_for_shape(
        self, number: int, real: Callable, run: Callable, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return an output of which only the shape is used."""
        if self._access.shapes_only is None:
            return self._run(number, run, tensors, args, kwargs)
        with self._access.shapes_only():
            return self._cast(self._call(real, args, kwargs), tensors)

    def _run(self, number: int, run: Callable, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        call = functools.partial(self._call, run, args, kwargs)
        if self._access.ask_all is not None:
            self._last_calls[number] = call
            if self._calls_own:
                self._own_calls[number] = call
            self._keep_in_step(number * GRAPH + (GRAPH if torch.is_grad_enabled() else PLAIN))
        return self._cast(call(), tensors)

    def _cast(self, output: Any, tensors: list[Tensor]) -> Any:
        """Cast the output to the dtype of the given latents, since autocast returns half precision."""
        if not self._access.casts_outputs:
            return output
        dtype = next(x.dtype for x in tensors if x.is_floating_point())
        return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)

    def _call(self, real: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self._access.forward_context():
            return real(*args, **kwargs)

    def _remember(self, key: Any, output: Any) -> None:
        if all(_can_be_blank(leaf) for leaf in pytree.tree_leaves(output)):
            self._blank_outputs[key] = _blank(output)


def _with_hooks(network: nn.Module, forward: Callable) -> Callable:
    """Return the network's call as it is now, with its hooks."""
    hooks = [(name, network.__dict__[name]) for name in HOOKS]

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in [*hooks, ("forward", forward)]:
                stack.enter_context(replace_attribute(network, name, value))
            return network(*args, **kwargs)

    return run


def _can_be_blank(leaf: Any) -> bool:
    """Return whether the shape of an output is enough; objects such as key-value caches carry state."""
    return leaf is None or isinstance(leaf, (Tensor, int, float, str))


def _blank(output: Any) -> Any:
    """Return zeros in the shape of an output that take no memory."""
    return pytree.tree_map_only(
        Tensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), output
    )


@contextlib.contextmanager
def replace_attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an instance attribute inside the context; restore it exactly as it was, present or absent."""
    before = instance.__dict__.get(name)
    instance.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del instance.__dict__[name]
        else:
            instance.__dict__[name] = before
