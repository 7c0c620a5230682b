"""Every setting does something: turned, it changes what it is for.

`SETTINGS` has an entry for each setting that this library adds. Those that no other test shows to act are turned here,
on a tiny pipeline that makes one update or two; for the others it names the test, as `file::name` below tests/.
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
import pytest
import tiny_runs
import torch
from tiny_runs import PROMPTS, brightness, first_frame_brightness, joined_trajectory, trainer_for
from torch import Tensor, nn
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.config.fields import list_fields, own_fields, script_fields
from diffusion_grpo.data import call_form
from diffusion_grpo.data.calls import BATCHED, Form
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

    @property
    def is_harmless(self) -> bool:
        """Whether the weights stay as they are."""
        return HARMLESS.issuperset(self.changes.split())


REWARDS = {"one": brightness, "video": first_frame_brightness}
COMMON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "learning_rate": 0.01,
    "max_grad_norm": 0.0,
}
COMMON |= {"watch_rewards": None, "log_samples_steps": None, "num_inference_steps": 3}
AGAIN = {"num_iterations": 2, "epsilon": 1e-5, "epsilon_high": 1e-5}  # the second update is off-policy, and clipped
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SLIDING = {"step_selection": "sliding", "num_trained_steps": 1, "step_interval": 2}
FULL = {"lora": False, "learning_rate": 1e-3}
VIDEO = {"name": "wan", "rewards": "video"}
PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# the network drifts with the size of its batch, which is another one in the rollout
DRIFTING = PARTS | {"drift": True, "max_ratio_error": None, "rollout_batch_size": 4, "epsilon": 1e-7}
DRIFTING |= {"steps_per_generation": 4}

ADVANTAGES = "rollout/test_estimator.py::test_clip_threshold_and_missing_rewards_of_a_value_model"
AVERAGE = "training/test_average.py::test_the_average_moves_every_n_updates_and_warms_up_by_updates"
BATCHES = "test_trainer.py::test_several_batches_per_step_reach_the_advantages"
DECODING = "training/test_decoding.py::test_tiles_and_slices_of_a_run_are_used_in_rollouts"
EVALUATION = "test_trainer.py::test_evaluation_before_and_during_training"
FUNCTION = "rollout/test_estimator.py::test_the_best_are_chosen_by_the_function_and_trained_with_its_advantages"
GAE = "rollout/test_estimator.py::test_advantages_of_each_step"
OFFLOADED_REWARDS = "training/test_offload.py::test_rewards_are_off_the_accelerator_while_the_network_works"
OWN_ALGORITHM = "config/test_recording.py::test_an_algorithm_of_ones_own_trains"
QUANTIZED = "weights/test_quantization.py::test_the_short_form"
REFERENCE = "training/test_average.py::test_a_synchronised_reference_moves_towards_the_policy_every_n_updates"
SAMPLES = "report/test_outputs.py::test_some_samples_are_kept_and_shown_without_an_evaluation"
SHARE = "training/test_model.py::test_checkpointing_of_a_share_of_the_blocks"
SIGMAS = "data/test_inputs.py::test_sigmas_space_the_steps_of_training_and_not_of_evaluation"
TOKENS = "policy/test_token.py::test_settings_reach_the_drawing"
VALIDATION = "training/test_callbacks.py::test_validation_prompts_are_sampled_and_never_scored"

SETTINGS: dict[str, Turned | str] = {
    # Samples
    "num_generations": Turned(4, "prompts@1 advantages@1"),
    "num_generations_eval": EVALUATION,
    "num_inference_steps": Turned(4, "steps@1 samples@1"),
    "eval_num_inference_steps": SIGMAS,
    "eval_pipeline_kwargs": Turned({"height": 32}, "evaluation", EVALUATED),
    "sigmas": SIGMAS,
    "guidance_scale": Turned(1.0, "samples@1 path@1 passes gradient@1 evaluation", EVALUATED),
    "height": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "width": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "num_frames": Turned(9, "frames samples@1", VIDEO),
    "fps": Turned(8.0, "fps", VIDEO),
    "pipeline_kwargs": Turned(
        {"max_sequence_length": 32, "negative_prompt": "grey"}, "samples@1 path@1 gradient@1 evaluation", EVALUATED
    ),
    "scheduler_kwargs": "training/test_model.py::test_scheduler_kwargs_move_the_sigmas_and_stay_with_the_pipeline",
    "rollout_batch_size": Turned(1, "passes"),
    "decode_batch_size": "training/test_decoding.py::test_runs_and_evaluations_are_the_same",
    "vae_slicing": DECODING,
    "vae_tiling": DECODING,
    "samples_per_latent": Turned("group", "initial_seeds@1 samples@1"),
    "best_of_n": FUNCTION,
    "offload_trajectories": Turned(True, "kept_on"),
    # Process
    "sde_type": Turned("cps", "samples@1 path@1 gradient@1"),
    "noise_level": Turned(0.2, "samples@1 path@1 gradient@1"),
    "trained_steps": Turned([1, 2], "steps@1 gradient@1"),
    "num_trained_steps": Turned(1, "steps@1 gradient@1"),
    "step_selection": "rollout/test_steps.py::test_each_sample_draws_steps_of_its_own",
    "step_interval": Turned(1, "steps@2 gradient@2", SLIDING),
    "noisy_steps": "algorithms/test_conversions.py::test_the_setting_reaches_the_rollout",
    "log_prob_type": "algorithms/test_conversions.py::test_the_setting_reaches_the_ratio",
    # Tokens
    "temperature": TOKENS,
    "top_k": TOKENS,
    "top_p": TOKENS,
    # Optimisation
    "loss_type": OWN_ALGORITHM,
    "loss_kwargs": OWN_ALGORITHM,
    "target_change": "training/test_step_size.py::test_runs_reach_the_target",
    "beta": "test_trainer.py::test_kl_has_a_gradient_and_vanishes_on_the_reference",
    "kl_reward": "test_trainer.py::test_a_divergence_in_the_reward",
    "epsilon": Turned(10.0, "gradient@2 clip_ratio/low_mean@2", AGAIN),
    "epsilon_high": Turned(10.0, "gradient@2 clip_ratio/high_mean@2", AGAIN),
    "importance_sampling_level": "test_trainer.py::test_ratios_of_whole_trajectories",
    "num_iterations": "test_trainer.py::test_a_rollout_used_again_is_off_policy_and_the_clip_acts",
    "steps_per_generation": "test_trainer.py::test_several_updates_per_rollout",
    "scale_rewards": BATCHES,
    "reward_baseline": "rollout/test_estimator.py::test_the_baseline_of_the_batch",
    "num_batches_per_step": BATCHES,
    "reward_weights": "training/test_evaluation.py::test_what_one_reward_leaves_out_counts_as_its_mean",
    "multi_objective_aggregation": "test_trainer.py::test_the_order_of_aggregation_reaches_the_advantages",
    "advantage_fn": FUNCTION,
    "advantage_clip": ADVANTAGES,
    "reward_threshold": ADVANTAGES,
    "drop_zero_advantages": (
        "algorithms/test_conversions.py::test_dropping_a_group_of_equals_doubles_what_the_other_says"
    ),
    "step_weight": Turned("velocity", "gradient@1"),
    "old_log_prob": Turned("replay", "gradient@1 gradient@2 ratio/mean@1", DRIFTING),
    "max_ratio_error": Turned(1e-06, "error", DRIFTING),
    # Value model
    "advantage_estimator": "rollout/test_value_model.py::test_training_with_a_value_model",
    "value_learning_rate": "rollout/test_value_model.py::test_the_learning_rate_of_the_value_model_is_its_own",
    "value_clip": Turned(0.001, "value/loss@2", {"advantage_estimator": "gae", "num_iterations": 2}),
    "gamma": GAE,
    "gae_lambda": GAE,
    # Reference and average
    "sync_ref_model": REFERENCE,
    "ref_model_mixup_alpha": REFERENCE,
    "ref_model_sync_steps": REFERENCE,
    "report_to": "training/test_trackers.py::test_tensorboard_has_curves_and_frames",
    "ds3_gather_for_generation": (
        "distributed/test_deepspeed.py::test_rows_may_differ_in_how_often_they_pass_the_network"
    ),
    "fsdp_gather_for_generation": (
        "distributed/test_fsdp.py::test_whatever_is_set_two_processes_train_what_one_trains"
    ),
    "offload_ref_model": Turned(True, "moved", FULL | {"beta": 0.1}),
    "ema_decay": AVERAGE,
    "ema_update_interval": AVERAGE,
    # Model, data, log
    "offload_frozen": "training/test_offload.py::test_training_is_the_same_to_the_last_bit",
    "offload_rewards": OFFLOADED_REWARDS,
    "group_offload": "training/test_block_swap.py::test_runs_are_the_same_beside_reference_average_and_frozen_parts",
    "group_offload_blocks": "training/test_block_swap.py::test_experts_that_take_turns_are_swapped_each_by_itself",
    "group_offload_stream": "training/test_block_swap.py::test_blocks_are_fetched_ahead_in_both_directions",
    "cache_prompt_embeds": "training/test_prompt_embeds.py::test_a_run_trains_the_same_weights",
    "prompt_embeds_dir": "training/test_prompt_embeds.py::test_a_later_run_does_not_even_load_the_encoders",
    "context_parallel_size": "distributed/test_context_parallel.py::test_a_group_trains_what_one_process_trains",
    "context_parallel_type": "distributed/test_context_parallel.py::test_a_ring_trains_what_one_process_trains",
    "keep_adapters": "weights/test_lora.py::test_other_adapters_stay_active_and_frozen",
    "lora_adapter": "weights/test_lora.py::test_an_adapter_of_the_pipeline_is_trained_further",
    "lora_path": "weights/test_lora.py::test_a_saved_lora_is_trained_further",
    "train_component": Turned("transformer_2", "trained", VIDEO | {"name": "wan_experts", "trained_steps": [1, 2]}),
    "model_init_kwargs": "training/test_model.py::test_the_dtype_in_which_a_pipeline_is_loaded",
    "load_in_4bit": QUANTIZED,
    "load_in_8bit": QUANTIZED,
    "bnb_4bit_quant_type": QUANTIZED,
    "use_bnb_nested_quant": QUANTIZED,
    "bnb_4bit_quant_storage": QUANTIZED,
    "quantization": (
        "weights/test_quantization.py::test_the_ratio_is_exactly_1_and_the_reference_is_the_quantised_base"
    ),
    "selective_checkpointing": SHARE,
    "prompt_column": "data/test_prompts.py::test_the_column_of_prompts_is_chosen",
    "shuffle_dataset": Turned(False, "prompts@1 samples@1"),
    "log_completions": SAMPLES,
    "num_completions_to_log": SAMPLES,
    "log_samples_steps": SAMPLES,
    "push_samples": "weights/test_files.py::test_push_to_hub_uploads_the_weights_and_the_card",
    "save_samples_steps": SAMPLES,
    "validation_prompts": VALIDATION,
    "validation_steps": VALIDATION,
    "overlap_rewards": Turned(False, "scored_beside"),
    "watch_rewards": "training/test_watched_rewards.py::test_evaluations_of_a_run_watch",
    "overwrite_output_dir": "training/test_base.py::test_a_run_replaces_the_one_in_its_folder_if_asked_for",
    "resume_without_optimizer": "training/test_damage.py::test_state_that_is_not_there_is_refused_unless_asked_for",
    # TrainingArguments that this library treats in its own way
    "per_device_train_batch_size": Turned(2, "made@1 passes"),
    "gradient_accumulation_steps": Turned(4, "gradient@1 weights@1", PARTS | {"steps_per_generation": 4}),
    "activation_checkpointing": SHARE,
    "bf16": Turned(True, "precision mixed"),
    "activation_checkpointing_kwargs": Turned(
        {"use_reentrant": True}, "block_calls_with_gradient", FULL | {"gradient_checkpointing": True}
    ),
    "auto_find_batch_size": (
        "training/test_out_of_memory.py::test_the_size_that_fits_is_found_and_trains_what_it_would_have_trained"
    ),
    "data_seed": Turned(7, "prompts@1 samples@1"),
    "load_best_model_at_end": "training/test_base.py::test_save_total_limit_and_the_best_model",
    "metric_for_best_model": "training/test_base.py::test_the_best_metric_may_be_one_that_an_own_evaluate_adds",
    "optim": Turned("sgd", "weights@1"),
    "per_device_eval_batch_size": Turned(1, "passes", EVALUATED),
    "save_on_each_node": "distributed/test_processes.py::test_machines_without_a_shared_disk_save_what_each_needs",
    "save_only_model": Turned(True, "files", {"save_strategy": "steps", "save_steps": 1}),
    "seed": Turned(5, "prompts@1 seeds@1 initial_seeds@1 samples@1"),
    "torch_compile": Turned(True, "compiled"),
    "eval_on_start": EVALUATION,
    "eval_steps": EVALUATION,
    "max_grad_norm": Turned(1e-09, "gradient@1"),
}


# What is observed

HARMLESS = {"passes", "evaluation", "files", "scored_beside", "moved", "kept_on", "compiled", "fps"}
HARMLESS |= {"block_calls_with_gradient"}


class Notes(TrainerCallback):
    """Note what an update is made from and what it leaves, by name and number of the update."""

    def __init__(self, seen: dict[str, Any]):
        self.seen, self.trainer = seen, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = flat(self.trainer.learner.weights.parameters)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        buffer, update = self.trainer.loader.buffer, state.global_step + 1
        trajectory = joined_trajectory(self.trainer)
        found = {"prompts": [row["prompt"] for row in buffer.rows]}
        found |= {name: getattr(trajectory, name) for name in ("steps", "seeds", "initial_seeds")}
        found["path"] = trajectory.latents
        found["advantages"] = buffer.advantages.values
        parameters = self.trainer.learner.weights.parameters
        found["gradient"] = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        self.seen.update({f"{name}@{update}": value for name, value in found.items()})

    def on_step_end(self, args, state, control, **kwargs):
        trainer, update = self.trainer, state.global_step
        self.seen[f"weights@{update}"] = flat(trainer.learner.weights.parameters) - self.start


def flat(tensors) -> Tensor:
    """Join tensors into one."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def observe(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train the tiny pipeline and say what was seen.

    Returns:
        by name. Of each update, with its number as in `gradient@1`: what it trains on (prompts, steps, seeds,
        initial_seeds, path, which are the recorded latents, advantages), its gradient, the samples of the rollout
        before it and how many were made, what was logged, and the weights that it leaves. There is an entry for each
        further thing that a setting is for.
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
        if "seed" in settings:  # that of `trainer_for` is the pipeline's
            patch.setitem(tiny_runs.SETTINGS, "seed", settings.pop("seed"))
        reward = noted(REWARDS[settings.pop("rewards", "one")], seen)
        trainer = trainer_for(folder, rewards=reward, **settings)
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


