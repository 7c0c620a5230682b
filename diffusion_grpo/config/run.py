"""Settings of the model, the data and what is written: a base of `DiffusionGRPOConfig`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunSettings:
    """What is loaded, where it is kept, and what a run leaves on disk."""

    # Model, data, log
    offload_frozen: str | None = field(
        default=None,
        metadata={
            "help": "cpu: keep text encoders, image encoders and the VAE in CPU memory; each is on the accelerator "
            "only while it is used, and never while the trained network runs."
        },
    )
    offload_rewards: str | None = field(
        default=None,
        metadata={
            "help": "cpu: keep the networks of all rewards in CPU memory except while they score, as `offload: true` "
            "does for a single reward. They then score after each rollout, not during it."
        },
    )
    group_offload: str | None = field(
        default=None,
        metadata={
            "help": "Keep the trained network's frozen weights in CPU memory, and move them to the accelerator only "
            "while they are used, in rollouts, replays and the backward pass. block_level moves whole blocks; "
            "leaf_level moves single layers, which takes the least memory and the most transfers. Only for a LoRA; "
            "see docs/memory.md."
        },
    )
    group_offload_blocks: int = field(
        default=1, metadata={"help": "Number of blocks that group_offload='block_level' moves together."}
    )
    group_offload_stream: bool = field(
        default=False,
        metadata={
            "help": "Fetch the next block while the current one computes (group_offload). This takes page-locked CPU "
            "memory for all frozen weights of the network, and accelerator memory for one more block. Blocks are then "
            "not copied back to CPU memory."
        },
    )
    cache_prompt_embeds: str = field(
        default="off",
        metadata={
            "help": "memory or disk: encode all prompts of the run (train, eval and validation) and the negative "
            "prompt once, before the run begins, and then free the text encoders. disk keeps the embeddings for "
            "later runs, which then do not load the text encoders at all; memory keeps them for this run only."
        },
    )
    prompt_embeds_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of cache_prompt_embeds: disk. By default one that all runs share, "
            "diffusion_grpo/prompt_embeds in the Hugging Face cache."
        },
    )
    context_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Number of processes that share the sequence of each sample, for videos too long for one. It must "
            "divide the number of processes; samples and batches are counted as if each such group were one process."
        },
    )
    context_parallel_type: str = field(
        default="ulysses",
        metadata={
            "help": "How processes share a sequence (context_parallel_size). ulysses: each takes some of the "
            "attention heads, whose number context_parallel_size must divide. ring: keys and values are passed "
            "around; needs CUDA and half precision."
        },
    )
    train_component: str | None = field(
        default=None, metadata={"help": "Name of the trained network; by default transformer, unet, prior or decoder."}
    )
    lora_path: str | None = field(
        default=None,
        metadata={
            "help": "Existing LoRA to train further, in place of a new one: the folder of a run, a checkpoint or a "
            "PEFT adapter, a file, or a Hub id. It keeps its rank and layers. The reference is the model with the "
            "LoRA as it was loaded."
        },
    )
    lora_adapter: str | None = field(
        default=None,
        metadata={
            "help": "Name of a LoRA to train further. It must already be loaded into the pipeline that is given to "
            "the trainer."
        },
    )
    keep_adapters: bool = field(
        default=False,
        metadata={
            "help": "Keep other LoRAs of the pipeline active and frozen beside the trained one; otherwise they are "
            "refused. Only the trained one is saved."
        },
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of DiffusionPipeline.from_pretrained."}
    )
    selective_checkpointing: float = field(
        default=1.0,
        metadata={
            "help": "Share of the network's blocks whose activations are recomputed, evenly spread. 0.5 recomputes "
            "every other block, which takes more memory and less time than 1.0."
        },
    )
    shuffle_dataset: bool = field(default=True, metadata={"help": "Shuffle the prompts in each epoch."})
    log_completions: bool = field(
        default=True, metadata={"help": "Write the prompts, rewards and advantages of each rollout to a parquet file."}
    )
    num_completions_to_log: int = field(
        default=16,
        metadata={"help": "Samples of an evaluation, or of a rollout (log_samples_steps), that are saved and shown."},
    )
    log_samples_steps: int | None = field(
        default=50,
        metadata={
            "help": "Every N updates, and in the first and the last rollout, save num_completions_to_log samples for "
            "the report; null for none. No effect if save_samples_steps is set or log_completions is False."
        },
    )
    save_samples_steps: int | None = field(
        default=None,
        metadata={
            "help": "Every N updates, save all samples of the rollout (PNG, MP4 or WAV) beside the table of its "
            "prompts, rewards and advantages."
        },
    )
    push_samples: bool = field(
        default=False,
        metadata={
            "help": "Push samples, evaluations, the report and tensorboard's events (which contain the host name) to "
            "the Hub too. By default only the weights, the model card, its images, run.json and train.yaml are pushed."
        },
    )
    validation_prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Prompts that are sampled from fixed seeds every validation_steps updates, saved and sent to "
            "report_to, but never scored."
        },
    )
    validation_steps: int = field(
        default=10,
        metadata={"help": "Updates between two rounds of validation_prompts; the first round is before training."},
    )
    overlap_rewards: bool = field(
        default=True,
        metadata={
            "help": "Score the samples of a prompt while those of the next prompts are generated. Set False if a "
            "reward model and the rollout do not fit into memory together (see also reward_processes). With either "
            "value, a reward is called several times per rollout, each time with whole groups. A reward that compares "
            "all samples of a rollout must be marked `batchwise`."
        },
    )
    reward_processes: int | None = field(
        default=None,
        metadata={
            "help": "Number of processes that compute rewards. Set it if not every process should hold the reward "
            "models. 1: the first process; 2: the first process of each half; and so on. The other processes send "
            "their samples to these. By default each process scores its own samples. No effect with a single process."
        },
    )
    watch_rewards: list[str] | None = field(
        default_factory=lambda: ["auto"],
        metadata={
            "help": "Further rewards that evaluations measure, to show what gets worse in training. Give names, or "
            "auto for cheap rewards that fit the kind of samples; null for none."
        },
    )
    resume_without_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Allow a checkpoint without optimizer or schedule state (written with save_only_model) to be "
            "resumed. The optimizer then starts anew, and the learning rate continues from the checkpoint's update."
        },
    )
