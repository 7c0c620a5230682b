"""How prompts, samples, micro-batches and updates relate."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The sizes of a rollout and of what is trained on it; a micro-batch's slot counts over all passes over it."""

    num_generations: int
    best_of_n: int | None
    micro_batch: int
    accumulation: int
    steps_per_generation: int
    num_iterations: int
    data_processes: int = 1
    data_process: int = 0
    num_batches: int = 1

    @property
    def trained_per_prompt(self) -> int:
        """Samples per prompt that are trained on."""
        return self.best_of_n or self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts in one rollout, over all processes."""
        return self.micro_batch * self.data_processes * self.steps_per_generation // self.trained_per_prompt

    @property
    def samples_per_rollout(self) -> int:
        """Samples in one rollout, over all processes."""
        return self.prompts_per_rollout * self.num_generations

    @property
    def rollout_share(self) -> int:
        """Samples that one process makes in one rollout."""
        return self.samples_per_rollout // self.data_processes

    @property
    def update_share(self) -> int:
        """Samples that one process trains on in one update."""
        return self.micro_batch * self.accumulation

    @property
    def samples_per_update(self) -> int:
        """Samples that all processes train on in one update."""
        return self.update_share * self.data_processes

    @property
    def consecutive_samples(self) -> int:
        """Consecutive samples that one process makes: all, or with several processes its share of each update."""
        if self.data_processes == 1:
            return self.rollout_share
        return self.update_share * self.num_generations // self.trained_per_prompt

    @property
    def slots(self) -> int:
        """Micro-batches that one process trains on per rollout."""
        return self.steps_per_generation * self.num_iterations

    @property
    def updates_per_rollout(self) -> int:
        """Updates made on one rollout."""
        return max(1, self.slots // self.accumulation)
