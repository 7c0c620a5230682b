"""Every setting does something: turned, it changes what it is for, and leaves alone what it must not touch.

`SETTINGS` has an entry for each field of `DiffusionGRPOConfig` that this library adds, whose default it changes or
that its code reads. Most are turned here, on a tiny pipeline that makes two updates; what one process on a CPU cannot
show names the test that does.
"""

import ast
import dataclasses
import functools
import gc
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import painter
import pytest
import tiny_pipelines
import tiny_runs
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_runs import LORA, PROMPTS, brightness, first_frame_brightness, joined_trajectory, trainer_for
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.algorithms.losses import LossInputs, LossOutput, grpo
from diffusion_grpo.data import call_form
from diffusion_grpo.data.calls import BATCHED, Form
from diffusion_grpo.pipelines import FAMILIES
from diffusion_grpo.rollout import generation
from diffusion_grpo.trainer import RatioError
from diffusion_grpo.training.callbacks import ReportCallback

HERE = Path(__file__).parents[1]
PACKAGE = HERE.parent / "diffusion_grpo"


# What is turned


@dataclasses.dataclass(frozen=True)
class Turned:
    """A setting with another value.

    Attributes:
        value: the other one; `base` has the first, or it is the default.
        changes: what differs then, of the names that `observe` gives.
        stays: what does not.
        base: settings under which the setting has something to do.
    """

    value: Any
    changes: str
    stays: str
    base: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A value that is refused, with a sentence that `match` finds."""

    value: Any
    match: str


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """The test that turns a setting which one process on a CPU does not show, as `file::name` below tests/."""

    test: str


def doubled(inputs: LossInputs) -> LossOutput:
    """A loss of one's own."""
    return multiplied(inputs, factor=2.0)


def multiplied(inputs: LossInputs, factor: float = 1.0) -> LossOutput:
    """One that has a setting."""
    output = grpo(inputs)
    return dataclasses.replace(output, loss=factor * output.loss)


def plainly(rewards, groups, *, weights, batches):
    """Advantages of one's own: rewards as they are."""
    return (rewards * weights).nansum(1)


def redness(images, **columns):
    """Mean red value in [0, 1], at another scale than brightness."""
    return [10 * float(np.asarray(image)[..., 0].mean() / 255) for image in images]


def fading(images, trainer_state, **columns):
    """A reward that falls from update to update."""
    return [value - trainer_state.global_step for value in brightness(images)]


def half(images, prompts, **columns):
    """Brightness, but the same for all samples of every other prompt."""
    values = zip(brightness(images), prompts, strict=True)
    return [0.5 if prompt in PROMPTS[::2] else value for value, prompt in values]


