"""Which process makes which samples of a rollout, and which of them share an update.

The order is drawn once for all processes, and the samples of an update are then dealt out to those there are: this is
what makes a run the same whatever the number of processes.
"""

import math

import torch
from torch import Tensor

from ..algorithms.advantages import best_of_n
from ..config.batch_sizes import BatchSizes
from ..policy.trajectory import sample_seed


class RolloutOrder:
    """The order in which the samples of one rollout are made and trained on.

    A rollout has prompts x num_generations samples; position p is in group p // num_generations. Where a rollout is
    trained on in several updates, these take the groups in a random order that depends on seed and generation alone:
    whole groups where an update holds whole groups and whole micro-batches of them, else single micro-batches. Of each
    update's samples every process gets an equal share, consecutive in that order, so that most groups lie on one
    process and their prompt is encoded once.

    Args:
        sizes: of the rollout; the settings' checks ensure that `best_of_n` finds whole groups on each process.
        seed: of the run.
        generation: number of the rollout.

    Attributes:
        made: (samples,) int64, all positions in the order of the updates.
        seed: of this rollout's order.
        generation: number of the rollout.
    """

    def __init__(self, sizes: BatchSizes, seed: int, generation: int):
        self.sizes, self.generation, self.seed = sizes, generation, sample_seed(seed, "order", generation)
        group, kept = sizes.num_generations, sizes.trained_per_prompt
        trained = sizes.prompts_per_rollout * kept
        self.updates = trained // sizes.samples_per_update
        unit = math.lcm(kept, sizes.micro_batch)  # trained samples that stay together
        if sizes.samples_per_update % unit:  # groups straddle updates: what is chosen of them needs all of them
            unit = sizes.micro_batch if sizes.best_of_n is None else trained
        self._unit = unit * group // kept  # of those that are made
        positions = torch.arange(sizes.samples_per_rollout)
        if self.updates > 1:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(trained // unit, generator=generator)
            positions = positions.view(-1, self._unit)[order].flatten()
        self.made = positions

    def of_process(self, positions: Tensor, process: int) -> Tensor:
        """Return (positions / processes,) those of one process, out of all in the order of the updates."""
        if self.sizes.data_processes == 1:
            return positions
        return positions.view(self.updates, self.sizes.data_processes, -1)[:, process].flatten()

    def own(self, positions: Tensor | None = None) -> Tensor:
        """Return this process's positions, of all that are made by default."""
        return self.of_process(self.made if positions is None else positions, self.sizes.data_process)

    def by_process(self) -> Tensor:
        """Return (samples,) positions as the processes have them, one process after the other."""
        return torch.cat([self.of_process(self.made, process) for process in range(self.sizes.data_processes)])

    def rank_of_position(self) -> Tensor:
        """Return (samples,) where each position lies in what is gathered from the processes."""
        return invert(self.by_process())

    def trained(self, ranking: Tensor) -> Tensor:
        """Return all positions that are trained on, in the order of the updates.

        Args:
            ranking: (samples,) by position, by which `best_of_n` chooses.
        """
        if self.sizes.best_of_n is None:
            return self.made
        kept = []
        for positions in self.made.split(self._unit):
            generator = torch.Generator().manual_seed(sample_seed(self.seed, "best_of_n", int(positions[0])))
            groups = positions // self.sizes.num_generations
            kept.append(positions[best_of_n(ranking[positions], groups, self.sizes.best_of_n, generator)])
        return torch.cat(kept)


def update_order(seed: int, iteration: int, updates: int) -> Tensor:
    """Return (updates,) in which order an iteration makes the updates of a rollout; the first as they were made."""
    if iteration == 0:
        return torch.arange(updates)
    generator = torch.Generator().manual_seed(sample_seed(seed, "order", iteration))
    return torch.randperm(updates, generator=generator)


def invert(numbers: Tensor, size: int | None = None) -> Tensor:
    """Return (size,) where each number lies among distinct ones below `size` (by default their count), or -1."""
    indices = numbers.new_full((len(numbers) if size is None else size,), -1)
    indices[numbers] = torch.arange(len(numbers))
    return indices
