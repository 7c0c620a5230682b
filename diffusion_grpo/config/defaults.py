"""Values derived from the settings: defaults taken from other settings, and the sizes of a rollout and an update."""

import json

from ..algorithms.base import Anchor, Recording
from ..algorithms.choose import find_recording
from .batch_sizes import BatchSizes

DICTIONARIES = ("pipeline_kwargs", "scheduler_kwargs", "model_init_kwargs", "loss_kwargs", "quantization")


class Sizes:
    """What follows from the settings: a base of `DiffusionGRPOConfig`."""

    def fill_in(self) -> None:
        """Apply TRL's names, read dictionaries written as JSON, and fill in defaults taken from other settings.

        Raises:
            ValueError: a dictionary is not valid JSON.
        """
        if self.gradient_checkpointing is not None:  # the name that users of TRL know
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None
        self.scale_rewards = {"True": "group", "False": "none"}.get(
            str(self.scale_rewards).title(), self.scale_rewards
        )
        for name in DICTIONARIES:
            if isinstance(getattr(self, name), str):
                setattr(self, name, _json(name, getattr(self, name)))
        if self.recording.whole_groups and "per_device_train_batch_size" not in self.given:
            group, batch = max(1, self.best_of_n or self.num_generations), self.per_device_train_batch_size
            if batch % group and "gradient_accumulation_steps" not in self.given:
                self.gradient_accumulation_steps = max(1, self.gradient_accumulation_steps * batch // group)
            self.per_device_train_batch_size = batch if batch % group == 0 else group

    @property
    def micro_batches_per_rollout(self) -> int:
        """Micro-batches that a process trains on in one rollout."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def upper_epsilon(self) -> float:
        """How far above 1 the ratio is clipped."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def data_processes(self) -> int:
        """Number of processes with samples of their own; a context-parallel group shares samples and counts as one."""
        return self.world_size // self.context_parallel_size

    @property
    def data_process(self) -> int:
        """Index of this process, or of its context-parallel group, among `data_processes`."""
        return self.process_index // self.context_parallel_size

    @property
    def rollout_call_size(self) -> int:
        """Samples rolled out together."""
        return self.rollout_batch_size or self.per_device_train_batch_size

    @property
    def needs_reference(self) -> bool:
        """Whether updates or rewards compare the policy with a reference."""
        return self.beta > 0 or self.kl_reward > 0 or self.recording.reference

    @property
    def recording(self) -> Recording:
        """What the algorithm needs recorded of a rollout; one of the user's own is imported for this."""
        return find_recording(self.loss_type)

    @property
    def is_renoised(self) -> bool:
        """Whether finished samples are trained on, which are noised again, instead of recorded steps."""
        return self.recording.keeps == "clean"

    @property
    def anchor(self) -> Anchor:
        """Where the values of the policy that made a rollout come from: the ratio's denominator, and means or errors.

        With a single update per rollout, the update's own pass gives them. With several, "auto" takes them from the
        rollout unless the loss compares means, where numerical differences between batches would matter. Errors of
        re-noised samples are not in the rollout.
        """
        if self.batch_sizes.updates_per_rollout == 1 and self.old_log_prob != "rollout":
            return "own"
        old = self.recording.old
        is_replayed = self.old_log_prob == "replay" or (self.old_log_prob == "auto" and old is not None)
        return "replay" if is_replayed else "rollout"

    @property
    def trains_any_step(self) -> bool:
        """Whether all steps may be trained unless `sde_window` says otherwise.

        This is the case if another setting selects steps or adds noise to all of them, if a value model reads whole
        trajectories, and for re-noised samples. Otherwise one early step is trained.
        """
        is_chosen = self.permute_steps or self.timestep_fraction < 1
        return is_chosen or self.noise_in_last_step or self.advantage_estimator == "gae" or self.is_renoised

    @property
    def window(self) -> tuple[int, int]:
        """The range [start, stop) of the steps that may be trained."""
        if self.sde_window:
            start, stop = self.sde_window
            return start, stop
        if self.is_renoised:  # step 0 cannot be handed a sample; the last step can be trained
            return 1, self.num_inference_steps
        return 0, self.num_inference_steps - 1 if self.trains_any_step else max(1, self.num_inference_steps // 2)

    @property
    def window_size(self) -> int:
        """How many consecutive steps of `window` a sample may train."""
        if self.sde_window_size is not None:
            return self.sde_window_size
        start, stop = self.window
        return stop - start if self.sde_window or self.trains_any_step else 1

    @property
    def trainable_steps(self) -> range:
        """The steps that may be trained; without `permute_steps`, only the first steps in each part of the window."""
        start, stop = self.window
        left_out = (
            0 if self.permute_steps else self.window_size - max(1, round(self.timestep_fraction * self.window_size))
        )
        return range(start, stop - left_out)

    @property
    def silent_outside_window(self) -> bool:
        """Whether steps outside the trained part of the window draw no noise."""
        if self.deterministic_outside_window is not None:
            return self.deterministic_outside_window
        return not (self.noise_in_last_step or self.is_renoised)

    @property
    def shares_initial_noise(self) -> bool:
        """Whether all samples of a prompt start from the same initial latent."""
        if self.same_initial_noise is not None:
            return self.same_initial_noise
        return not (self.branches or self.advantage_estimator == "gae" or self.is_renoised)

    @property
    def trains_own_steps(self) -> bool:
        """Whether samples of one rollout train different steps."""
        return self.permute_steps or self.sde_window_order == "per_prompt"

    @property
    def latent_sharing(self) -> int:
        """How many samples start from the same initial latent."""
        return self.num_generations if self.shares_initial_noise else self.branches or 1

    @property
    def trained_sharing(self) -> float:
        """A lower bound on the average number of trained samples that start from the same initial latent."""
        trained = self.best_of_n or self.num_generations
        return trained / min(trained, self.num_generations // self.latent_sharing)

    @property
    def shares_calls(self) -> bool:
        """Whether samples with the same initial latent share the network calls up to their first noise.

        They do not with a value model, which reads the conditions of each sample's calls, or on re-noised samples,
        which draw no noise in their steps.
        """
        is_recorded = not self.is_renoised and self.advantage_estimator != "gae"
        return self.latent_sharing > 1 and is_recorded

    @property
    def trained_share(self) -> float:
        """How often the step with the last shared network call is trained, from 0 to 1."""
        start, stop = self.window
        places = stop - start - self.window_size + 1
        is_trained = 1.0 if self.silent_outside_window else 1 / places if start == 0 else 0.0
        return is_trained * (self.timestep_fraction if self.permute_steps else 1.0)

    @property
    def trains_shared_step_alone(self) -> bool:
        """Whether each sample trains only one step, the one with the last shared network call."""
        return self.trained_share == 1 and self.window_size == 1

    @property
    def shared_calls(self) -> float:
        """How many network calls of a rollout samples with the same initial latent share, averaged over windows."""
        if not self.shares_calls:
            return 0.0
        start, stop = self.window
        before = (start + stop - self.window_size) / 2
        return 1.0 + (before if self.silent_outside_window else 0.0)

    @property
    def batch_sizes(self) -> BatchSizes:
        """How prompts, samples, micro-batches and updates relate."""
        return BatchSizes(
            num_generations=self.num_generations,
            best_of_n=self.best_of_n,
            micro_batch=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
            steps_per_generation=self.micro_batches_per_rollout,
            num_iterations=self.num_iterations,
            data_processes=self.data_processes,
            data_process=self.data_process,
            num_batches=self.num_batches_per_step,
        )

    @property
    def token_sampling(self) -> dict[str, float | None]:
        """How tokens are drawn; None leaves it to the language model's own generation config."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def _json(name: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, which is not JSON ({error}); write a dictionary.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {text!r}; write a dictionary.")
    return value