REWARDS = {
    "one": [brightness],
    "two": [brightness, redness],
    "fading": [fading],
    "half": [half],
    "video": [first_frame_brightness],
}
COMMON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "learning_rate": 0.01,
    "max_grad_norm": 0.0,
}
COMMON |= {"watch_rewards": None, "log_samples_steps": None, "num_inference_steps": 3}
AGAIN = {"num_iterations": 2, "epsilon": 1e-5}  # the second update is off-policy, and clipped
WINDOWED = {"trained_steps": [0, 1]}
SLIDING = {"step_selection": "sliding", "step_interval": 2}
BRANCHED = {"trained_steps": [2, 3], "num_inference_steps": 4, "noisy_steps": "trained"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
WATCHED_BEST = {"eval_steps": 1, "metric_for_best_model": "eval_reward"}
FULL = {"lora": False, "learning_rate": 1e-3}
KEPT = FULL | {"beta": 0.1}  # with a reference copy
SYNCED = KEPT | {"sync_ref_model": True, "ref_model_sync_steps": 1}
AVERAGED = {"ema_decay": 0.9, "ema_update_interval": 1}
GAE = {"advantage_estimator": "gae"}
VIDEO = {"name": "wan", "rewards": "video"}
TOKENS = {"name": "painter", "epsilon": 0.2, "per_device_train_batch_size": 4, "num_generations": 4}
PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
DRIFTING = PARTS | {"drift": True, "max_ratio_error": None, "rollout_batch_size": 4}  # the replay is not the rollout
WATCHED = {"validation_prompts": ["a sign"], "validation_steps": 1}
NO_NOISE = "seeds@1 initial_seeds@1"

SETTINGS: dict[str, Turned | Refused | Elsewhere] = {
    # Samples
    "num_generations": Turned(4, "prompts@1 advantages@1", "count@1 passes"),
    "num_generations_eval": Turned(2, "evaluation", "samples@1 weights@2", EVALUATED),
    "num_inference_steps": Turned(4, "steps@1 samples@1 passes", f"prompts@1 {NO_NOISE}"),
    "eval_num_inference_steps": Turned(6, "evaluation passes", "samples@1 steps@1 weights@2", EVALUATED),
    "sigmas": Turned(
        [1.0, 0.6, 0.3],
        "samples@1 path@1 gradient@1",
        f"prompts@1 steps@1 {NO_NOISE} passes",
        {"eval_num_inference_steps": 3},
    ),
    "guidance_scale": Turned(1.0, "samples@1 path@1 passes gradient@1 evaluation", f"prompts@1 {NO_NOISE}", EVALUATED),
    "height": Turned(32, "sizes samples@1 evaluation", f"prompts@1 {NO_NOISE}", EVALUATED),
    "width": Turned(32, "sizes samples@1 evaluation", f"prompts@1 {NO_NOISE}", EVALUATED),
    "num_frames": Turned(9, "frames samples@1", f"prompts@1 {NO_NOISE}", VIDEO),
    "fps": Turned(8.0, "fps", "samples@1 weights@1", VIDEO),
    "pipeline_kwargs": Turned(
        {"max_sequence_length": 32, "negative_prompt": "grey"},
        "samples@1 path@1 gradient@1 evaluation",
        f"prompts@1 {NO_NOISE}",
        EVALUATED,
    ),
    "scheduler_kwargs": Turned({"shift": 9.0}, "samples@1 path@1 evaluation", f"prompts@1 {NO_NOISE}", EVALUATED),
    "rollout_batch_size": Turned(1, "passes", "samples@1 path@1 seeds@1 gradient@1"),
    "samples_per_latent": Turned(2, "initial_seeds@1 samples@1 path@1 passes", "prompts@1 seeds@1 steps@1", BRANCHED),
    "best_of_n": Turned(2, "prompts@1 made@1 samples@1", "count@1", {"num_generations": 4}),
    "offload_trajectories": Turned(True, "kept_on", "samples@1 path@1 weights@2"),
    # Process
    "sde_type": Turned("cps", "samples@1 path@1 gradient@1", f"prompts@1 steps@1 {NO_NOISE}"),
    "noise_level": Turned(0.2, "samples@1 path@1 gradient@1", f"prompts@1 steps@1 {NO_NOISE}"),
    "trained_steps": Turned([1, 2], "steps@1 gradient@1", f"samples@1 {NO_NOISE}"),
    "num_trained_steps": Turned(1, "steps@1 gradient@1", f"samples@1 {NO_NOISE}"),
    "step_selection": Turned(
        "prompt", "steps@1 gradient@1", f"samples@1 {NO_NOISE}", {"num_trained_steps": 1, "num_inference_steps": 6}
    ),
    "step_interval": Turned(
        1, "steps@2 gradient@2", f"steps@1 gradient@1 samples@2 {NO_NOISE}", {"num_trained_steps": 1, **SLIDING}
    ),
    "noisy_steps": Turned("trained", "samples@1", f"steps@1 path@1 {NO_NOISE}", WINDOWED),
    "log_prob_type": Turned("squared_error", "gradient@1", "samples@1 path@1 advantages@1", {"sde_type": "cps"}),
    # Tokens
    "temperature": Turned(0.2, "samples@1 path@1", f"prompts@1 {NO_NOISE}", TOKENS),
    "top_k": Turned(2, "samples@1 path@1", f"prompts@1 {NO_NOISE}", TOKENS),
    "top_p": Turned(0.3, "samples@1 path@1", f"prompts@1 {NO_NOISE}", TOKENS),
    # Optimisation
    "loss_type": Turned(
        f"{__name__}.doubled", "gradient@1", "samples@1 advantages@1", {"trained_steps": "all", "noisy_steps": "all"}
    ),
    "loss_kwargs": Turned(
        {"factor": 2.0}, "gradient@1", "samples@1 advantages@1", {"loss_type": f"{__name__}.multiplied"}
    ),
    "beta": Turned(1.0, "gradient@2 kl@2", "samples@1 advantages@1 gradient@1"),
    "kl_reward": Turned(1e4, "advantages@2 kl/rollout@2", "samples@1 advantages@1 gradient@1"),
    "epsilon": Turned(
        10.0, "gradient@2 clip_ratio/low_mean@2", "gradient@1 weights@1 samples@1", AGAIN | {"epsilon_high": 1e-5}
    ),
    "epsilon_high": Turned(
        10.0, "gradient@2 clip_ratio/high_mean@2", "gradient@1 weights@1 clip_ratio/low_mean@2", AGAIN
    ),
    "importance_sampling_level": Turned(
        "sequence", "gradient@2 passes", "gradient@1 weights@1 samples@1", AGAIN | {"epsilon": 0.1}
    ),
    "num_iterations": Turned(2, "seeds@2 reward@2", "gradient@1 weights@1 samples@1"),
    "steps_per_generation": Turned(4, "made@1 count@1", "logged"),
    "scale_rewards": Turned("batch", "advantages@1 gradient@1", "samples@1 reward@1"),
    "reward_baseline": Turned("batch", "advantages@1 gradient@1", "samples@1 reward@1"),
    "num_batches_per_step": Turned(2, "advantages@1 gradient@1", "samples@1 reward@1", {"scale_rewards": "batch"}),
    "reward_weights": Turned(
        [1.0, -0.1],
        "advantages@1 gradient@1 reward@1 eval_reward@2",
        "samples@1 rewards/redness/mean@1",
        EVALUATED | {"rewards": "two"},
    ),
    "multi_objective_aggregation": Turned(
        "normalize_then_sum", "advantages@1 gradient@1", "samples@1 reward@1", {"rewards": "two"}
    ),
    "advantage_fn": Turned(f"{__name__}.plainly", "advantages@1 gradient@1", "samples@1 reward@1"),
    "advantage_clip": Turned(0.3, "advantages@1 gradient@1 frac_advantage_clipped@1", "samples@1"),
    "reward_threshold": Turned(9.0, "advantages@1 gradient@1", "samples@1 reward@1"),
    "drop_zero_advantages": Turned(True, "gradient@1", "samples@1 advantages@1", {"rewards": "half"}),
    "step_weight": Turned("velocity", "gradient@1", "samples@1 path@1 advantages@1"),
    "old_log_prob": Turned(
        "rollout", "gradient@1 ratio/mean@1", "samples@1 path@1 advantages@1", DRIFTING | {"epsilon": 1e-7}
    ),
    "max_ratio_error": Turned(1e-6, "error", "samples@1", DRIFTING),
    # Value model
    "advantage_estimator": Turned("gae", "advantages@1 gradient@1 values@1 value/loss@1", "samples@1"),
    "value_learning_rate": Turned(0.1, "values@1 advantages@2", "advantages@1 gradient@1 weights@1 samples@1", GAE),
    "value_clip": Turned(
        1e-3,
        "values@2 value/loss@2",
        "values@1 weights@2",
        GAE | {"num_iterations": 2},
    ),
    "gamma": Turned(0.5, "advantages@1 gradient@1", "samples@1 reward@1", GAE),
    "gae_lambda": Turned(0.5, "advantages@1 gradient@1", "samples@1 reward@1", GAE),
    # Reference and average
    "sync_ref_model": Turned(
        True, "reference@2 gradient@2", "gradient@1 samples@1", KEPT | {"ref_model_sync_steps": 1}
    ),
    "ref_model_mixup_alpha": Turned(0.1, "reference@1 reference@2", "gradient@1 weights@1", SYNCED),
    "ref_model_sync_steps": Turned(2, "reference@1", "gradient@1 weights@1", SYNCED),
    "report_to": Elsewhere("training/test_trackers.py::test_tensorboard_has_curves_and_frames"),
    "ds3_gather_for_generation": Elsewhere(
        "distributed/test_deepspeed.py::test_rows_may_differ_in_how_often_they_pass_the_network"
    ),
    "fsdp_gather_for_generation": Elsewhere(
        "distributed/test_fsdp.py::test_whatever_is_set_two_processes_train_what_one_trains"
    ),
    "offload_ref_model": Turned(True, "moved", "gradient@2 weights@2 kl@2", KEPT),
    "ema_decay": Turned(
        0.05, "average@2 evaluation", "weights@2 samples@2", AVERAGED | EVALUATED | {"learning_rate": 0.1}
    ),
    "ema_update_interval": Turned(2, "average@1 average@2", "weights@2 samples@2", AVERAGED),
    # Model, data, log
    "offload_frozen": Elsewhere("training/test_offload.py::test_training_is_the_same_to_the_last_bit"),
    "offload_rewards": Elsewhere(
        "training/test_offload.py::test_rewards_are_off_the_accelerator_while_the_network_works"
    ),
    "decode_batch_size": Elsewhere("training/test_decoding.py::test_runs_and_evaluations_are_the_same"),
    "vae_slicing": Elsewhere("training/test_decoding.py::test_tiles_and_slices_of_a_run_are_used_in_rollouts"),
    "vae_tiling": Elsewhere("training/test_decoding.py::test_tiles_and_slices_of_a_run_are_used_in_rollouts"),
    "group_offload": Elsewhere(
        "training/test_block_swap.py::test_runs_are_the_same_beside_reference_average_and_frozen_parts"
    ),
    "group_offload_blocks": Elsewhere(
        "training/test_block_swap.py::test_experts_that_take_turns_are_swapped_each_by_itself"
    ),
    "group_offload_stream": Elsewhere("training/test_block_swap.py::test_blocks_are_fetched_ahead_in_both_directions"),
    "cache_prompt_embeds": Elsewhere("training/test_prompt_embeds.py::test_a_run_trains_the_same_weights"),
    "prompt_embeds_dir": Elsewhere("training/test_prompt_embeds.py::test_a_later_run_does_not_even_load_the_encoders"),
    "context_parallel_size": Elsewhere(
        "distributed/test_context_parallel.py::test_a_group_trains_what_one_process_trains"
    ),
    "context_parallel_type": Elsewhere(
        "distributed/test_context_parallel.py::test_a_ring_trains_what_one_process_trains"
    ),
    "keep_adapters": Elsewhere("weights/test_lora.py::test_other_adapters_stay_active_and_frozen"),
    "lora_adapter": Elsewhere("weights/test_lora.py::test_an_adapter_of_the_pipeline_is_trained_further"),
    "lora_path": Elsewhere("weights/test_lora.py::test_a_saved_lora_is_trained_further"),
    "train_component": Turned(
        "transformer_2", "trained", "prompts@1", VIDEO | {"name": "wan_experts", "trained_steps": [1, 2]}
    ),
    "model_init_kwargs": Turned({"torch_dtype": "bfloat16"}, "dtype", "prompts@1", {"name": "folder"}),
    "load_in_4bit": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "load_in_8bit": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "bnb_4bit_quant_type": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "use_bnb_nested_quant": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "bnb_4bit_quant_storage": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "quantization": Turned({"transformer": "torchao"}, "samples@1 gradient@1", "prompts@1 passes", {"name": "folder"}),
    "selective_checkpointing": Turned(
        0.5, "block_calls", "gradient@2 weights@2 passes", {"gradient_checkpointing": True}
    ),
    "prompt_column": Elsewhere("data/test_prompts.py::test_the_column_of_prompts_is_chosen"),
    "shuffle_dataset": Turned(False, "prompts@1 samples@1", NO_NOISE),
    "log_completions": Turned(False, "files", "weights@2 samples@2"),
    "num_completions_to_log": Turned(1, "files", "weights@2 evaluation", EVALUATED),
    "log_samples_steps": Turned(1, "files", "weights@2 samples@2"),
    "push_samples": Elsewhere("weights/test_files.py::test_push_to_hub_uploads_the_weights_and_the_card"),
    "save_samples_steps": Turned(2, "files", "weights@2 samples@2"),
    "validation_prompts": Turned(["a sign", "a lamp"], "files passes", "weights@2 samples@2"),
    "validation_steps": Turned(2, "files passes", "weights@2 samples@2", WATCHED),
    "overlap_rewards": Turned(False, "scored_beside", "weights@2 samples@2 reward@1"),
    "watch_rewards": Turned(
        ["sharpness"], "eval_watch/sharpness/mean@2", "weights@2 evaluation eval_reward@2", EVALUATED
    ),
    # TrainingArguments with other defaults
    "learning_rate": Turned(0.02, "weights@1 learning_rate@1", "samples@1 gradient@1"),
    "lr_scheduler_type": Turned("linear", "weights@2 learning_rate@2", "weights@1 gradient@2"),
    "weight_decay": Turned(0.5, "weights@1", "samples@1 gradient@1"),
    "per_device_train_batch_size": Turned(2, "made@1 passes", "logged"),
    "gradient_accumulation_steps": Turned(
        4, "gradient@1 weights@1", "made@1 steps@1", PARTS | {"steps_per_generation": 4}
    ),
    "activation_checkpointing": Turned(
        True,
        "block_calls",
        "gradient@2 weights@2 passes",
        {"gradient_checkpointing": None, "activation_checkpointing": False},
    ),
    "bf16": Turned(True, "precision mixed", f"prompts@1 steps@1 {NO_NOISE}"),
    "logging_steps": Turned(2, "logged", "weights@2"),
    "logging_strategy": Turned("no", "logged", "weights@2"),
    "save_steps": Turned(2, "files", "weights@2", SAVED),
    "ddp_find_unused_parameters": Turned(True, "finds_unused", "weights@2 broadcasts"),
    "ddp_broadcast_buffers": Turned(True, "broadcasts", "weights@2 finds_unused"),
    "dataloader_pin_memory": Turned(True, "pinned", "weights@1 samples@1", {"use_cpu": False}),
    "remove_unused_columns": Refused(True, "must stay False"),
    # TrainingArguments that this library's code reads
    "activation_checkpointing_kwargs": Turned(
        {"use_reentrant": True},
        "block_calls_with_gradient",
        "gradient@1 weights@2",
        FULL | {"gradient_checkpointing": True},
    ),
    "auto_find_batch_size": Elsewhere(
        "training/test_out_of_memory.py::test_the_size_that_fits_is_found_and_trains_what_it_would_have_trained"
    ),
    "torch_empty_cache_steps": Elsewhere("training/test_callbacks.py::test_the_cache_is_emptied_as_often_as_asked"),
    "data_seed": Turned(7, "prompts@1 samples@1", NO_NOISE),
    "ddp_backend": Elsewhere("config/test_settings.py::test_the_backend_for_the_cpu_is_set_before_the_processes_meet"),
    "ddp_timeout": Elsewhere("distributed/test_failure.py::test_silence_is_death_and_any_sign_is_life"),
    "deepspeed": Elsewhere("distributed/test_deepspeed.py::test_a_lora_with_zero3_trains_as_one_process_does"),
    "accelerator_config": Refused({"split_batches": True}, "split_batches=True would redistribute"),
    "eval_strategy": Turned("steps", "evaluation files", "weights@2 samples@2", {"eval_steps": 2}),
    "log_level": Elsewhere("training/test_start.py::test_debug_lines_have_a_mark_of_their_own"),
    "disable_tqdm": Elsewhere("training/test_progress.py::test_a_terminal_shows_a_bar_and_the_lines"),
    "fp16": Refused(True, "needs a GPU"),
    "fsdp": Elsewhere("distributed/test_fsdp.py::test_settings_ask_as_a_launcher_does"),
    "fsdp_config": Elsewhere("distributed/test_sharding.py::test_fsdp_in_the_settings_goes_before_the_launchers"),
    "gradient_checkpointing": Turned(True, "block_calls", "gradient@2 weights@2 passes"),
    "hub_always_push": Elsewhere("weights/test_files.py::test_settings_of_the_hub_reach_it"),
    "hub_model_id": Elsewhere("weights/test_files.py::test_push_to_hub_uploads_the_weights_and_the_card"),
    "hub_revision": Elsewhere("weights/test_files.py::test_settings_of_the_hub_reach_it"),
    "hub_strategy": Elsewhere("weights/test_files.py::test_settings_of_the_hub_reach_it"),
    "hub_token": Elsewhere("weights/test_files.py::test_settings_of_the_hub_reach_it"),
    "ignore_data_skip": Refused(True, "wrong prompts"),
    "greater_is_better": Turned(False, "best", "weights@2", SAVED | EVALUATED | WATCHED_BEST),
    "load_best_model_at_end": Turned(
        True, "weights", "weights@2", SAVED | EVALUATED | {"eval_steps": 1, "rewards": "fading"}
    ),
    "lr_scheduler_kwargs": Turned(
        {"lr_end": 0.005, "power": 1}, "weights@2 learning_rate@2", "weights@1", {"lr_scheduler_type": "polynomial"}
    ),
    "metric_for_best_model": Turned(
        "eval_watch/sharpness/mean",
        "best",
        "weights@2",
        SAVED | EVALUATED | WATCHED_BEST | {"watch_rewards": ["sharpness"]},
    ),
    "optim": Turned("sgd", "weights@1", "samples@1 gradient@1"),
    "output_dir": Elsewhere("training/test_start.py::test_defaults_name_the_output_after_the_model"),
    "per_device_eval_batch_size": Turned(1, "passes", "evaluation weights@2", EVALUATED),
    "push_to_hub": Elsewhere("weights/test_files.py::test_push_to_hub_uploads_the_weights_and_the_card"),
    "resume_from_checkpoint": Elsewhere("training/test_resume.py::test_sigkill_and_resume"),
    "overwrite_output_dir": Elsewhere("training/test_base.py::test_a_run_replaces_the_one_in_its_folder_if_asked_for"),
    "resume_without_optimizer": Elsewhere(
        "run/test_manifest.py::test_state_that_is_not_there_is_refused_unless_asked_for"
    ),
    "save_on_each_node": Elsewhere(
        "distributed/test_processes.py::test_machines_without_a_shared_disk_save_what_each_needs"
    ),
    "save_only_model": Turned(True, "files", "weights@2", SAVED),
    "save_strategy": Turned("steps", "files", "weights@2", {"save_steps": 1}),
    "save_total_limit": Turned(1, "files", "weights@2", SAVED),
    "seed": Turned(5, "prompts@1 seeds@1 initial_seeds@1 samples@1", "steps@1 sizes"),
    "torch_compile": Turned(True, "compiled", "samples@1 weights@2"),
    "torch_compile_backend": Turned("aot_eager", "compiled", "samples@1 weights@2", {"torch_compile": True}),
    "torch_compile_mode": Turned(
        "max-autotune-no-cudagraphs", "compiled", "samples@1 weights@2", {"torch_compile": True}
    ),
    "use_cpu": Turned(True, "pinned", "weights@1 samples@1", {"use_cpu": False, "dataloader_pin_memory": True}),
    # Others of TrainingArguments that recipes are written with
    "eval_on_start": Turned(True, "evaluation files", "weights@2 samples@2", EVALUATED),
    "eval_steps": Turned(1, "evaluation files", "weights@2 samples@2", EVALUATED),
    "max_grad_norm": Turned(1e-9, "gradient@1", "samples@1 loss@1"),
    "max_steps": Turned(1, "logged", "weights@1 samples@1"),
    "num_train_epochs": Turned(2, "logged", "weights@2 samples@2", {"max_steps": -1, "num_train_epochs": 1}),
    "warmup_steps": Turned(2, "weights@1 learning_rate@1", "samples@1 gradient@1"),
}


# What is observed

OF_A_RUN = ("passes", "block_calls", "evaluation", "files", "logged", "scored_beside", "weights", "best", "moved")


class Notes(TrainerCallback):
    """Note what an update is made from and what it leaves, by name and number of the update."""

    def __init__(self, seen: dict[str, Any]):
        self.seen, self.trainer = seen, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = flat(self.trainer.learner.weights.parameters)
        if self.trainer.learner.values is not None:
            self.values = flat(self.trainer.learner.values.parameters())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        buffer, update = self.trainer.feed.buffer, state.global_step + 1
        trajectory = joined_trajectory(self.trainer)
        found = {"prompts": [row["prompt"] for row in buffer.rows], "count": len(buffer.rows)}
        found |= {name: getattr(trajectory, name) for name in ("steps", "seeds", "initial_seeds")}
        found["path"] = trajectory.ids if hasattr(trajectory, "ids") else trajectory.latents
        found["advantages"] = buffer.advantages
        parameters = self.trainer.learner.weights.parameters
        found["gradient"] = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        self.seen.update({f"{name}@{update}": value for name, value in found.items()})

    def on_step_end(self, args, state, control, **kwargs):
        trainer, update = self.trainer, state.global_step
        found = {"weights": flat(trainer.learner.weights.parameters) - self.start}
        if trainer.learner.average is not None:
            found["average"] = flat(trainer.learner.average.average.shadow_params) - self.start
        if trainer.learner.reference is not None and trainer.learner.reference.module is not None:
            found["reference"] = flat(trainer.learner.reference.module.parameters()) - self.start
        if trainer.learner.values is not None:
            found["values"] = flat(trainer.learner.values.parameters()) - self.values
        self.seen.update({f"{name}@{update}": value for name, value in found.items()})


def flat(tensors) -> Tensor:
    """Join tensors into one."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def observe(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train the tiny pipeline and say what was seen.

    Returns:
        by name. Of each update, with its number as in `gradient@1`: what it trains on (prompts, count, steps, seeds,
        initial_seeds, path, which are the recorded latents or tokens, advantages), its gradient, the samples of the
        rollout before it and how many were made, what was logged; and what it leaves: weights, and where there are
        some average, reference and values. There is an entry for each further thing that a setting is for.
    """
    settings = COMMON | settings
    seen: dict[str, Any] = {"scored_beside": [], "passes": [], "moved": 0, "kept_on": set(), "precision": set()}
    notes = Notes(seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda module, **kwargs: seen.setdefault("compiled", kwargs))
        patch.setattr(gc, "collect", lambda *args: 0)  # accelerate's, which takes as long as an update
        spy_on_rollouts(patch, seen)
        # Known; the trainer would find it out by two more rollouts.
        patch.setattr(call_form, "find_form", lambda *args, **kwargs: Form(BATCHED))
        drift = settings.pop("drift", False)
        rewards = [noted(reward, seen) for reward in REWARDS[settings.pop("rewards", "one")]]
        trainer = build(folder, rewards, settings, patch)
        notes.trainer = trainer
        trainer.add_callback(notes)
        trainer.pop_callback(ReportCallback)  # which takes longer than an update
        watch_networks(trainer, seen, drift)
        try:
            trainer.train()
        except RatioError as error:
            seen["error"] = type(error).__name__
    gather(trainer, folder, seen, notes.start)
    return seen


def build(folder: Path, rewards: list[Callable], settings: dict[str, Any], patch) -> DiffusionGRPOTrainer:
    """Build the trainer of a tiny pipeline: by name, of tokens, or loaded from a folder."""
    name = settings.pop("name", "sd3")
    if "seed" in settings:  # that of `trainer_for` is the pipeline's
        patch.setitem(tiny_runs.SETTINGS, "seed", settings.pop("seed"))
    if name == "painter":
        patch.setitem(FAMILIES, "Painter", painter.PainterFamily())
        return painter.trainer_of(painter.make_painter(), folder, rewards=rewards, **settings)
    if name != "folder":
        return trainer_for(folder, name=name, rewards=rewards, **settings)
    pipe, arguments = tiny_pipelines.build("sd3")
    pipe.save_pretrained(folder / "pipeline")
    sizes = {name: arguments[name] for name in ("height", "width")}
    args = DiffusionGRPOConfig(str(folder / "run"), **tiny_runs.SETTINGS | settings | sizes)
    rows, lora = Dataset.from_dict({"prompt": PROMPTS}), LoraConfig(**LORA)
    return DiffusionGRPOTrainer(str(folder / "pipeline"), rewards, args, rows, peft_config=lora)


def noted(reward: Callable, seen: dict[str, Any]) -> Callable:
    """Return the reward, which now notes what it is called with."""

    @functools.wraps(reward)
    def function(completions, prompts, trainer_state, fps=None, images=None, videos=None, **columns):
        is_held_out = prompts[0] not in PROMPTS + painter.INPUTS["prompt"]
        key = "evaluation" if is_held_out else f"samples@{trainer_state.global_step + 1}"
        frames = [sample if isinstance(sample, list) else [sample] for sample in completions]
        if reward in (brightness, first_frame_brightness, fading, half):  # the first of several
            seen.setdefault(key, []).extend(np.stack([np.asarray(frame) for frame in sample]) for sample in frames)
        if not is_held_out:
            seen["scored_beside"].append(threading.current_thread() is not threading.main_thread())
        seen["fps"] = fps
        return reward(completions, prompts=prompts, trainer_state=trainer_state, **columns)

    return function


def spy_on_rollouts(patch, seen: dict[str, Any]) -> None:
    """Note where trajectories are kept: what is set to go to the CPU goes there by that name."""
    original = generation.rollout

    def spied(*args, device, **kwargs):
        seen["kept_on"].add(type(device).__name__)
        return original(*args, device=device, **kwargs)

    patch.setattr(generation, "rollout", spied)


def watch_networks(trainer: DiffusionGRPOTrainer, seen: dict[str, Any], drift: bool) -> None:
    """Note each call of the trained network and of its blocks; `drift` makes outputs depend on the batch size."""
    network = trainer.policy.networks[0]
    calls = seen["block_calls"], seen["block_calls_with_gradient"] = [], []

    def note(module, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        seen["passes"].append(len(tensors[0]))

    def count(module, args):
        calls[0].append(1)
        calls[1].append(torch.is_grad_enabled())

    network.register_forward_pre_hook(note, with_kwargs=True)
    linear = next(module for module in network.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, args, output: seen["precision"].add(str(output.dtype)))
    for block in getattr(network, "transformer_blocks", []):
        block.register_forward_pre_hook(count)
        if drift:
            block.ff.register_forward_hook(lambda module, args, output: output * (1 + 0.01 * len(output)))
    reference = getattr(trainer.learner.reference, "module", None)
    if reference is not None:
        to = reference.to

        def moving(*args, **kwargs):
            seen["moved"] += 1
            return to(*args, **kwargs)

        reference.to = moving


def gather(trainer: DiffusionGRPOTrainer, folder: Path, seen: dict[str, Any], start: Tensor) -> None:
    """Note what is seen when a run has ended."""
    for name in [name for name in seen if name.startswith("samples@")]:
        seen[name.replace("samples", "made")] = len(seen[name])
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if not re.search("time|memory|per_second|step$|epoch$|flos", name):
                seen[f"{name}@{entry['step']}"] = value
    seen["logged"] = sum("loss" in entry for entry in trainer.state.log_history)
    made = next(value for name, value in seen.items() if name.startswith("samples@"))
    seen["sizes"], seen["frames"] = [sample.shape[1:3] for sample in made], [len(sample) for sample in made]
    parameters = trainer.learner.weights.parameters
    seen["weights"] = flat(parameters) - start
    seen["trained"] = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    seen["dtype"] = str(next(trainer.pipe.vae.parameters()).dtype) if hasattr(trainer.pipe, "vae") else None
    seen["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    seen["best"] = trainer.state.best_metric
    seen["pinned"] = trainer.get_train_dataloader().pin_memory
    seen["mixed"] = trainer.accelerator.mixed_precision
    handler = trainer.accelerator.ddp_handler
    seen["finds_unused"], seen["broadcasts"] = handler.find_unused_parameters, handler.broadcast_buffers


def is_same(one: Any, other: Any) -> bool:
    """Compare two observations, up to rounding."""
    if isinstance(one, list) and one and isinstance(one[0], np.ndarray):
        shapes = [sample.shape for sample in one], [sample.shape for sample in other]
        return shapes[0] == shapes[1] and all(
            np.abs(a.astype(int) - b.astype(int)).max() <= 1 for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list) and one and isinstance(one[0], float):
        return one == pytest.approx(other, rel=1e-3, abs=1e-7)
    if not torch.is_tensor(one):
        return one == other
    if one.shape != other.shape:
        return False
    difference = (one.double() - other.double()).norm()
    return bool(difference <= 1e-3 * max(one.double().norm(), other.double().norm()))


# The tests


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """What is seen with some settings; those that several tests begin with are run once."""

    @functools.cache
    def run(settings: str) -> dict[str, Any]:
        return observe(tmp_path_factory.mktemp("run"), json.loads(settings))

    return lambda settings: run(json.dumps(settings, sort_keys=True))


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, Turned)])
def test_a_setting_changes_what_it_is_for_and_nothing_else(observed, name):
    entry = SETTINGS[name]
    is_brief = not any(key.endswith("@2") or key in OF_A_RUN for key in (entry.changes + " " + entry.stays).split())
    turned = entry.base | ({"max_steps": 1} if is_brief else {}) | {name: entry.value}
    before, after = observed(entry.base), observed(turned)
    for key in entry.changes.split():
        assert key in before or key in after
        assert key not in before or key not in after or not is_same(before[key], after[key]), f"{key} is as before"
    for key in entry.stays.split():
        assert is_same(before[key], after[key]), f"{key} differs"


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, Refused)])
def test_a_setting_that_cannot_be_used_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=SETTINGS[name].match):
        trainer_for(tmp_path, **{name: SETTINGS[name].value})


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, Elsewhere)])
def test_the_test_that_turns_a_setting_elsewhere_is_there(name):
    file, _, test = SETTINGS[name].test.partition("::")
    tests = {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert test in tests
    others = [path for path in HERE.rglob("*.py") if path.name != Path(__file__).name]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in others)


