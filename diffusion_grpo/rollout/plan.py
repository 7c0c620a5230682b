"""Plan a rollout: which process makes which samples, from which seeds, and what of them is trained in which update.

The order of the samples is drawn once for all processes, and the samples of each update are then divided among them.
Seeds and trained steps depend only on the run's seed and on positions. So a run does not depend on the number of
processes. `gather_by_position` puts the values of all processes together again.
"""

import dataclasses
import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..algorithms.advantages import best_of_n
from ..config.defaults import BatchSizes
from ..config.settings import DiffusionGRPOConfig
from ..distributed.backend import DistributedBackend
from ..policy.trajectory import make_generators, sample_seed


class RolloutOrder:
    """The order in which the samples of one rollout are made and trained on.

    A rollout has prompts x num_generations samples; the sample at position p is in group p // num_generations. If a
    rollout takes several updates, these train on the groups in a random order that depends only on seed and
    generation: on whole groups where they fit into updates and micro-batches, else on single micro-batches. With
    several batches per rollout (`num_batches_per_step`), the order is random only within each batch. Every
    process gets an equal, consecutive share of each update's samples, so that most groups are on a single process,
    which encodes their prompt once.

    Attributes:
        made: (samples,) int64 positions of all samples, in the order of the updates.
        row_indices: the dataset row of each position.
    """

    def __init__(self, sizes: BatchSizes, seed: int, generation: int, row_indices: Sequence[int] = ()):
        self.row_indices = row_indices
        self.sizes, self.generation, self.seed = sizes, generation, sample_seed(seed, "order", generation)
        group, kept = sizes.num_generations, sizes.trained_per_prompt
        trained = sizes.prompts_per_rollout * kept
        self.updates = trained // sizes.samples_per_update
        unit = math.lcm(kept, sizes.micro_batch)  # trained samples that stay together
        if sizes.samples_per_update % unit:  # groups straddle updates; best_of_n needs them whole
            unit = sizes.micro_batch if sizes.best_of_n is None else trained
        self._unit = unit * group // kept  # in samples that are made
        positions = torch.arange(sizes.samples_per_rollout)
        if self.updates > 1:
            generator = torch.Generator().manual_seed(self.seed)
            # units that straddle batches cannot stay within one
            batches = sizes.num_batches if trained // sizes.num_batches % unit == 0 else 1
            units = positions.view(batches, -1, self._unit)
            positions = torch.cat([part[torch.randperm(len(part), generator=generator)] for part in units]).flatten()
        self.made = positions

    def own(self, positions: Tensor | None = None, process: int | None = None) -> Tensor:
        """Return this process's share of positions in the order of the updates, by default of all samples made."""
        positions = self.made if positions is None else positions
        if self.sizes.data_processes == 1:
            return positions
        process = self.sizes.data_process if process is None else process
        return positions.view(self.updates, self.sizes.data_processes, -1)[:, process].flatten()

    def by_process(self) -> Tensor:
        """Return the positions of all processes, (samples,), one process after the other."""
        return torch.cat([self.own(self.made, process) for process in range(self.sizes.data_processes)])

    def trained(self, ranking: Tensor) -> Tensor:
        """Return the positions that are trained on, in the order of the updates, chosen by (samples,) `ranking`."""
        if self.sizes.best_of_n is None:
            return self.made
        kept = []
        for positions in self.made.split(self._unit):
            generator = torch.Generator().manual_seed(sample_seed(self.seed, "best_of_n", int(positions[0])))
            groups = positions // self.sizes.num_generations
            kept.append(positions[best_of_n(ranking[positions], groups, self.sizes.best_of_n, generator)])
        return torch.cat(kept)


def update_order(seed: int, iteration: int, updates: int) -> Tensor:
    """Return the order, (updates,), of a rollout's updates in an iteration after the first."""
    generator = torch.Generator().manual_seed(sample_seed(seed, "order", iteration))
    return torch.randperm(updates, generator=generator)


def gather_by_position(backend: DistributedBackend, local: Tensor | None, order: RolloutOrder) -> Tensor | None:
    """Return the values of all processes by position, on the CPU; a collective. None stays None."""
    if local is None:
        return None
    every = backend.gather(local.to(backend.accelerator.device)).cpu()
    return every[order.by_process().argsort()]


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """The (samples,) int64 seeds and the trained steps of each sample of one process."""

    seeds: Tensor
    initial_seeds: Tensor
    steps: list[list[int]]
    noise_steps: list[range] | None
    prefix_lengths: list[int] | None = None


class SamplingPlan:
    """Plan that draws seeds and steps for every rollout of a run."""

    def __init__(self, args: DiffusionGRPOConfig):
        self.seed, self.num_generations, self.samples_per_latent = args.seed, args.num_generations, args.latent_sharing
        self.trainable_steps, self.num_trained_steps = args.trainable_steps, args.trained_count
        self.step_selection, self.step_interval = args.step_selection, args.step_interval
        self.updates_per_rollout, self.shares_calls = args.batch_sizes.updates_per_rollout, args.shares_calls
        self.is_noise_limited, self.is_renoised = args.is_noise_limited, args.is_renoised
        self.shares_noise = args.recording.shares_noise

    def draw_steps(self, generation: int, prompt: int = 0) -> range:
        """Draw the consecutive steps that hold the trained ones of a prompt's samples, in rollout `generation`."""
        steps = self.trainable_steps
        if self.step_selection == "sample" or self.num_trained_steps == len(steps):
            return steps
        last = len(steps) - self.num_trained_steps
        if self.step_selection == "sliding":
            first = generation * self.updates_per_rollout // self.step_interval % (last + 1)
        else:
            name = f"window {self.seed} {generation}" + (f" {prompt}" if self.step_selection == "prompt" else "")
            first = random.Random(name).randint(0, last)
        return steps[first : first + self.num_trained_steps]

    def draw(self, generation: int, positions: Tensor) -> RolloutPlan:
        """Draw seeds and steps of the samples at `positions` of one rollout."""
        drawn = positions.tolist()
        noisy = (positions // self.num_generations if self.shares_noise else positions).tolist()
        seeds = torch.tensor([sample_seed(self.seed, "noise", generation, position) for position in noisy])
        latents = [position // self.samples_per_latent for position in drawn]
        held = [self.draw_steps(generation, position // self.num_generations) for position in drawn]
        draws = self.step_selection == "sample" and self.num_trained_steps < len(self.trainable_steps)
        return RolloutPlan(
            seeds,
            torch.tensor([sample_seed(self.seed, "initial", generation, latent) for latent in latents]),
            [
                choose_steps(steps, self.num_trained_steps, seed, self.is_renoised) if draws else list(steps)
                for steps, seed in zip(held, seeds.tolist(), strict=True)
            ],
            held if self.is_noise_limited else None,
            [steps.start if self.is_noise_limited else 0 for steps in held] if self.shares_calls else None,
        )


def choose_steps(steps: range, count: int, seed: int, is_stratified: bool = False) -> list[int]:
    """Draw `count` steps, ascending, all equally often; if stratified, one from each of as many equal parts."""
    (generator,) = make_generators(torch.tensor([seed]))
    if not is_stratified:
        return sorted(steps[index] for index in torch.randperm(len(steps), generator=generator)[:count].tolist())
    width = len(steps) / count  # parts of fractional length share edges, so one number places the steps of all
    places = torch.rand(count if width.is_integer() else 1, generator=generator).expand(count).tolist()
    return [steps[int((number + place) * width)] for number, place in enumerate(places)]
