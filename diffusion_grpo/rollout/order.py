"""Which process rolls out which samples of a generation, and which of them share an update.

In: the settings and the number of the generation. Out: positions in the generation, for each process. A module of its
own because this is what makes a run the same whatever the number of processes: the order is drawn once for all of
them, and the samples of an update are then dealt out to those there are.
"""

import math

import torch
from torch import Tensor

from ..algorithms.advantages import best_of_n
from ..config.settings import DiffusionGRPOConfig
from ..policy.trajectory import sample_seed


class RolloutOrder:
    """The order in which the samples of one generation are rolled out and trained on.

    A generation has prompts x num_generations samples; position p is of the group p // num_generations. Where a
    rollout is trained on in several updates, these take the groups in a random order that depends on seed and
    generation alone: whole groups where an update holds whole groups and whole micro-batches of them, else single
    micro-batches. Of each update's samples every process gets an equal share, consecutive in that order, so that most
    groups lie on one process and their prompt is encoded once.

    Args:
        args: of the run; `check_settings` has seen to it that `best_of_n` finds whole groups on each process.
        generation: number of the rollout.

    Attributes:
        rolled: (samples,) int64, all positions in the order of the updates.
    """

    def __init__(self, args: DiffusionGRPOConfig, generation: int):
        self.args, self.seed = args, sample_seed(args.seed, "order", generation)
        group, kept = args.num_generations, args.samples_per_update_group
        update = args.samples_per_update
        trained = args.prompts_per_generation * kept
        self.updates = trained // update
        unit = math.lcm(kept, args.per_device_train_batch_size)  # trained samples that stay together
        if update % unit:  # groups straddle updates: what is chosen of them is known only of all together
            unit = args.per_device_train_batch_size if args.best_of_n is None else trained
        self._unit = unit * group // kept  # of those that are rolled out
        positions = torch.arange(args.prompts_per_generation * group)
        if self.updates > 1:
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(trained // unit, generator=generator)
            positions = positions.view(-1, self._unit)[order].flatten()
        self.rolled = positions

    def of_process(self, positions: Tensor, process: int) -> Tensor:
        """(positions / processes,) those of one process, out of all in the order of the updates."""
        if self.args.data_processes == 1:
            return positions
        return positions.view(self.updates, self.args.data_processes, -1)[:, process].flatten()

    def by_process(self) -> Tensor:
        """(samples,) positions as the processes have them, one process after the other."""
        return torch.cat([self.of_process(self.rolled, process) for process in range(self.args.data_processes)])

    def trained(self, ranking: Tensor) -> Tensor:
        """All positions that are trained on, in the order of the updates.

        Args:
            ranking: (samples,) by position, by which `best_of_n` chooses.
        """
        if self.args.best_of_n is None:
            return self.rolled
        kept = []
        for positions in self.rolled.split(self._unit):
            generator = torch.Generator().manual_seed(sample_seed(self.seed, "best_of_n", int(positions[0])))
            groups = positions // self.args.num_generations
            kept.append(positions[best_of_n(ranking[positions], groups, self.args.best_of_n, generator)])
        return torch.cat(kept)


def update_order(seed: int, iteration: int, updates: int) -> Tensor:
    """(updates,) in which order an iteration makes the updates of a rollout: the first as they were rolled out."""
    if iteration == 0:
        return torch.arange(updates)
    generator = torch.Generator().manual_seed(sample_seed(seed, "order", iteration))
    return torch.randperm(updates, generator=generator)


def inverse(numbers: Tensor, size: int | None = None) -> Tensor:
    """(size,) where each number lies among distinct ones below `size`, by default their count; -1 for the others."""
    places = numbers.new_full((len(numbers) if size is None else size,), -1)
    places[numbers] = torch.arange(len(numbers))
    return places
