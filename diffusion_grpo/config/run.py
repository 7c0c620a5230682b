"""Settings of the model, its memory, the data, what is written and watched: a base class of `DiffusionGRPOConfig`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from .declare import Count, Fraction, Range, setting


@dataclass
class RunSettings:
    """What is loaded, where it is kept, what a run leaves on disk, and what stops it."""

    # Model, data, log
    offload_frozen: Literal["cpu"] | None = setting(
        None,
        "cpu: keep text encoders, image encoders and the VAE in CPU memory except while they are used.",
    )
    offload_rewards: Literal["cpu"] | None = setting(
        None,
        "cpu: keep the networks of all rewards in CPU memory except while they score, after each rollout (`offload: "
        "true` for a single reward).",
    )
    group_offload: Literal["block_level", "leaf_level"] | None = setting(
        None,
        "Keep the frozen weights beneath a LoRA in CPU memory except while they are used (docs/memory.md): whole "
        "blocks (block_level), or single layers (leaf_level).",
    )
    group_offload_blocks: Count = setting(1, "Number of blocks that group_offload='block_level' moves together.")
    group_offload_stream: bool = setting(
        False,
        "With group_offload, fetch the next block while the current one computes, which takes more memory on the "
        "accelerator and pins that of the CPU.",
    )
    cache_prompt_embeds: Literal["off", "memory", "disk"] = setting(
        "off",
        "Encode all prompts once, before the run begins, and then free the text encoders. memory keeps the "
        "embeddings for this run; disk also for later runs.",
    )
    prompt_embeds_dir: str | None = setting(
        None,
        "Folder for cache_prompt_embeds: disk. By default diffusion_grpo/prompt_embeds in the Hugging Face cache, "
        "which all runs share.",
    )
    context_parallel_size: Count = setting(
        1,
        "Number of processes that share the sequence of each sample, for videos too long for one process "
        "(docs/distributed.md). Must divide the number of processes.",
    )
    context_parallel_type: Literal["ulysses", "ring"] = setting(
        "ulysses",
        "How processes share a sequence. ulysses: each computes some of the attention heads, whose number "
        "context_parallel_size must divide. ring: keys and values are passed around; requires CUDA and half "
        "precision.",
    )
    train_component: str | None = setting(
        None, "Name of the network to train; by default transformer, unet, prior or decoder."
    )
    lora_path: str | None = setting(
        None,
        "Existing LoRA to train further, with its rank and layers: the folder of a run, a checkpoint or a PEFT "
        "adapter, a file, or a Hub id (docs/resuming.md).",
    )
    lora_adapter: str | None = setting(
        None,
        "Name of a LoRA to train further that is already loaded into the pipeline given to the trainer.",
    )
    keep_adapters: bool = setting(
        False,
        "Keep other LoRAs of the pipeline active but frozen, and unsaved, while one is trained; by default they are "
        "refused.",
    )
    model_init_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Keyword arguments of DiffusionPipeline.from_pretrained.",
        repr=False,  # may hold a token
    )
    selective_checkpointing: Fraction = setting(
        1.0,
        "Fraction of the network's blocks, evenly spread, whose activations are recomputed. 0.5 takes more memory "
        "and less time than 1.0.",
    )
    prompt_column: str | None = setting(
        None,
        "Column of the dataset that holds the prompts. By default prompt, else caption or the only column of texts.",
    )
    shuffle_dataset: bool = setting(True, "Shuffle the prompts in each epoch.")
    log_completions: bool = setting(
        True, "Write the prompts, rewards and advantages of each rollout to a parquet file."
    )
    num_completions_to_log: Annotated[int, Range(0)] = setting(
        16, "Number of samples to save and show from an evaluation, or from a rollout (log_samples_steps)."
    )
    log_samples_steps: Count | None = setting(
        50,
        "Save num_completions_to_log samples of a rollout for the report every N updates, and of the first and the "
        "last; null for none. No effect if save_samples_steps is set or log_completions is False.",
    )
    save_samples_steps: Count | None = setting(
        None,
        "Save all samples of the rollout (PNG, MP4 or WAV) every N updates.",
    )
    push_samples: bool = setting(
        False,
        "Also push samples, evaluations, the report and tensorboard's events (which contain the host name) to the "
        "Hub.",
    )
    validation_prompts: list[str] | None = setting(
        None,
        "Prompts from which samples are generated with fixed seeds every validation_steps updates, saved and sent to "
        "report_to, but never scored.",
    )
    validation_steps: Count = setting(
        10, "Number of updates between two rounds of validation_prompts. The first round is before training."
    )
    overlap_rewards: bool = setting(
        True, "Score the samples of a prompt while those of the next prompts are generated (docs/rewards/own.md)."
    )
    stop_when: dict[str, Any] | str | None = setting(
        None,
        "Limits of logged metrics (docs/rewards/hacking.md), such as {eval_rewards/tesseract/mean: 2, diversity: "
        "0.4, eval_velocity/ratio_to_ref: 1.15}; the first that is passed ends the run with the weights of its best "
        "evaluation before that (load_best_model_at_end is then on by default). By default there are none, but for "
        "draft those of docs/algorithms/draft.md; {} sets none.",
    )
    watch_rewards: list[str] | None = setting(
        ["auto"],
        "Rewards that evaluations measure only to show what gets worse: names, or auto for cheap ones that fit the "
        "kind of samples; null for none.",
    )
    overwrite_output_dir: bool = setting(
        False,
        "Start anew in an output_dir that holds a run, whose checkpoints, samples and log are deleted. No effect on "
        "a resumed run.",
    )
    resume_without_optimizer: bool = setting(
        False,
        "Allow resuming from a checkpoint without optimizer state (save_only_model). The optimizer then starts "
        "afresh; the learning rate continues.",
    )
