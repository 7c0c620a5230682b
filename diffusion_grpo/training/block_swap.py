"""Keep the frozen weights of a trained network in CPU memory, and each block on the accelerator only while it works.

diffusers' group offloading decides which weights move together, and moves them. When they move is decided here,
because diffusers' own hooks do not support a backward pass: they return a block's weights to the CPU after its forward
pass, although autograd still needs them, and they do not offload blocks that gradient checkpointing recomputes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from diffusers.hooks.group_offloading import GroupOffloadingHook, ModuleGroup
from torch import Tensor, nn

HOOK = "group_offloading"  # diffusers uses this name to find the network's device
DIFFUSERS_HOOKS = (HOOK, "layer_execution_tracker", "lazy_prefetch_group_offloading")
BACKWARD_HOOK = "fetch_weights_in_backward"


class BlockSwap:
    """Offloading of one network's frozen weights, group by group: one or more blocks, or a single layer.

    Trained weights stay on the accelerator, with their gradients. In a backward pass, a weight that autograd needs is
    fetched again; where gradient checkpointing recomputes a block, its groups are present only for that time. The
    results are the same bit for bit.
    """

    def __init__(self, device: torch.device, level: str, blocks: int = 1, prefetches: bool = False):
        self._device, self._level, self._blocks, self._prefetches = device, level, blocks, prefetches
        self.groups: list[Group] = []
        self._group_of: dict[int, Group] = {}  # by the id of the weight
        self._addresses: dict[int, Tensor] = {}  # present weights, by data pointer
        self._last: dict[str, tuple[Group, ...]] = {}  # by direction: groups that ran last in this pass
        self._next: dict[tuple[str, tuple[Group, ...]], tuple[Group, ...]] = {}  # which groups came after which
        self._recomputed: tuple[Group, ...] = ()
        self._used: torch.Event | None = None  # occurs once the departed groups are no longer read
        self._is_ending = False

    def install(self, network: nn.Module) -> None:
        """Move the network's frozen weights off the accelerator, and its trained weights onto it."""
        check_network(network)
        remove_hooks(network)  # left by an earlier run
        use_stream = self._prefetches and self._device.type != "cpu"
        apply_group_offloading(
            network,
            onload_device=self._device,
            offload_device=torch.device("cpu"),
            offload_type=self._level,
            num_blocks_per_group=self._blocks,
            non_blocking=use_stream,
            use_stream=use_stream,
            record_stream=use_stream,  # a weight may be in use, in backward too, after its group has left
        )
        hooked = [(module, hook) for module in network.modules() if (hook := find_hook(module)) is not None]
        remove_hooks(network)
        movers = {id(hook.group): hook.group for _, hook in hooked}
        groups = {key: Group(mover, self._addresses) for key, mover in movers.items()}
        self.groups = [group for group in groups.values() if group.tensors]
        if len(self.groups) == 1:
            raise ValueError(
                f"group_offload={self._level!r} finds no list of blocks in {type(network).__name__}, and would move "
                "it as a whole; use 'leaf_level'."
            )
        for group in self.groups:
            self._group_of |= dict.fromkeys(map(id, group.tensors), group)
        for module, hook in hooked:
            if groups[id(hook.group)].tensors:
                HookRegistry.check_if_exists_or_initialize(module).register_hook(
                    SwapHook(groups[id(hook.group)], hook, self._work), HOOK
                )
        HookRegistry.check_if_exists_or_initialize(network).register_hook(PassHook(self._watch_pass), BACKWARD_HOOK)
        for tensor in (*network.parameters(), *network.buffers()):
            if id(tensor) not in self._group_of:
                tensor.data = tensor.data.to(self._device)

    @property
    def present(self) -> list["Group"]:
        return [group for group in self.groups if group.is_present]

    def contexts(self, block: Callable) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        """Return the contexts of a block's forward pass and recomputation, for `context_fn` of torch's checkpoint."""
        return contextlib.nullcontext(), self._recompute(block)

    # Forward

    @contextlib.contextmanager
    def _watch_pass(self) -> Iterator[None]:
        """Let autograd save references to offloaded weights, so that they need not stay on the accelerator."""
        self._end_backward()  # an error may have cut it short
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._note_weight, self._fetch_weight):
                yield
        finally:
            self._leave(self.present)
            self._last.pop("forward", None)

    @contextlib.contextmanager
    def _work(self, group: "Group", leaves: bool) -> Iterator[None]:
        """Keep a group present inside this context; with `leaves`, after its last module, it leaves afterwards."""
        if group not in self._recomputed:
            self._bring("forward", (group,))
        try:
            yield
        finally:
            if leaves and group not in self._recomputed:
                self._leave([group])

    def _bring(self, direction: str, groups: tuple["Group", ...]) -> None:
        """Fetch groups, and start to fetch those that followed them the last time."""
        last = self._last.get(direction)
        if last is not None and last != groups:
            self._next[direction, last] = groups
        self._last[direction] = groups
        self._fetch(groups)
        for group in groups:
            group.wait()
        if self._prefetches:
            self._fetch(self._next.get((direction, groups), ()))

    def _fetch(self, groups: tuple["Group", ...]) -> None:
        """Start to fetch groups, once the memory of those that have left is free.

        The host runs ahead of the accelerator. A group that has left stays in memory until the computation that reads
        it is done, so without this wait the groups of a whole pass could be in memory at once.
        """
        if all(group.is_present for group in groups):
            return
        if self._used is not None:
            self._used.synchronize()
            self._used = None
        for group in groups:
            group.fetch()

    def _leave(self, groups: list["Group"]) -> None:
        if any(group.is_present for group in groups):
            self._used = record_event(self._device) if self._prefetches else None
        for group in groups:
            group.leave()

    # Backward

    def _note_weight(self, tensor: Tensor) -> "Tensor | SavedWeight":
        """Pack a tensor that autograd saves; of an offloaded weight, keep only what is needed to find it again."""
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor
        weight = self._addresses.get(tensor.data_ptr())
        if weight is None or weight.dtype != tensor.dtype:
            return tensor
        return SavedWeight(weight, tensor.size(), tensor.stride(), tensor.dtype)

    def _fetch_weight(self, saved: "Tensor | SavedWeight") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._group_of[id(saved.weight)].wait()  # it may still be arriving
        weight = saved.weight.data.to(self._device, saved.dtype, non_blocking=True)
        return weight.as_strided(saved.size, saved.stride)

    @contextlib.contextmanager
    def _recompute(self, block: Callable) -> Iterator[None]:
        """Keep the groups of a block present while it is recomputed, until the next block is.

        The block's hooks cannot do this: checkpointing may recompute only a part of a group, and it stops by raising
        an error as soon as it has what it needs, before a hook on the block could clean up.
        """
        groups = self._list_groups(block)
        self._leave([group for group in self._recomputed if group not in groups])
        self._recomputed = groups
        if not self._is_ending:
            self._is_ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if groups:
            self._bring("backward", groups)
        yield

    def _list_groups(self, block: Callable) -> tuple["Group", ...]:
        tensors = [*block.parameters(), *block.buffers()] if isinstance(block, nn.Module) else []
        return tuple(dict.fromkeys(self._group_of[id(x)] for x in tensors if id(x) in self._group_of))

    def _end_backward(self) -> None:
        self._recomputed, self._is_ending = (), False
        self._last.pop("backward", None)
        self._leave(self.present)


