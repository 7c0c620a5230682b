"""The order in which the rows of a dataset are rolled out."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers.trainer_pt_utils import AcceleratorConfig


class GroupSampler(torch.utils.data.Sampler[int]):
    """Yields row indices in the order of the rollout, in chunks of prompts as TRL's `RepeatSampler`."""

    def __init__(
        self,
        num_rows: int,
        num_generations: int,
        prompts_per_rollout: int,
        repeat_count: int,
        shuffle: bool = True,
        seed: int = 0,
        processes: int = 1,
        copies: int = 1,
    ) -> None:
        self.num_rows = num_rows
        self.num_generations = num_generations
        self.prompts_per_rollout = prompts_per_rollout
        self.repeat_count = repeat_count
        self.shuffle = shuffle
        self.seed = seed
        self.processes, self.copies = processes, copies
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        chunks = -(-self.num_rows // self.prompts_per_rollout)
        return chunks * self.prompts_per_rollout * self.num_generations * self.repeat_count * self.copies

    def __iter__(self) -> Iterator[int]:
        rows = np.arange(self.num_rows)
        if self.shuffle:
            rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)  # the same when resumed
        chunks = -(-self.num_rows // self.prompts_per_rollout)
        # no prompt is left out, unlike by TRL's sampler
        chunks = np.resize(rows, (chunks, self.prompts_per_rollout))  # repeats rows if there are too few
        for chunk in chunks:  # one rollout at a time: an epoch of many prompts does not fit into memory
            samples = chunk.repeat(self.num_generations).reshape(self.processes, -1)
            indices = samples.repeat(self.copies, axis=0).flatten().tolist()
            for _ in range(self.repeat_count):
                yield from indices


def check_accelerator_config(config: AcceleratorConfig) -> None:
    """Refuse settings of accelerate's data loader that would break up the groups, which the sampler has formed."""
    names = [name for name in ("split_batches", "dispatch_batches") if getattr(config, name)]
    names += [name for name in (config.gradient_accumulation_kwargs or {}) if name == "num_steps"]
    if names:
        raise ValueError(f"accelerator_config: {names[0]} would break up the groups of a rollout; leave it out.")
