"""Find which elements of a latent the trained networks see: a pipeline holds the others fixed.

Some pipelines write a condition into their latents after each step (inpainting). Others write it only into the
network's input, but step the whole latent (the first frame of Wan 2.2 TI2V, the frames that Cosmos continues). There
the scheduler moves elements that have no meaning and are replaced before decoding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree


class InputWatch:
    """Finds which elements of a step's input latents reach the inputs of its networks.

    It uses autograd over the few operations between two steps. The networks get their inputs without this graph, and
    other modules that run in between (a ControlNet) build no graph.

    Attributes:
        seen: (batch, ...) bool tensors, one per latent; None for a latent that no input of a network depends on.
    """

    def __init__(self, networks: Sequence[nn.Module]):
        self._networks = {id(network) for network in networks}
        self._leaves: list[Tensor] = []
        self._hooks: list[Any] = []
        self._mode, self._depth = True, 0
        self.seen: list[Tensor | None] = []

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Remove the hooks and restore the grad mode on leaving, also after an error."""
        mode = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._stop()
            torch.set_grad_enabled(mode)

    def follow(self, latents: Tensor) -> Tensor:
        """Return the same latents for the pipeline, and follow their use from now on."""
        if not self._hooks:
            self._mode = torch.is_grad_enabled()
            self._hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
        torch.set_grad_enabled(True)
        leaf = latents.detach().requires_grad_()
        self._leaves.append(leaf)
        self.seen.append(None)
        return leaf * 1  # pipelines may write to latents in place, which is not possible for a leaf

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note which elements of the latents a network's arguments depend on; return the arguments without a graph."""
        self._stop()
        followed = [self._note(leaf) for leaf in pytree.tree_leaves((args, kwargs))] if self._leaves else []
        cut = {id(tensor): tensor.detach() for tensor in followed if tensor is not None}
        return pytree.tree_map(lambda leaf: cut.get(id(leaf), leaf), (args, kwargs))

    def _note(self, value: Any) -> Tensor | None:
        """Note which elements a value depends on; return the value if there are any, otherwise None."""
        if not torch.is_tensor(value) or not value.requires_grad:
            return None
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
        gradients = torch.autograd.grad(value, self._leaves, weights, retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                seen = self.seen[number]
                self.seen[number] = gradient != 0 if seen is None else seen | (gradient != 0)
        return value if any(gradient is not None for gradient in gradients) else None

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) not in self._networks:
            self._depth += 1
            torch.set_grad_enabled(False)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) not in self._networks:
            self._depth -= 1
            torch.set_grad_enabled(self._depth == 0)

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            torch.set_grad_enabled(self._mode)
        self._hooks = []