def noted(reward: Callable, seen: dict[str, Any]) -> Callable:
    """Return the reward, which now notes what it is called with."""

    @functools.wraps(reward)
    def function(completions, prompts, trainer_state, fps=None, images=None, videos=None, **columns):
        is_held_out = prompts[0] not in PROMPTS
        key = "evaluation" if is_held_out else f"samples@{trainer_state.global_step + 1}"
        frames = [sample if isinstance(sample, list) else [sample] for sample in completions]
        seen.setdefault(key, []).extend(np.stack([np.asarray(frame) for frame in sample]) for sample in frames)
        if not is_held_out:
            seen["scored_beside"].append(threading.current_thread() is not threading.main_thread())
        seen["fps"] = fps
        return reward(completions, prompts=prompts, trainer_state=trainer_state, **columns)

    return function


def spy_on_rollouts(patch, seen: dict[str, Any]) -> None:
    """Note where trajectories are kept: what is set to go to the CPU goes there by that name."""
    original = generate.RolloutRequest

    def spied(*, device, **kwargs):
        seen["kept_on"].add(type(device).__name__)
        return original(device=device, **kwargs)

    patch.setattr(generate, "RolloutRequest", spied)


def watch_networks(trainer: DiffusionGRPOTrainer, seen: dict[str, Any], drift: bool) -> None:
    """Note each call of the trained network and of its blocks; `drift` makes outputs depend on the batch size."""
    network = trainer.policy.networks[0]
    seen["block_calls_with_gradient"] = []

    def note(module, args, kwargs):
        tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
        seen["passes"].append(len(tensors[0]))

    def count(module, args):
        seen["block_calls_with_gradient"].append(torch.is_grad_enabled())

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
    made = next(value for name, value in seen.items() if name.startswith("samples@"))
    seen["sizes"], seen["frames"] = [sample.shape[1:3] for sample in made], [len(sample) for sample in made]
    parameters = trainer.learner.weights.parameters
    seen["weights"] = flat(parameters) - start
    seen["trained"] = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    seen["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    seen["mixed"] = trainer.accelerator.mixed_precision


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


def turn(name: str) -> dict[str, Any]:
    """What is turned to see what a setting does: the setting, and with a harmless one all others of the same base."""
    entry = SETTINGS[name]
    beside = {n: e for n, e in SETTINGS.items() if isinstance(e, Turned) and e.is_harmless and e.base == entry.base}
    changes = [entry.changes for entry in beside.values()]
    assert len(changes) == len(set(changes))  # or one could change what another one is for
    return {n: e.value for n, e in beside.items()} if entry.is_harmless else {name: entry.value}


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, Turned)])
def test_a_setting_changes_what_it_is_for(observed, name):
    entry = SETTINGS[name]
    is_brief = all(key.endswith("@1") for key in entry.changes.split())
    before = observed(entry.base)
    after = observed(entry.base | ({"max_steps": 1} if is_brief else {}) | turn(name))
    for key in entry.changes.split():
        assert key in before or key in after
        assert key not in before or key not in after or not is_same(before[key], after[key]), f"{key} is as before"
    if entry.is_harmless:
        assert is_same(before["weights@1"], after["weights@1"])


