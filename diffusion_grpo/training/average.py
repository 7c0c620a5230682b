"""The moving average of the policy: kept during training, evaluated, and published.

While it is shown, it replaces the policy's own weights in the network; training continues from the policy's weights.
Checkpoints hold both. The old policy of losses on re-noised samples is such an average too.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor
from transformers import TrainerCallback

from ..distributed.trained_weights import TrainedWeights
from ..weights.files import POLICY_FOLDER

logger = logging.getLogger(__name__)


class PolicyAverage(TrainerCallback):
    """Moving average of the trained parameters, with the given decay or `(1 + n) / (10 + n)` while that is smaller.

    It moves every `interval` updates and after the last one, so that what is published has seen the whole run. `n`
    counts updates, as in Flow-GRPO, not averaging steps: a decay of 0.9 is reached after 80 updates.

    `has_moved` tells whether the average may differ from the policy it started from.
    """

    moves_at_end = True

    def __init__(
        self, weights: TrainedWeights, decay: float, interval: int, note: Callable[[Tensor], None] | None = None
    ):
        self.weights, self.note = weights, note
        self.average = EMAModel(weights.exact(), decay=decay)
        self.interval = interval
        self.is_shown, self.has_moved = False, False

    def on_train_begin(self, args, state, control, **kwargs):
        shares = self.weights.shard(self.average.shadow_params)
        places = [value.device for value in self.weights.exact()]  # engines move weights when training begins
        self.average.shadow_params = [share.to(place) for share, place in zip(shares, places, strict=True)]

    def on_step_end(self, args, state, control, **kwargs):
        is_last = self.moves_at_end and state.global_step == state.max_steps
        if is_last or state.global_step % self.interval == 0:
            self.average.optimization_step = state.global_step  # counts updates, and is right after a resume too
            self.average.step([value.requires_grad_() for value in self.weights.exact()])
            self.has_moved = True
            if self.note is not None:
                self.note(self._measure().to(args.device))

    @torch.no_grad()
    def _measure(self) -> Tensor:
        squares = torch.zeros(2)
        for share, value in zip(self.shares, self.weights.exact(), strict=True):
            squares += torch.stack([(share - value).float().square().sum(), share.float().square().sum()]).cpu()
        return squares

    @property
    def shares(self) -> list[Tensor]:
        """This process's shares of the average, one tensor per parameter."""
        return self.average.shadow_params

    def take(self, values: list[Tensor]) -> None:
        for average, value in zip(self.average.shadow_params, values, strict=True):
            average.data.copy_(value)
        self.has_moved = True

    def show(self) -> None:
        """Load the average into the network and keep the policy's own weights in CPU memory."""
        if self.is_shown:
            return
        used = self.weights.used()
        self.average.store(used)
        self.average.copy_to(used)
        self.weights.refresh()
        self.is_shown = True

    def hide(self) -> None:
        """Load the policy's own weights back into the network."""
        if not self.is_shown:
            return
        self.average.restore(self.weights.used())
        self.weights.refresh()
        self.is_shown = False

    @contextlib.contextmanager
    def place(self, is_shown: bool) -> Iterator[None]:
        """Use the average's weights (`is_shown`) or the policy's own inside this context."""
        was_shown = self.is_shown
        self.show() if is_shown else self.hide()
        try:
            yield
        finally:
            self.show() if was_shown else self.hide()


class OldPolicy(PolicyAverage):
    """The old policy of algorithms that train on re-noised samples: an average that moves once per rollout."""

    moves_at_end = False

    def __init__(self, weights: TrainedWeights, updates_per_rollout: int, decay: Callable[[int], float]):
        super().__init__(weights, 0.0, updates_per_rollout)
        # EMAModel counts one step more than there were updates
        self.average.get_decay = lambda step: decay((step - 1) // updates_per_rollout)


def find_policy_folder(folder: Path, has_average: bool) -> Path:
    """Find where a checkpoint keeps the policy's own weights: in a subfolder next to the average, or at its top."""
    policy = folder / POLICY_FOLDER
    if policy.is_dir():
        return policy
    if has_average:
        logger.warning("%s contains no moving average: it starts again from the policy's weights there.", folder)
    return folder
