"""A value model for PPO: it predicts the reward from the latent at which a denoising step starts.

It is trained along with the policy and shares no weights with it. Each step is reduced to a small vector, its state,
which a rollout can keep.
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

from ..algorithms.losses import value_loss
from ..policy.denoising import DenoisingPolicy
from ..policy.trajectory import Trajectory

STRETCHES = 64  # parts of a latent, each reduced to its mean and root mean square
CONDITIONS = 64  # numbers to which the prompt and other conditions are reduced
FREQUENCIES = 8  # cosines of the time in the denoising loop
STATE_SIZE = 2 * STRETCHES + CONDITIONS + 1 + FREQUENCIES
VALUE_WEIGHTS = "value_model.safetensors"
OPTIMIZER = "optimizer."  # prefix of its state among the weights


class ValueModel(nn.Module):
    """Network with two hidden layers that predicts the reward from a state, with an optimizer of its own.

    An engine that shards the policy (ZeRO, FSDP2) leaves it whole on every process. Inputs and output are scaled by
    means and standard deviations of the first rollout ([`calibrate`]), which are saved with the weights. At first, the
    output is that rollout's mean reward for every state.
    """

    def __init__(self, seed: int = 0, width: int = 256, learning_rate: float = 1e-3):
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
        self.optimizer = torch.optim.Adam(self.parameters(), learning_rate)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values `(...)` of states `(..., STATE_SIZE)`, in units of the reward."""
        scaled = (states - self.state_mean) / self.state_std
        return self.reward_mean + self.reward_std * self.layers(scaled).squeeze(-1)

    @torch.no_grad()
    def calibrate(self, states: Tensor, rewards: Tensor) -> None:
        """Set the scales of inputs and output from a rollout whose (samples,) rewards are known."""
        states, rewards = states.flatten(0, 1).to(self.state_mean), rewards.to(self.reward_mean)
        self.state_mean.copy_(states.mean(0))
        # inputs that hardly vary at first, such as a single prompt's, may later vary on a scale of about 1
        self.state_std.copy_(states.std(0, correction=0).clamp(min=0.01))
        self.reward_mean.copy_(rewards.mean())
        std = rewards.std(correction=0)
        self.reward_std.copy_(torch.where(std > 0, std, 1.0))
        self.is_calibrated.fill_(True)

    def loss(self, targets: "ValueTargets", clip: float | None) -> Tensor:
        """Return `value_loss` in units of the first rollout's standard deviation, so that small rewards count too."""
        size, targets = self.reward_std, targets.to(self.reward_std.device)
        values = self(targets.states)
        return value_loss(values / size, targets.values / size, targets.returns / size, clip)

    def save(self, folder: Path) -> None:
        """Write weights, scales and the optimizer's state into a checkpoint."""
        state = self.optimizer.state_dict()["state"]
        moments = {f"{OPTIMIZER}{index}.{name}": x for index, each in state.items() for name, x in each.items()}
        save_file({name: x.contiguous() for name, x in (self.state_dict() | moments).items()}, folder / VALUE_WEIGHTS)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, bit for bit."""
        if not (folder / VALUE_WEIGHTS).is_file():
            raise ValueError(f"{folder} has no {VALUE_WEIGHTS}; it was not written with advantage_estimator='gae'.")
        tensors, state = load_file(folder / VALUE_WEIGHTS), {}
        for name in [name for name in tensors if name.startswith(OPTIMIZER)]:
            index, moment = name.removeprefix(OPTIMIZER).split(".")
            state.setdefault(int(index), {})[moment] = tensors.pop(name)
        self.load_state_dict(tensors)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


@dataclasses.dataclass
class ValueTargets:
    """Training targets of the value model after a rollout: its (samples, steps) outputs, and advantage plus value.

    Returns are NaN if no reward scored the sample.
    """

    states: Tensor
    values: Tensor
    returns: Tensor

    TENSORS = ("states", "values", "returns")

    def __getitem__(self, indices: Any) -> "ValueTargets":
        """Return the targets of some samples."""
        return ValueTargets(**{name: getattr(self, name)[indices] for name in self.TENSORS})

    def to(self, device: torch.device) -> "ValueTargets":
        """Return the targets on a device."""
        return ValueTargets(**{name: getattr(self, name).to(device) for name in self.TENSORS})


# States: the latents and conditions of the policy's calls, reduced to a vector per step


def reduce_states(trajectory: Trajectory, conditions: Tensor) -> Tensor:
    """Reduce the trained steps of a rollout to the states that the value model sees.

    A latent is cut into `STRETCHES` parts, each reduced to mean and root mean square; time is a number and cosines.
    """
    columns = []
    for step in range(trajectory.steps.shape[1]):
        latents = trajectory.latents[:, step].float().flatten(1)[:, None]
        mean = functional.adaptive_avg_pool1d(latents, STRETCHES)[:, 0].cpu()
        square = functional.adaptive_avg_pool1d(latents**2, STRETCHES)[:, 0].cpu()
        time = trajectory.steps[:, step, None].cpu() / trajectory.num_inference_steps
        waves = torch.cos(math.pi * time * torch.arange(1, FREQUENCIES + 1))
        columns.append(torch.cat([mean, square.sqrt(), conditions.cpu(), time, waves], 1))
    return torch.stack(columns, 1)


def reduce_calls(samples: list[Trajectory], conditions: list[Tensor], calls: list[list[int]]) -> Tensor:
    """Return the states of samples that may differ in shape, in the order of the samples."""
    order = [index for indices in calls for index in indices]
    by_sample = dict(zip(order, torch.cat(conditions), strict=True))
    return torch.cat([reduce_states(sample, by_sample[index][None]) for index, sample in enumerate(samples)])


@contextlib.contextmanager
def record_conditions(policy: DenoisingPolicy) -> Iterator[list[Tensor]]:
    """Record the conditions that the policy's networks get, in every rollout inside the context."""
    recorded: list[Tensor] = []
    calls: list[Tensor] = []
    last = None

    def note(network: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal last
        driver = policy.scheduler.driver
        if not driver.needs_network:  # a call that only repeats the latents of the rollout
            return
        if driver is not last:
            last = driver
            calls.clear()
            recorded.append(torch.zeros(driver.count, CONDITIONS))
        if driver.current == 0:
            calls.append(pool_conditions(args, kwargs, driver.count))
            recorded[-1] = torch.stack(calls).mean(0)

    hooks = [network.register_forward_pre_hook(note, with_kwargs=True) for network in policy.networks]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def pool_conditions(args: tuple, kwargs: dict, count: int) -> Tensor:
    """Reduce the arguments of a network's call to `(count, CONDITIONS)` numbers on the CPU.

    This uses every float tensor after the first one (the latents) that has the same number of rows, such as prompt
    embeddings. Each is averaged over all but its first and last dimension, scaled to unit size and projected by a
    fixed random matrix, which nearly keeps distances whatever the width; the projections are added. The result is zero
    for networks that take their samples in lists.
    """
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x) and x.is_floating_point()]
    leaves = [x for x in leaves if x.ndim >= 2]
    total = torch.zeros(count, CONDITIONS)
    rows = len(leaves[0]) if leaves and len(leaves[0]) % count == 0 else 0
    for index, leaf in enumerate(x for x in leaves[1:] if len(x) == rows):
        width = leaf.shape[-1]
        pooled = leaf.detach().float().reshape(rows, -1, width).mean(1).cpu()
        pooled = pooled / (pooled.square().mean(1, keepdim=True).sqrt() + 1e-6)
        generator = torch.Generator().manual_seed(index)
        projection = torch.randn(width, CONDITIONS, generator=generator) / math.sqrt(width)
        total += (pooled @ projection).view(-1, count, CONDITIONS).mean(0)
    return total


class ValueCallback(TrainerCallback):
    """Callback that updates the value model along with the policy, with gradients averaged over processes."""

    def __init__(self, values: ValueModel, accelerator: Accelerator):
        self.values, self.accelerator = values, accelerator

    def on_train_begin(self, args, state, control, **kwargs):
        self.values.zero_grad()  # left by an attempt that ran out of memory

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for parameter in self.values.parameters():
            parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
        self.values.optimizer.step()
        self.values.zero_grad()
