"""A value model for PPO: how much reward is still to come, seen from where a denoising step starts.

In: the states in which the trained steps of a rollout start. Out: a value for each, and by generalized advantage
estimation an advantage for each step. A module of its own because it is the one thing that is trained beside the
policy: it shares no weights with it, and what it sees is reduced to numbers that a rollout can keep.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers import TrainerCallback

from ..algorithms.gae import value_loss
from ..policy.denoising import DenoisingPolicy
from ..policy.trajectory import Trajectory

STRETCHES = 64  # of a latent, each reduced to its mean and its root mean square
CONDITIONS = 64  # numbers that prompt and other conditions are reduced to
FREQUENCIES = 8  # of the place in the loop
STATE_SIZE = 2 * STRETCHES + CONDITIONS + 1 + FREQUENCIES
VALUE_WEIGHTS = "value_model.safetensors"


class ValueModel(nn.Module):
    """Reward expected from a state: a network of two hidden layers on `states`.

    Inputs and output are scaled by means and standard deviations of the first rollout (`calibrate`), which are kept
    with the weights; the output starts at that rollout's mean reward everywhere.

    Args:
        seed: of the first weights, the same on every process; torch's global generator is left as it was.
        width: of the hidden layers.
    """

    def __init__(self, seed: int = 0, width: int = 256):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(STATE_SIZE, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
            )
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)
        self.register_buffer("state_mean", torch.zeros(STATE_SIZE))
        self.register_buffer("state_std", torch.ones(STATE_SIZE))
        self.register_buffer("reward_mean", torch.zeros(()))
        self.register_buffer("reward_std", torch.ones(()))
        self.register_buffer("is_calibrated", torch.zeros((), dtype=torch.bool))

    def forward(self, states: Tensor) -> Tensor:
        """`(..., STATE_SIZE)` states to `(...)` values, in units of the reward."""
        scaled = (states - self.state_mean) / self.state_std
        return self.reward_mean + self.reward_std * self.layers(scaled).squeeze(-1)

    @torch.no_grad()
    def calibrate(self, states: Tensor, rewards: Tensor) -> None:
        """Takes the scales from a rollout: `(samples, steps, STATE_SIZE)` states, `(samples,)` rewards without NaN."""
        states, rewards = states.flatten(0, 1).to(self.state_mean), rewards.to(self.reward_mean)
        self.state_mean.copy_(states.mean(0))
        # what hardly varied at first, such as a single prompt, may vary later: its own scale is about 1 then
        self.state_std.copy_(states.std(0, correction=0).clamp(min=0.01))
        self.reward_mean.copy_(rewards.mean())
        std = rewards.std(correction=0)
        self.reward_std.copy_(torch.where(std > 0, std, 1.0))
        self.is_calibrated.fill_(True)

    def loss(self, targets: "ValueTargets", clip: float | None) -> Tensor:
        """`value_loss` in units of the first rollout's standard deviation, so that no reward is too small to learn."""
        size, targets = self.reward_std, targets.to(self.reward_std.device)
        values = self(targets.states)
        return value_loss(values / size, targets.values / size, targets.returns / size, clip)

    def save(self, folder: Path) -> None:
        """Writes weights and scales into a checkpoint."""
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / VALUE_WEIGHTS)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, bit for bit.

        Raises:
            ValueError: the checkpoint holds no value model.
        """
        if not (folder / VALUE_WEIGHTS).is_file():
            raise ValueError(f"{folder} has no {VALUE_WEIGHTS}; it was not written with advantage_estimator='gae'.")
        self.load_state_dict(load_file(folder / VALUE_WEIGHTS))


@dataclasses.dataclass
class ValueTargets:
    """What a rollout leaves to train the value model on.

    Attributes:
        states: `(samples, steps, STATE_SIZE)` float32.
        values: `(samples, steps)` float32, by the value model before any update on this rollout.
        returns: `(samples, steps)` float32, advantage plus value; NaN where no reward scored the sample.
    """

    states: Tensor
    values: Tensor
    returns: Tensor

    TENSORS = ("states", "values", "returns")

    def __getitem__(self, rows: Any) -> "ValueTargets":
        """The targets of some samples."""
        return ValueTargets(**{name: getattr(self, name)[rows] for name in self.TENSORS})

    def to(self, device: torch.device) -> "ValueTargets":
        """The same on a device."""
        return ValueTargets(**{name: getattr(self, name).to(device) for name in self.TENSORS})


# States: what the policy is called with, reduced


def states(trajectory: Trajectory, conditions: Tensor) -> Tensor:
    """What the value model sees of the trained steps of a rollout.

    A latent, in whatever layout, is cut into `STRETCHES` consecutive parts, of which mean and root mean square are
    kept; the place in the loop is given as itself and as cosines.

    Args:
        trajectory: the rollout's.
        conditions: `(samples, CONDITIONS)` of the same samples, see `record_conditions`.

    Returns:
        `(samples, steps, STATE_SIZE)` float32 on the CPU.
    """
    columns = []
    for step in range(trajectory.steps.shape[1]):
        latents = trajectory.latents[:, step].float().flatten(1)[:, None]
        mean = functional.adaptive_avg_pool1d(latents, STRETCHES)[:, 0].cpu()
        square = functional.adaptive_avg_pool1d(latents**2, STRETCHES)[:, 0].cpu()
        place = trajectory.steps[:, step, None].cpu() / trajectory.num_inference_steps
        waves = torch.cos(math.pi * place * torch.arange(1, FREQUENCIES + 1))
        columns.append(torch.cat([mean, square.sqrt(), conditions.cpu(), place, waves], 1))
    return torch.stack(columns, 1)


def states_of_calls(samples: list[Trajectory], conditions: list[Tensor], calls: list[list[int]]) -> Tensor:
    """`states` of samples that may differ in shape, in their own order.

    Args:
        samples: one trajectory a sample.
        conditions: one tensor a pipeline call, see `record_conditions`.
        calls: places of the samples of each call.
    """
    order = [place for places in calls for place in places]
    found = dict(zip(order, torch.cat(conditions), strict=True))
    return torch.cat([states(sample, found[place][None]) for place, sample in enumerate(samples)])


@contextlib.contextmanager
def record_conditions(policy: DenoisingPolicy) -> Iterator[list[Tensor]]:
    """Notes what the policy's networks are told beside the latents, in every rollout inside the context.

    Yields:
        A list that gets one `(batch, CONDITIONS)` tensor a rollout, in their order: the mean over the calls of the
        first step, with and without guidance.
    """
    found: list[Tensor] = []
    calls: list[Tensor] = []
    last = None

    def note(network: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal last
        driver = policy.scheduler.driver
        if not driver.needs_network:  # a call that only asks for the latents of the rollout
            return
        if driver is not last:
            last = driver
            calls.clear()
            found.append(torch.zeros(driver.count, CONDITIONS))
        if driver.current == 0:
            calls.append(pooled_conditions(args, kwargs, driver.count))
            found[-1] = torch.stack(calls).mean(0)

    hooks = [network.register_forward_pre_hook(note, with_kwargs=True) for network in policy.networks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def pooled_conditions(args: tuple, kwargs: dict, count: int) -> Tensor:
    """Arguments of a network's call as `(count, CONDITIONS)` numbers on the CPU.

    Of every float tensor after the first (the latents) that has as many rows as it, such as prompt embeddings, the
    mean over all but the first and last dimension is brought to unit size and projected by a fixed random matrix,
    which keeps distances nearly as they are whatever the width; the results are added. Networks that take their
    samples in lists leave zeros.
    """
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x) and x.is_floating_point()]
    leaves = [x for x in leaves if x.ndim >= 2]
    total = torch.zeros(count, CONDITIONS)
    rows = len(leaves[0]) if leaves and len(leaves[0]) % count == 0 else 0
    for place, leaf in enumerate(x for x in leaves[1:] if len(x) == rows):
        width = leaf.shape[-1]
        pooled = leaf.detach().float().reshape(rows, -1, width).mean(1).cpu()
        pooled = pooled / (pooled.square().mean(1, keepdim=True).sqrt() + 1e-6)
        generator = torch.Generator().manual_seed(place)
        projection = torch.randn(width, CONDITIONS, generator=generator) / math.sqrt(width)
        total += (pooled @ projection).view(-1, count, CONDITIONS).mean(0)
    return total


class ValueCallback(TrainerCallback):
    """Gradients of the value model, which no wrapper looks after: their mean over processes, and none left over."""

    def __init__(self, values: ValueModel, accelerator: Accelerator):
        self.values, self.accelerator = values, accelerator

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for parameter in self.values.parameters():
            parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.values.zero_grad()