def test_every_setting_has_an_entry():
    """A new field needs a line in the table above."""
    inherited = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    fields = {field.name: field.default for field in dataclasses.fields(DiffusionGRPOConfig) if field.init}
    own = {name for name, default in fields.items() if name not in inherited or default != inherited[name]}
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    config = "".join(path.read_text() for path in (PACKAGE / "config").glob("*.py"))
    read = set(re.findall(r"\bargs\.(\w+)", code)) | set(re.findall(r"\bself\.(\w+)", config))
    assert (own | read & set(inherited)) - set(SETTINGS) == set()
    assert set(SETTINGS) - set(fields) == set()


def test_a_run_is_seen_alike_twice(observed, tmp_path):
    """Or what differs with a setting could differ without it."""
    before, again = observed({}), observe(tmp_path, {})
    assert before.keys() == again.keys()
    assert [key for key in before if not is_same(before[key], again[key])] == []


def test_denominators_of_several_updates_are_replayed_before_the_first(observed):
    """The network drifts with the size of its batch, which is another one in the rollout."""
    several = DRIFTING | {"steps_per_generation": 4, "epsilon": 1e-7}
    rolled_out, replayed = observed(several), observed(several | {"old_log_prob": "replay"})
    assert is_same(rolled_out["samples@1"], replayed["samples@1"])
    assert abs(rolled_out["ratio/mean@1"] - 1) > 1e-6 and replayed["ratio/mean@1"] == 1.0
    assert rolled_out["clip_ratio/region_mean@1"] > 0 == replayed["clip_ratio/region_mean@1"]
    assert replayed["ratio/mean@2"] != 1.0  # off-policy, by what the first update did
    for update in (1, 2):
        assert not is_same(rolled_out[f"gradient@{update}"], replayed[f"gradient@{update}"])


def test_evaluation_takes_its_own_arguments_of_the_pipeline(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, **COMMON | {"guidance_scale": 4.5})
    plain = trainer.evaluate(metric_key_prefix="plain")["plain_reward"]
    same = trainer.evaluate(metric_key_prefix="same", pipeline_kwargs={"guidance_scale": 4.5})["same_reward"]
    other = trainer.evaluate(metric_key_prefix="other", pipeline_kwargs={"guidance_scale": 1.0})["other_reward"]
    assert plain == same and abs(other - plain) > 1e-4
