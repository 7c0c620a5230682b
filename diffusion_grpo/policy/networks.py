"""The networks of a pipeline: gates in front of the trained ones, attention kernels that train, quantised weights.

While a driver is active, the forward of each trained network is replaced by a gate. If the driver already knows the
result of a step, the gate returns an empty output of the right shape, which takes no memory and no time.
`replace_attribute` serves other modules too.
"""

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .drivers import Driver

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class CallHook(Protocol):
    """What happens around calls of the trained networks, to keep several processes in step."""

    def begin(self, is_own: bool) -> None:
        """Enter a call of the pipeline; `is_own` unless its networks are replaced by a reference's."""

    def before(self, number: int, call: Callable[[], Any]) -> None:
        """Act before `call`, which runs trained network `number`."""

    def finish(self) -> None:
        """Act when the pipeline makes no more calls."""


@dataclasses.dataclass(frozen=True)
class NetworkAccess:
    """How the networks of a policy are called. The defaults suit a single process in full precision."""

    forward_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    casts_outputs: bool = False
    hook: CallHook | None = None
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
        self.copies_inputs = False  # whether networks get copies of their inputs
        self._blank_outputs: dict[Any, Any] = {}

    @contextlib.contextmanager
    def put_up(self, driver: Driver, forwards: Sequence[Callable] | None = None) -> Iterator[None]:
        """Replace the networks' forwards by gates; restore them on leaving."""
        skips_hooks, hook = self._access.skips_hooks, self._access.hook
        with contextlib.ExitStack() as stack:
            for number, network in enumerate(self._networks()):
                real = forwards[number] if forwards else network.forward
                run = _with_hooks(network, real) if skips_hooks and not forwards else real
                gate = self._make_gate(driver, number, network, real, run)
                stack.enter_context(replace_attribute(network, "forward", gate))
                for hooks in HOOKS if skips_hooks else ():
                    stack.enter_context(replace_attribute(network, hooks, OrderedDict()))
            if hook is not None:
                hook.begin(forwards is None)
            yield

    def _make_gate(self, driver: Driver, number: int, network: nn.Module, real: Callable, run: Callable) -> Callable:
        """Build a forward that is skipped if its result is known; `run` is the forward with its hooks."""
        caches: list[Any] = []

        @functools.wraps(network.forward)  # modular pipelines look up which arguments the network takes
        def gate(*args, **kwargs):
            kwargs, must_run = self._adjust_call(kwargs)
            if self.copies_inputs:
                kwargs = {name: value.clone() if torch.is_tensor(value) else value for name, value in kwargs.items()}
            args, kwargs = driver.take_inputs(number, args, kwargs)
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [x for x in leaves if torch.is_tensor(x)]
            shapes = tuple((x.shape, x.dtype) for x in tensors)
            key = (id(network), shapes, tuple(x for x in leaves if isinstance(x, (str, bool))))
            dtype = next((x.dtype for x in tensors if x.is_floating_point()), None)
            # a call fills the key-value cache that it is the first to get
            fresh = [x for x in leaves if "Cache" in type(x).__name__ and not any(x is cache for cache in caches)]
            caches.extend(fresh)
            is_known = not (driver.needs_network or must_run or fresh)
            if is_known and key not in self._blank_outputs:
                only_shape = self._access.shapes_only is not None
                forward = functools.partial(real if only_shape else run, *args, **kwargs)
                with torch.no_grad():
                    self._run(key, forward, dtype, None if only_shape else number)
            if is_known and key in self._blank_outputs:
                output = self._blank_outputs[key]
            else:
                output = self._run(key, functools.partial(run, *args, **kwargs), dtype, number)
            driver.output_ndim = next((x.ndim for x in pytree.tree_leaves(output) if torch.is_tensor(x)), 0)
            return output

        return gate

    def _run(self, key: Any, forward: Callable[[], Any], dtype: torch.dtype | None, number: int | None) -> Any:
        """Run network `number`; None if only the shape of its output is used. Keep zeros in that shape."""
        access = self._access

        def call() -> Any:
            with access.forward_context():
                return forward()

        if number is not None and access.hook is not None:
            access.hook.before(number, call)
        with access.shapes_only() if number is None else contextlib.nullcontext():
            output = call()
        if access.casts_outputs:  # to the dtype of the latents, since autocast returns half precision
            output = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, output)
        # an output that carries state is not kept (key-value caches); expanded zeros take no memory
        if all(leaf is None or isinstance(leaf, (Tensor, int, float, str)) for leaf in pytree.tree_leaves(output)):
            self._blank_outputs[key] = pytree.tree_map_only(
                Tensor, lambda x: torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape), output
            )
        return output


def _with_hooks(network: nn.Module, forward: Callable) -> Callable:
    """Return the network's call as it is now, with its hooks."""
    hooks = [(name, network.__dict__[name]) for name in HOOKS]

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in [*hooks, ("forward", forward)]:
                stack.enter_context(replace_attribute(network, name, value))
            return network(*args, **kwargs)

    return run


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


@contextlib.contextmanager
def avoid_cudnn_attention() -> Iterator[None]:
    """Keep cuDNN's kernels out of `scaled_dot_product_attention`, and allow them again on leaving.

    On an H100, which prefers them in half precision, their backward pass returned gradients that are not finite for
    tiny FLUX models. Rollouts need this as well as updates: a replay reproduces them only with the same kernels.

    Only PyTorch's default is changed: kernels chosen by `torch.nn.attention.sdpa_kernel` or by diffusers'
    `set_attention_backend` stay in use.
    """
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    if not (cuda.cudnn_sdp_enabled() and all(enabled)):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


def find_quantization(network: nn.Module) -> str | None:
    """Return how a network is quantised, under diffusers' names; None for plain weights."""
    config = getattr(getattr(network, "hf_quantizer", None), "quantization_config", None)
    if config is None:
        return None
    method = str(getattr(config.quant_method, "value", config.quant_method))
    if method == "bitsandbytes":
        return "bitsandbytes_4bit" if config.load_in_4bit else "bitsandbytes_8bit"
    return method


def is_quantized_weight(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is stored in a special form instead of a plain tensor of numbers."""
    return type(parameter) is not nn.Parameter or not parameter.is_floating_point()
