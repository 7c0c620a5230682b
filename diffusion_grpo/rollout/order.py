"""Decide which process makes which samples of a rollout, and which samples share an update.

The order is drawn once for all processes, and the samples of each update are then divided among them, so that a run
does not depend on the number of processes. `gather_by_position` puts the values of all processes together again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..algorithms.advantages import best_of_n
from ..config.defaults import BatchSizes
from ..distributed.backend import DistributedBackend
from ..policy.trajectory import sample_seed


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
