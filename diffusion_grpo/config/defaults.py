"""What follows from the settings: defaults of one from another, and the sizes of a rollout and an update.

Nothing heavy is imported, so that settings can be checked before torch is.
"""

import json
import random

DICTIONARIES = ("pipeline_kwargs", "scheduler_kwargs", "model_init_kwargs")


class Sizes:
    """A base of `DiffusionGRPOConfig`, and of what the command line checks before it imports that."""

    def fill_in(self) -> None:
        """Set what other settings say: TRL's names, dictionaries written as JSON, defaults taken from others.

        Raises:
            ValueError: a dictionary that is not JSON.
        """
        if self.gradient_checkpointing is not None:  # the name that TRL's users know
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None
        for name in DICTIONARIES:
            if isinstance(getattr(self, name), str):
                setattr(self, name, _json(name, getattr(self, name)))
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon

    @property
    def samples_per_update_group(self) -> int:
        """Samples of a prompt that are trained on: `best_of_n`, or the whole group."""
        return self.best_of_n or self.num_generations

    @property
    def data_processes(self) -> int:
        """Processes with samples of their own; those of a context-parallel group have the same and count as one."""
        return self.world_size // self.context_parallel_size

    @property
    def data_process(self) -> int:
        """Number of this process, or of its context-parallel group, among `data_processes`."""
        return self.process_index // self.context_parallel_size

    @property
    def writes_samples(self) -> bool:
        """Whether this process writes what it has of samples: one of each context-parallel group does."""
        return self.process_index % self.context_parallel_size == 0

    @property
    def scores_on_some(self) -> bool:
        """Whether samples travel to the processes that compute rewards."""
        return self.reward_processes is not None and self.world_size > 1

    @property
    def prompts_per_generation(self) -> int:
        """Prompts in one rollout, over all processes."""
        trained = self.per_device_train_batch_size * self.data_processes * self.steps_per_generation
        return trained // self.samples_per_update_group

    @property
    def rollout_size(self) -> int:
        """Samples that one process rolls out for one generation."""
        return self.prompts_per_generation * self.num_generations // self.data_processes

    @property
    def samples_per_share(self) -> int:
        """Samples that one process trains on in one update."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def samples_per_update(self) -> int:
        """Samples that all processes train on in one update."""
        return self.samples_per_share * self.data_processes

    @property
    def samples_side_by_side(self) -> int:
        """Consecutive samples that one process rolls out: all, or of several processes its share of an update."""
        if self.data_processes == 1:
            return self.rollout_size
        return self.samples_per_share * self.num_generations // self.samples_per_update_group

    @property
    def needs_reference(self) -> bool:
        """Whether the KL divergence to a reference is measured."""
        return self.beta > 0 or self.kl_reward > 0

    @property
    def window(self) -> tuple[int, int]:
        """[start, stop) of the steps that may be trained."""
        start, stop = self.sde_window or (0, self.num_inference_steps - 1)
        return start, stop

    def window_of(self, generation: int) -> tuple[int, int]:
        """[start, stop) of the steps that may be trained in a rollout: the window, or a part drawn by the seed."""
        start, stop = self.window
        if self.sde_window_size is None:
            return start, stop
        start = random.Random(f"window {self.seed} {generation}").randint(start, stop - self.sde_window_size)
        return start, start + self.sde_window_size


def _json(name: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, which is not JSON ({error}); write a dictionary.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {text!r}; write a dictionary.")
    return value
