"""The order in which the rows of a dataset are rolled out: in groups, which accelerate must not break up (a check)."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers.trainer_pt_utils import AcceleratorConfig

from ..config.defaults import BatchSizes


class GroupSampler(torch.utils.data.Sampler[int]):
    """Yields row indices in the order of the rollout, in chunks of prompts as TRL's `RepeatSampler`."""

    def __init__(self, num_rows: int, sizes: BatchSizes, shuffle: bool = True, seed: int = 0, copies: int = 1):
        self.num_rows, self.sizes, self.shuffle, self.seed, self.copies = num_rows, sizes, shuffle, seed, copies
        self.chunks = -(-num_rows // sizes.prompts_per_rollout)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.chunks * self.sizes.samples_per_rollout * self.sizes.slots * self.copies

    def __iter__(self) -> Iterator[int]:
        rows = np.arange(self.num_rows)
        if self.shuffle:
            rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)  # the same when resumed
        # no prompt is left out, unlike by TRL's sampler: rows are repeated if there are too few
        chunks = np.resize(rows, (self.chunks, self.sizes.prompts_per_rollout))
        for chunk in chunks:  # one rollout at a time: an epoch of many prompts does not fit into memory
            samples = chunk.repeat(self.sizes.num_generations).reshape(self.sizes.data_processes, -1)
            indices = samples.repeat(self.copies, axis=0).flatten().tolist()
            for _ in range(self.sizes.slots):
                yield from indices


def check_accelerator_config(config: AcceleratorConfig) -> None:
    """Refuse settings of accelerate's data loader that would break up the groups, which the sampler has formed."""
    names = [name for name in ("split_batches", "dispatch_batches") if getattr(config, name)]
    names += [name for name in (config.gradient_accumulation_kwargs or {}) if name == "num_steps"]
    if names:
        raise ValueError(f"accelerator_config: {names[0]} would break up the groups of a rollout; leave it out.")
