"""Names of settings: TRL's become ours, unknown ones get advice. Names of files and metrics are checked."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

ALIASES = {"model_name_or_path": "model", "dataset_name": "dataset"}  # TRL's names, which the command line accepts
# our setting: what the same is called in transformers (earlier or now), TRL, diffusers' scripts, ddpo-pytorch,
# flow_grpo, DanceGRPO, MMDanceGRPO, FastVideo and GLM-Image, without the prefixes in `SECTION`
EQUIVALENTS = {
    "advantage_clip": "adv_clip_max",
    "advantage_estimator": "adv_estimator",
    "beta": "kl_coef kl_coeff kl_beta kl_loss_coef",
    "best_of_n": "bestofn",
    "context_parallel_size": "sp_size ulysses_size",
    "dataset": "dataset_path data_json_path prompt_path train_files data_path instance_data_dir train_dataset",
    "ema_decay": "ema use_ema",
    "epsilon": "clip_range clip_ratio clip_eps cliprange policy_clip_range clip_ratio_low",
    "epsilon_high": "clip_range_high clip_ratio_high",
    "eval_dataset": "val_files validation_dataset validation_dataset_file",
    "eval_num_inference_steps": "eval_num_steps validation_sampling_steps",
    "eval_steps": "eval_freq test_freq eval_interval",
    "eval_strategy": "evaluation_strategy",
    "gradient_accumulation_steps": "grad_accum_steps grad_accumulation_steps",
    "gradient_checkpointing": "activation_checkpoint enable_gradient_checkpointing",
    "guidance_scale": "cfg cfg_scale guidance",
    "height": "h image_height",
    "hub_model_id": "push_to_hub_model_id repo_id",
    "hub_token": "push_to_hub_token",
    "learning_rate": "lr",
    "logging_steps": "log_freq log_interval log_steps",
    "lora_path": "lora_model_path pretrained_lora",
    "lora_r": "rank lora_rank",
    "lr_scheduler_type": "lr_scheduler scheduler_type",
    "max_grad_norm": "clip_grad grad_clip gradient_clipping",
    "max_steps": "max_train_steps num_train_steps total_steps total_training_steps",
    "model": "pretrained_model_name_or_path base_model model_id model_path pretrained_model",
    "multi_objective_aggregation": "multi_reward_mix",
    "noise_level": "eta",
    "num_frames": "t",
    "num_generations": "num_samples num_image_per_prompt num_images_per_prompt n group_size num_samples_per_prompt k",
    "num_inference_steps": "num_steps sampling_steps sample_steps inference_steps denoising_steps",
    "num_iterations": "num_inner_epochs inner_epochs",
    "num_processes": "nproc_per_node num_gpus n_gpus_per_node",
    "num_train_epochs": "num_epochs epochs total_epochs",
    "optim": "optimizer optimizer_type",
    "output_dir": "save_dir checkpoint_dir save_path",
    "per_device_eval_batch_size": "eval_batch_size test_batch_size per_gpu_eval_batch_size",
    "per_device_train_batch_size": "batch_size micro_batch_size per_gpu_train_batch_size mini_batch_size",
    "report_to": "log_with logger tracker",
    "reward_funcs": "reward_fn reward reward_function reward_func rewards reward_models reward_model metrics",
    "reward_weights": "reward_weight reward_coef",
    "noisy_steps": "deterministic_outside_window noise_in_last_step",
    "num_trained_steps": "sde_window_size",
    "samples_per_latent": "same_latent init_same_noise use_same_noise same_initial_noise branches",
    "save_samples_steps": "result_save_path",
    "save_steps": "save_freq checkpointing_steps save_interval",
    "save_total_limit": "num_checkpoint_limit checkpoints_total_limit",
    "scale_rewards": "normalize_advantages",
    "steps_per_generation": "num_batches_per_epoch",
    "step_interval": "iters_per_group",
    "step_selection": "sde_window_order permute_steps sample_strategy",
    "tf32": "allow_tf32",
    "trained_steps": "sde_window sde_window_range",
    "use_cpu": "no_cuda",
    "use_peft": "use_lora",
    "validation_prompts": "validation_prompt online online_prompt online_save_path",
    "validation_steps": "online_step_interval",
    "warmup_steps": "lr_warmup_steps num_warmup_steps",
    "width": "w image_width",
}
# what has no equivalent of one name
ADVICE = {
    "adapter_name": "`lora_adapter` names a LoRA of the pipeline, `lora_path` one on disk",
    "dataset_type": "leave it out, the file's name says what it holds",
    "ema_start_step": "leave it out; the average (`ema_decay`) starts at once, with a small decay that grows",
    "generation_batch_size": "set `steps_per_generation`, or `rollout_batch_size` for one pipeline call",
    "generation_kwargs": "write arguments of the pipeline's call into `pipeline_kwargs`",
    "global_std": "set `scale_rewards: batch`",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR instead",
    "max_completion_length": "samples are not texts; set `height`, `width` or `num_frames`",
    "max_prompt_length": "set `max_sequence_length` in `pipeline_kwargs` if the pipeline takes it",
    "mixed_precision": "set `bf16: true` or `fp16: true`",
    "only": "run `diffusion-grpo sample`, which makes samples without training",
    "per_prompt_stat_tracking": "that is the default; without it, set `reward_baseline: batch`",
    "ref_model": "leave it out; `beta` above 0 makes a reference of the untrained policy",
    "resolution": "set `height` and `width`",
    "reward.grpo.epsilon": "leave it out; it is fixed at 1e-8, and `epsilon` is the clip range",
    "reward_model_path": "give it to the reward, as in `reward_funcs: [{NAME: {model: PATH}}]` (docs/rewards)",
    "save_safetensors": "leave it out, weights are always saved as safetensors",
    "shift": "set it in `scheduler_kwargs`, as in {shift: 3.0}",
    "timestep_fraction": "set `trained_steps` (Flow-GRPO) or `num_trained_steps` (DanceGRPO), see docs/coming_from",
    "training_strategy": "leave it out; `noisy_steps` says which steps draw noise, those that are trained by default",
    "use_8bit_adam": "set `optim: adamw_8bit`",
    "use_group": "that is the default; without it, set `reward_baseline: batch` and `num_generations: 1`",
    "warmup_ratio": "write it as `warmup_steps`, below 1 a share of all updates",
    "wandb_project": "set the environment variable WANDB_PROJECT instead",
}
ADVICE |= dict.fromkeys(("use_vllm", "use_transformers_paged"), "leave it out, the pipeline makes the samples")
ADVICE |= dict.fromkeys(("revision", "variant"), "write it into `model_init_kwargs`")
ADVICE |= dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), "docs/memory.md lists what to set")
OURS = {theirs: ours for ours, names in EQUIVALENTS.items() for theirs in names.split()} | ALIASES
SECTION = re.compile(r"^((actor_rollout_ref|sample|train|training|rl|ppo|grpo|algorithm|actor|rollout)_)+")
# what flow_grpo and others call rewards
RENAMED_REWARDS = {"ocr": "text", "video_ocr": "text", "qwenvl": "vlm_judge", "image_similarity": "dino_similarity"}
LONGEST = 150  # bytes; a file name has at most 255 and holds more than this name


def check_name(name: Any, what: str, remedy: str) -> None:
    """Refuse a name that cannot be part of a file name and of a metric."""
    is_usable = isinstance(name, str) and name.strip(". ") and name.isprintable() and not {"/", "\\"} & {*name}
    if not is_usable or len(name.encode()) > LONGEST:
        raise ValueError(
            f"{what} {repr(name)[:60]} is used in file names and metrics, so it must be a short text without slashes "
            f"and line breaks; {remedy}."
        )


def apply_trl_names(settings: Any) -> None:
    """Move what a user of TRL sets as `gradient_checkpointing` and `scale_rewards` to our setting and words."""
    if settings.gradient_checkpointing is not None:
        settings.activation_checkpointing = settings.gradient_checkpointing
        settings.gradient_checkpointing = None
    names = {"true": "group", "false": "none"}  # TRL takes both
    vars(settings)["scale_rewards"] = names.get(str(settings.scale_rewards).lower(), settings.scale_rewards)


def suggest(name: object, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def explain_unknown(name: str, known: list[str]) -> str:
    """Return what to write instead of a setting that does not exist; empty if no known one is near."""
    last = name.replace("-", "_").rpartition(".")[2]
    for word in (name, last, SECTION.sub("", last), SECTION.sub("", name.replace(".", "_"))):
        if advice := ADVICE.get("use_vllm" if word.startswith("vllm_") else word):
            return advice
        if OURS.get(word, word) in known:
            return f"use `{OURS.get(word, word)}`"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean `{near[0]}`?" if near else ""


def refuse_unknown(values: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for the first key that is not known, and say what to write instead."""
    for key, value in values.items():
        if key not in known:
            while isinstance(value, dict) and value:  # a section, as in the files of other libraries
                first, value = next(iter(value.items()))
                key = f"{key}.{first}"
            advice = explain_unknown(key, known) or "`diffusion-grpo train --list-settings` lists those that there are"
            raise ValueError(f"unknown setting `{key}`; {advice}{'' if advice.endswith('?') else '.'}")
