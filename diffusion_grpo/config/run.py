"""Settings of the model, the data and what is written: a base of `DiffusionGRPOConfig`.

In: nothing. Out: fields, each with a `help`; `config.py` checks them together. A theme of settings is a file.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunSettings:
    """What is loaded, where it lies, and what a run leaves on disk."""

    # Model, data, log
    offload_frozen: str | None = field(
        default=None,
        metadata={
            "help": "cpu: text encoders, image encoders and the VAE wait in CPU memory and are on the accelerator "
            "only while they are used, never while the trained network is."
        },
    )
    context_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Processes that share the sequence of each sample, for videos too long for one; a divisor of the "
            "number of processes, and samples and batches count as if each such group were one process."
        },
    )
    context_parallel_type: str = field(
        default="ulysses",
        metadata={
            "help": "How they share it: ulysses (each has some of the heads, whose number the size divides) or ring "
            "(keys and values go round; CUDA in half precision)."
        },
    )
    train_component: str | None = field(
        default=None, metadata={"help": "Name of the trained network; by default transformer, unet, prior or decoder."}
    )
    lora_path: str | None = field(
        default=None,
        metadata={
            "help": "LoRA to train further, in place of a new one: folder of a run, a checkpoint or PEFT's, a file, "
            "or a Hub id. Its rank and layers stay; the reference is the model with the LoRA as it was loaded."
        },
    )
    lora_adapter: str | None = field(
        default=None,
        metadata={"help": "Name of a LoRA that the pipeline given to the trainer carries, to be trained further."},
    )
    keep_adapters: bool = field(
        default=False,
        metadata={
            "help": "Leave other LoRAs that the pipeline carries active and frozen beside the trained one; without it "
            "they are refused. What is saved is the trained one alone."
        },
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of DiffusionPipeline.from_pretrained."}
    )
    selective_checkpointing: float = field(
        default=1.0,
        metadata={
            "help": "Share of the network's blocks, evenly spread, whose activations are recomputed; 0.5 is every "
            "other one: more memory than all, less time."
        },
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle the prompts in each epoch."})
    log_completions: bool = field(
        default=True, metadata={"help": "Write prompts, rewards and advantages of each rollout to a parquet file."}
    )
    num_completions_to_log: int = field(
        default=16,
        metadata={"help": "Samples of an evaluation, or of a rollout (log_samples_steps), that are saved and shown."},
    )
    log_samples_steps: int | None = field(
        default=50,
        metadata={
            "help": "Every N updates, and in the first and the last rollout, save num_completions_to_log samples for "
            "the report; null for none. Without effect where save_samples_steps is set or log_completions is False."
        },
    )
    save_samples_steps: int | None = field(
        default=None,
        metadata={
            "help": "Every so many updates, save all samples of the rollout (PNG, MP4 or WAV) beside the table of its "
            "prompts, rewards and advantages."
        },
    )
    push_samples: bool = field(
        default=False,
        metadata={
            "help": "Push samples, evaluations, the report and tensorboard's events (which hold the host's name) to "
            "the Hub too. By default only the weights, the model card and the pictures in it are pushed."
        },
    )
    validation_prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Prompts that are sampled from fixed seeds every validation_steps, saved and sent to report_to, "
            "and never scored."
        },
    )
    validation_steps: int = field(
        default=10,
        metadata={"help": "Updates between two rounds of validation_prompts; the first is before training."},
    )
    overlap_rewards: bool = field(
        default=True,
        metadata={
            "help": "Score the samples of a prompt while those of the next ones are made; False where a reward's "
            "network and the rollout do not fit into memory together (see reward_processes too). Either way a reward "
            "is called with whole groups, several times a rollout; one that compares all samples of a rollout is "
            "marked `batchwise`."
        },
    )
    reward_processes: int | None = field(
        default=None,
        metadata={
            "help": "Processes that compute rewards, where not all are to hold the networks of rewards: 1 is the "
            "first, 2 the first of each half, and so on; the others send their samples. By default each scores its "
            "own. Without effect on a single process."
        },
    )
    watch_rewards: list[str] | None = field(
        default_factory=lambda: ["auto"],
        metadata={
            "help": "Rewards that evaluations measure beside the trained ones and the judges, to notice what is paid "
            "for them: names, or auto for cheap ones that fit what the pipeline makes. null for none."
        },
    )
    resume_without_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Resume also from a checkpoint without optimizer or schedule state, as with save_only_model: the "
            "optimizer starts anew, and the learning rate goes on from the checkpoint's update."
        },
    )
