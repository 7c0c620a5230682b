"""Which elements of a latent the trained networks see: what they do not see, a pipeline holds fixed.

Some pipelines write a condition into their latents after each step (inpainting). Others write it into the network's
input alone and step the whole latent (the first frame of Wan 2.2 TI2V, the frames that Cosmos continues): there the
scheduler moves numbers that mean nothing, and that are replaced before anything is decoded.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree


class InputWatch:
    """Finds which elements of the latents that one step is handed reach the inputs of its networks.

    Autograd tells, over the few operations between two steps. The networks get their inputs without that graph, and
    other modules that run on the way (a ControlNet) make none.

    Args:
        networks: the trained ones.

    Attributes:
        seen: (batch, ...) bool, one for each latent; None where no network's input depends on it.
    """

    def __init__(self, networks: Sequence[nn.Module]):
        self._networks = {id(network) for network in networks}
        self._leaves: list[Tensor] = []
        self._hooks: list[Any] = []
        self._mode, self._depth = True, 0
        self.seen: list[Tensor | None] = []

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Leave hooks and grad mode as they were, whatever happens inside."""
        mode = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._stop()
            torch.set_grad_enabled(mode)

    def follow(self, latents: Tensor) -> Tensor:
        """Return the same latents, to be handed to the pipeline; from now on what becomes of them is followed."""
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
        return leaf * 1  # pipelines write into what they are handed, which no leaf lets them do

    def take_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Note what of the latents is in a network's arguments; return these as they would be without the watch."""
        self._stop()
        followed = [self._note(leaf) for leaf in pytree.tree_leaves((args, kwargs))] if self._leaves else []
        cut = {id(tensor): tensor.detach() for tensor in followed if tensor is not None}
        return pytree.tree_map(lambda leaf: cut.get(id(leaf), leaf), (args, kwargs))

    def _note(self, value: Any) -> Tensor | None:
        """Note which elements a value depends on; return it where it depends on any."""
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
