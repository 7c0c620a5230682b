"""Every setting does something: turned, it changes what it is for.

`SETTINGS` has an entry for each setting that this library adds. Most are turned here, on a tiny pipeline that makes
one update or two; what one process on a CPU cannot show names the test that does.
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
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.algorithms.losses import LossInputs, LossOutput, grpo
from diffusion_grpo.config.fields import list_fields, own_fields, script_fields
from diffusion_grpo.data import call_form
from diffusion_grpo.data.calls import BATCHED, Form
from diffusion_grpo.pipelines import FAMILIES
from diffusion_grpo.rollout import generate
from diffusion_grpo.trainer import RatioError
from diffusion_grpo.training.callbacks import ReportCallback

HERE = Path(__file__).parents[1]


# What is turned


@dataclasses.dataclass(frozen=True)
class Turned:
    """A setting with another value.

    Attributes:
        value: the other one; `base` has the first, or it is the default.
        changes: what differs then, of the names that `observe` gives. If all of them are `HARMLESS`, the weights after
            an update do not.
        base: settings under which the setting has something to do.
    """

    value: Any
    changes: str
    base: dict[str, Any] = dataclasses.field(default_factory=dict)


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

SETTINGS: dict[str, Turned | Elsewhere] = {
    # Samples
    "num_generations": Turned(4, "prompts@1 advantages@1"),
    "num_generations_eval": Turned(2, "evaluation", EVALUATED),
    "num_inference_steps": Turned(4, "steps@1 samples@1 passes"),
    "eval_num_inference_steps": Turned(6, "evaluation passes", EVALUATED),
    "eval_pipeline_kwargs": Turned({"height": 32}, "evaluation", EVALUATED),
    "sigmas": Turned([1.0, 0.6, 0.3], "samples@1 path@1 gradient@1", {"eval_num_inference_steps": 3}),
    "guidance_scale": Turned(1.0, "samples@1 path@1 passes gradient@1 evaluation", EVALUATED),
    "height": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "width": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "num_frames": Turned(9, "frames samples@1", VIDEO),
    "fps": Turned(8.0, "fps", VIDEO),
    "pipeline_kwargs": Turned(
        {"max_sequence_length": 32, "negative_prompt": "grey"}, "samples@1 path@1 gradient@1 evaluation", EVALUATED
    ),
    "scheduler_kwargs": Turned({"shift": 9.0}, "samples@1 path@1 evaluation", EVALUATED),
    "rollout_batch_size": Turned(1, "passes"),
    "samples_per_latent": Turned(2, "initial_seeds@1 samples@1 path@1 passes", BRANCHED),
    "best_of_n": Turned(2, "prompts@1 made@1 samples@1", {"num_generations": 4}),
    "offload_trajectories": Turned(True, "kept_on"),
    # Process
    "sde_type": Turned("cps", "samples@1 path@1 gradient@1"),
    "noise_level": Turned(0.2, "samples@1 path@1 gradient@1"),
    "trained_steps": Turned([1, 2], "steps@1 gradient@1"),
    "num_trained_steps": Turned(1, "steps@1 gradient@1"),
    "step_selection": Turned("prompt", "steps@1 gradient@1", {"num_trained_steps": 1, "num_inference_steps": 6}),
    "step_interval": Turned(1, "steps@2 gradient@2", {"num_trained_steps": 1, **SLIDING}),
    "noisy_steps": Turned("trained", "samples@1", WINDOWED),
    "log_prob_type": Turned("squared_error", "gradient@1", {"sde_type": "cps"}),
    # Tokens
    "temperature": Turned(0.2, "samples@1 path@1", TOKENS),
    "top_k": Turned(2, "samples@1 path@1", TOKENS),
    "top_p": Turned(0.3, "samples@1 path@1", TOKENS),
    # Optimisation
    "loss_type": Turned(f"{__name__}.doubled", "gradient@1", {"trained_steps": "all", "noisy_steps": "all"}),
    "loss_kwargs": Turned({"factor": 2.0}, "gradient@1", {"loss_type": f"{__name__}.multiplied"}),
    "target_change": Turned(0.1, "weights@1 learning_rate@1 passes"),
    "beta": Turned(1.0, "gradient@2 kl@2"),
    "kl_reward": Turned(10000.0, "advantages@2 kl/rollout@2"),
    "epsilon": Turned(10.0, "gradient@2 clip_ratio/low_mean@2", AGAIN | {"epsilon_high": 1e-05}),
    "epsilon_high": Turned(10.0, "gradient@2 clip_ratio/high_mean@2", AGAIN),
    "importance_sampling_level": Turned("sequence", "gradient@2 passes", AGAIN | {"epsilon": 0.1}),
    "num_iterations": Turned(2, "seeds@2 reward@2"),
    "steps_per_generation": Turned(4, "made@1 count@1"),
    "scale_rewards": Turned("batch", "advantages@1 gradient@1"),
    "reward_baseline": Turned("batch", "advantages@1 gradient@1"),
    "num_batches_per_step": Turned(2, "advantages@1 gradient@1", {"scale_rewards": "batch"}),
    "reward_weights": Turned(
        [1.0, -0.1], "advantages@1 gradient@1 reward@1 eval_reward@2", EVALUATED | {"rewards": "two"}
    ),
    "multi_objective_aggregation": Turned("normalize_then_sum", "advantages@1 gradient@1", {"rewards": "two"}),
    "advantage_fn": Turned(f"{__name__}.plainly", "advantages@1 gradient@1"),
    "advantage_clip": Turned(0.3, "advantages@1 gradient@1 frac_advantage_clipped@1"),
    "reward_threshold": Turned(9.0, "advantages@1 gradient@1"),
    "drop_zero_advantages": Turned(True, "gradient@1", {"rewards": "half"}),
    "step_weight": Turned("velocity", "gradient@1"),
    "old_log_prob": Turned("rollout", "gradient@1 ratio/mean@1", DRIFTING | {"epsilon": 1e-07}),
    "max_ratio_error": Turned(1e-06, "error", DRIFTING),
    # Value model
    "advantage_estimator": Turned("gae", "advantages@1 gradient@1 values@1 value/loss@1"),
    "value_learning_rate": Turned(0.1, "values@1 advantages@2", GAE),
    "value_clip": Turned(0.001, "values@2 value/loss@2", GAE | {"num_iterations": 2}),
    "gamma": Turned(0.5, "advantages@1 gradient@1", GAE),
    "gae_lambda": Turned(0.5, "advantages@1 gradient@1", GAE),
    # Reference and average
    "sync_ref_model": Turned(True, "reference@2 gradient@2", KEPT | {"ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": Turned(0.1, "reference@1 reference@2", SYNCED),
    "ref_model_sync_steps": Turned(2, "reference@1", SYNCED),
    "report_to": Elsewhere("training/test_trackers.py::test_tensorboard_has_curves_and_frames"),
    "ds3_gather_for_generation": Elsewhere(
        "distributed/test_deepspeed.py::test_rows_may_differ_in_how_often_they_pass_the_network"
    ),
    "fsdp_gather_for_generation": Elsewhere(
        "distributed/test_fsdp.py::test_whatever_is_set_two_processes_train_what_one_trains"
    ),
    "offload_ref_model": Turned(True, "moved", KEPT),
    "ema_decay": Turned(0.05, "average@2 evaluation", AVERAGED | EVALUATED | {"learning_rate": 0.1}),
    "ema_update_interval": Turned(2, "average@1 average@2", AVERAGED),
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
    "train_component": Turned("transformer_2", "trained", VIDEO | {"name": "wan_experts", "trained_steps": [1, 2]}),
    "model_init_kwargs": Turned({"torch_dtype": "bfloat16"}, "dtype", {"name": "folder"}),
    "load_in_4bit": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "load_in_8bit": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "bnb_4bit_quant_type": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "use_bnb_nested_quant": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "bnb_4bit_quant_storage": Elsewhere("weights/test_quantization.py::test_the_short_form"),
    "quantization": Turned({"transformer": "torchao"}, "samples@1 gradient@1", {"name": "folder"}),
    "selective_checkpointing": Turned(0.5, "block_calls", {"gradient_checkpointing": True}),
    "prompt_column": Elsewhere("data/test_prompts.py::test_the_column_of_prompts_is_chosen"),
    "shuffle_dataset": Turned(False, "prompts@1 samples@1"),
    "log_completions": Turned(False, "files"),
    "num_completions_to_log": Turned(1, "files", EVALUATED),
    "log_samples_steps": Turned(1, "files"),
    "push_samples": Elsewhere("weights/test_files.py::test_push_to_hub_uploads_the_weights_and_the_card"),
    "save_samples_steps": Turned(2, "files"),
    "validation_prompts": Turned(["a sign", "a lamp"], "files passes"),
    "validation_steps": Turned(2, "files passes", WATCHED),
    "overlap_rewards": Turned(False, "scored_beside"),
    "watch_rewards": Turned(["sharpness"], "eval_watch/sharpness/mean@2", EVALUATED),
    "overwrite_output_dir": Elsewhere("training/test_base.py::test_a_run_replaces_the_one_in_its_folder_if_asked_for"),
    "resume_without_optimizer": Elsewhere(
        "training/test_damage.py::test_state_that_is_not_there_is_refused_unless_asked_for"
    ),
    # TrainingArguments that this library treats in its own way
    "per_device_train_batch_size": Turned(2, "made@1 passes"),
    "gradient_accumulation_steps": Turned(4, "gradient@1 weights@1", PARTS | {"steps_per_generation": 4}),
    "activation_checkpointing": Turned(
        True, "block_calls", {"gradient_checkpointing": None, "activation_checkpointing": False}
    ),
    "bf16": Turned(True, "precision mixed"),
    "activation_checkpointing_kwargs": Turned(
        {"use_reentrant": True}, "block_calls_with_gradient", FULL | {"gradient_checkpointing": True}
    ),
    "auto_find_batch_size": Elsewhere(
        "training/test_out_of_memory.py::test_the_size_that_fits_is_found_and_trains_what_it_would_have_trained"
    ),
    "data_seed": Turned(7, "prompts@1 samples@1"),
    "load_best_model_at_end": Turned(True, "weights", SAVED | EVALUATED | {"eval_steps": 1, "rewards": "fading"}),
    "metric_for_best_model": Turned(
        "eval_watch/sharpness/mean", "best", SAVED | EVALUATED | WATCHED_BEST | {"watch_rewards": ["sharpness"]}
    ),
    "optim": Turned("sgd", "weights@1"),
    "per_device_eval_batch_size": Turned(1, "passes", EVALUATED),
    "save_on_each_node": Elsewhere(
        "distributed/test_processes.py::test_machines_without_a_shared_disk_save_what_each_needs"
    ),
    "save_only_model": Turned(True, "files", SAVED),
    "seed": Turned(5, "prompts@1 seeds@1 initial_seeds@1 samples@1"),
    "torch_compile": Turned(True, "compiled"),
    "eval_on_start": Turned(True, "evaluation files", EVALUATED),
    "eval_steps": Turned(1, "evaluation files", EVALUATED),
    "max_grad_norm": Turned(1e-09, "gradient@1"),
}


# What is observed

HARMLESS = {
    "passes",
    "block_calls",
    "block_calls_with_gradient",
    "evaluation",
    "files",
    "scored_beside",
    "best",
    "moved",
}
HARMLESS |= {"kept_on", "compiled", "fps"}


class Notes(TrainerCallback):
    """Note what an update is made from and what it leaves, by name and number of the update."""

    def __init__(self, seen: dict[str, Any]):
        self.seen, self.trainer = seen, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = flat(self.trainer.learner.weights.parameters)
        if self.trainer.learner.values is not None:
            self.values = flat(self.trainer.learner.values.parameters())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        buffer, update = self.trainer.loader.buffer, state.global_step + 1
        trajectory = joined_trajectory(self.trainer)
        found = {"prompts": [row["prompt"] for row in buffer.rows], "count": len(buffer.rows)}
        found |= {name: getattr(trajectory, name) for name in ("steps", "seeds", "initial_seeds")}
        found["path"] = trajectory.ids if hasattr(trajectory, "ids") else trajectory.latents
        found["advantages"] = buffer.advantages.values
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
    original = generate.rollout

    def spied(*args, device, **kwargs):
        seen["kept_on"].add(type(device).__name__)
        return original(*args, device=device, **kwargs)

    patch.setattr(generate, "rollout", spied)


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
def test_a_setting_changes_what_it_is_for(observed, name):
    entry = SETTINGS[name]
    is_brief = all(key.endswith("@1") for key in entry.changes.split())
    before = observed(entry.base)
    after = observed(entry.base | ({"max_steps": 1} if is_brief else {}) | {name: entry.value})
    for key in entry.changes.split():
        assert key in before or key in after
        assert key not in before or key not in after or not is_same(before[key], after[key]), f"{key} is as before"
    if HARMLESS.issuperset(entry.changes.split()):
        assert is_same(before["weights@1"], after["weights@1"])


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, Elsewhere)])
def test_the_test_that_turns_a_setting_elsewhere_is_there(name):
    file, _, test = SETTINGS[name].test.partition("::")
    tests = {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert test in tests
    others = [path for path in HERE.rglob("*.py") if path.name != Path(__file__).name]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in others)


def test_every_setting_has_an_entry():
    """A new field needs a line in the table above."""
    assert own_fields().keys() - script_fields().keys() <= SETTINGS.keys() <= list_fields(DiffusionGRPOConfig).keys()


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