@dataclasses.dataclass(frozen=True)
class SavedWeight:
    """A reference to a weight that autograd needs, or to a transposed view of it, without its values."""

    weight: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Group:
    """Frozen weights that move together."""

    def __init__(self, mover: ModuleGroup, addresses: dict[int, Tensor]):
        parameters = [*mover.parameters, *(p for module in mover.modules for p in module.parameters())]
        buffers = [*mover.buffers, *(buffer for module in mover.modules for buffer in module.buffers())]
        mover.modules, mover.buffers = [], list(dict.fromkeys(buffers))
        mover.parameters = list(dict.fromkeys(p for p in parameters if not p.requires_grad))
        kept = {*map(id, mover.parameters), *map(id, mover.buffers)}
        mover.cpu_param_dict = {key: value for key, value in mover.cpu_param_dict.items() if id(key) in kept}
        self._mover, self._addresses, self._own = mover, addresses, []
        self.is_present = False

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._mover.parameters, *self._mover.buffers]

    def fetch(self) -> None:
        """Start to copy the weights to the accelerator, unless they are there; then call `wait`."""
        if self.is_present:
            return
        self._mover.onload_()
        self.is_present = True
        by_address = {tensor.data_ptr(): tensor for tensor in self.tensors if tensor.numel()}
        self._own = list(by_address)
        self._addresses |= by_address

    def wait(self) -> None:
        """Make computations from now on wait until the weights have arrived."""
        if self._mover.stream is not None:
            torch.accelerator.current_stream(self._mover.onload_device).wait_stream(self._mover.stream)

    def leave(self) -> None:
        if self.is_present:
            self._mover.offload_()
            self.is_present = False
            for address in self._own:
                self._addresses.pop(address, None)


class SwapHook(GroupOffloadingHook):
    """Hook that keeps a group present while a module runs; its class tells diffusers where the network runs."""

    def __init__(self, group: Group, hook: GroupOffloadingHook, work: Callable):
        super().__init__(hook.group, config=hook.config)
        self._group, self._work = group, work

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        """Return the inputs unchanged: they are already on the network's device."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output unchanged: `new_forward` has released the group, as it also does after an error."""
        return output

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._work(self._group, leaves=module is self.group.offload_leader):
            return self.fn_ref.original_forward(*args, **kwargs)


class PassHook(ModelHook):
    """Hook that runs each pass of the whole network inside a context."""

    def __init__(self, watch: Callable[[], contextlib.AbstractContextManager]):
        super().__init__()
        self._watch = watch

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._watch():
            return self.fn_ref.original_forward(*args, **kwargs)


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event that occurs once the device has finished all its queued work; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


def check_network(network: nn.Module) -> None:
    """Refuse a network whose blocks cannot be swapped."""
    name = type(network).__name__
    if not getattr(network, "_supports_group_offloading", False):
        raise ValueError(f"group_offload: diffusers cannot offload {name} in groups; leave group_offload out.")
    if any(type(parameter) is not nn.Parameter for parameter in network.parameters()):
        raise ValueError(
            f"group_offload cannot move quantised weights, such as those of {name}; leave one of them out."
        )


def remove_hooks(network: nn.Module) -> None:
    """Remove diffusers' hooks and ours from a network; its weights stay where they are."""
    registry = HookRegistry.check_if_exists_or_initialize(network)
    for name in (*DIFFUSERS_HOOKS, BACKWARD_HOOK):
        registry.remove_hook(name, recurse=True)


def find_hook(module: nn.Module) -> GroupOffloadingHook | None:
    """Return the hook that offloads a module, diffusers' own or ours; None if there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(HOOK)
