"""What follows from settings: defaults taken from others, batch sizes, trained steps, what the algorithm needs."""

import dataclasses

import torch

from ..algorithms.base import Anchor, Recording
from ..algorithms.registry import find_recording


@dataclasses.dataclass
class BatchSizes:
    """The sizes of a rollout and of what is trained on it, over all processes; a share is that of one process."""

    num_generations: int
    best_of_n: int | None
    micro_batch: int
    accumulation: int
    steps_per_generation: int
    num_iterations: int
    data_processes: int = 1
    data_process: int = 0
    num_batches: int = 1
    rollout_call: int = 1  # samples of a pipeline call in rollouts

    def __post_init__(self):
        self.update_share = self.micro_batch * self.accumulation
        self.samples_per_update = self.update_share * self.data_processes
        self.trained_per_prompt = self.best_of_n or self.num_generations
        trained = self.micro_batch * self.data_processes * self.steps_per_generation
        self.prompts_per_rollout = trained // self.trained_per_prompt
        self.samples_per_rollout = self.prompts_per_rollout * self.num_generations
        self.rollout_share = self.samples_per_rollout // self.data_processes
        # that one process makes one after the other: all, or with several processes its share of each update
        self.consecutive_samples = self.rollout_share
        if self.data_processes > 1:
            self.consecutive_samples = self.update_share * self.num_generations // self.trained_per_prompt
        self.slots = self.steps_per_generation * self.num_iterations  # micro-batches of a process, over all passes
        self.updates_per_rollout = max(1, self.slots // self.accumulation)


class Sizes:
    """What follows from the settings: a base class of `DiffusionGRPOConfig`."""

    def fill_in(self) -> None:
        """Set what the user did not, where other settings suggest a value."""
        if self.takes_gradients and "num_generations" not in self.given:  # there is no group to compare with
            self.num_generations, self.given = 1, self.given | {"num_generations"}
        if self.recording.whole_groups and "per_device_train_batch_size" not in self.given:
            group, batch = max(1, self.best_of_n or self.num_generations), self.per_device_train_batch_size
            if batch % group and "gradient_accumulation_steps" not in self.given:
                self.gradient_accumulation_steps = max(1, self.gradient_accumulation_steps * batch // group)
            self.per_device_train_batch_size = batch if batch % group == 0 else group
        evaluating, saving = (str(getattr(e, "value", e)) for e in (self.eval_strategy, self.save_strategy))
        if evaluating == "steps" and self.eval_steps is None:  # transformers would take logging_steps, 1 by default
            self.eval_steps = self.logging_steps if "logging_steps" in self.given else self.save_steps
        saves = "save_strategy" not in self.given or saving == evaluating
        if evaluating == "steps" and "save_steps" in self.given and self.eval_steps:
            saves &= self.save_steps % self.eval_steps == 0  # else transformers refuses what the user has not set
        guards = self.stop_when or (self.stop_when is None and self.takes_gradients)  # `preflight.guard_gradients`
        if guards and evaluating != "no" and saves and "load_best_model_at_end" not in self.given:
            best = {"load_best_model_at_end": True, "save_strategy": evaluating, "save_steps": self.eval_steps}
            self.fill({name: value for name, value in best.items() if value is not None})

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
        return self.rollout_batch_size or self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size or self.rollout_call_size

    @property
    def trajectory_device(self) -> str | torch.device:
        return "cpu" if self.offload_trajectories else self.device

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
    def is_recorded(self) -> bool:
        return self.recording.keeps == "steps"

    @property
    def takes_gradients(self) -> bool:
        """Whether rewards are differentiated through the last steps, so that nothing is weighted by advantages."""
        return self.recording.keeps == "entered"

    @property
    def compares_groups(self) -> bool:
        is_usual = self.advantage_estimator == "group" and self.advantage_fn is None and not self.takes_gradients
        return is_usual and self.reward_baseline == "group"

    @property
    def anchor(self) -> Anchor:
        """Where the values of the policy that made a rollout come from: the ratio's denominator, means or errors."""
        if self.batch_sizes.updates_per_rollout == 1 and self.old_log_prob != "rollout":
            return "own"
        old = self.recording.old
        # where means are compared, numerical differences between batches would matter; a rollout has no errors
        is_replayed = self.old_log_prob == "replay" or (self.old_log_prob == "auto" and old is not None)
        return "replay" if is_replayed else "rollout"

    @property
    def trainable_steps(self) -> range:
        if self.trained_steps not in (None, "all"):
            return range(*self.trained_steps)
        if self.is_renoised:  # step 0 cannot be handed a sample; the last step can be trained
            return range(1, self.num_inference_steps)
        if self.takes_gradients:
            last = self.num_inference_steps
            return range(last) if self.trained_steps == "all" else range(last)[-(self.num_trained_steps or 1) :][:1]
        is_half = self.trained_steps is None and self.advantage_estimator != "gae"
        return range(max(1, self.num_inference_steps // 2) if is_half else self.num_inference_steps - 1)

    @property
    def trained_count(self) -> int:
        """How many of `trainable_steps` a sample trains."""
        if self.takes_gradients:  # one at which gradients end
            return 1
        if self.num_trained_steps is not None:
            return self.num_trained_steps
        trains_all = self.trained_steps or self.advantage_estimator == "gae" or self.is_renoised
        return len(self.trainable_steps) if trains_all else 1

    @property
    def drawn_count(self) -> int:
        """How many consecutive steps hold the trained steps of a sample."""
        return len(self.trainable_steps) if self.step_selection == "sample" else self.trained_count

    @property
    def is_noise_limited(self) -> bool:
        """Whether only the steps that hold the trained ones draw noise."""
        return self.noisy_steps == "trained" and self.is_recorded

    @property
    def trains_own_steps(self) -> bool:
        """Whether samples of one rollout train different steps."""
        return self.step_selection in ("prompt", "sample") and self.trained_count < len(self.trainable_steps)

    @property
    def latent_sharing(self) -> int:
        """How many samples start from the same initial latent."""
        usual = 1 if self.advantage_estimator == "gae" or not self.is_recorded else "group"
        sharing = usual if self.samples_per_latent is None else self.samples_per_latent
        return self.num_generations if sharing == "group" else sharing

    @property
    def trained_sharing(self) -> float:
        """A lower bound on the average number of trained samples that start from the same initial latent."""
        trained = self.best_of_n or self.num_generations
        return trained / min(trained, self.num_generations // self.latent_sharing)

    @property
    def shares_calls(self) -> bool:
        """Whether samples with the same initial latent share the network calls up to their first noise."""
        # a value model reads the conditions of each sample's calls; re-noised samples draw no noise in their steps
        return self.latent_sharing > 1 and self.is_recorded and self.advantage_estimator != "gae"

    @property
    def trained_share(self) -> float:
        """How often the step with the last shared network call is trained, from 0 to 1."""
        steps = self.trainable_steps
        places = len(steps) - self.drawn_count + 1
        is_trained = 1.0 if self.is_noise_limited else 1 / places if steps.start == 0 else 0.0
        return is_trained * self.trained_count / self.drawn_count

    @property
    def shared_calls(self) -> float:
        """How many network calls of a rollout samples with the same initial latent share, averaged over rollouts."""
        if not self.shares_calls:
            return 0.0
        steps = self.trainable_steps
        before = (steps.start + steps.stop - self.drawn_count) / 2
        return 1.0 + (before if self.is_noise_limited else 0.0)

    @property
    def batch_sizes(self) -> BatchSizes:
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
            rollout_call=self.rollout_call_size,
        )

    @property
    def token_sampling(self) -> dict[str, float | None]:
        """How tokens are drawn; None leaves it to the language model's own generation config."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