@pytest.mark.parametrize("name", [name for name, entry in SETTINGS.items() if isinstance(entry, str)])
def test_the_test_that_turns_a_setting_elsewhere_is_there(name):
    file, _, test = SETTINGS[name].partition("::")
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
    rolled_out, replayed = observed(DRIFTING), observed(DRIFTING | {"old_log_prob": "replay"})
    assert is_same(rolled_out["samples@1"], replayed["samples@1"])
    assert abs(rolled_out["ratio/mean@1"] - 1) > 1e-6 and replayed["ratio/mean@1"] == 1.0
    assert rolled_out["clip_ratio/region_mean@1"] > 0 == replayed["clip_ratio/region_mean@1"]
    assert replayed["ratio/mean@2"] != 1.0  # off-policy, by what the first update did


def test_evaluation_takes_its_own_arguments_of_the_pipeline(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, **COMMON | {"guidance_scale": 4.5})
    plain = trainer.evaluate(metric_key_prefix="plain")["plain_reward"]
    same = trainer.evaluate(metric_key_prefix="same", pipeline_kwargs={"guidance_scale": 4.5})["same_reward"]
    other = trainer.evaluate(metric_key_prefix="other", pipeline_kwargs={"guidance_scale": 1.0})["other_reward"]
    assert plain == same and abs(other - plain) > 1e-4
