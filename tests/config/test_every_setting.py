"""Every setting does something: turned, it changes what it is for, here or in another file of tests."""

import dataclasses
import functools
import gc
import json
import re
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
from diffusion_grpo.data.inputs import BATCHED, Form
from diffusion_grpo.rollout import generate
from diffusion_grpo.trainer import RatioError
from diffusion_grpo.training.callbacks import ReportCallback

HERE = Path(__file__).parents[1]


# What is turned


@dataclasses.dataclass(frozen=True)
class Turned:
    """A setting with another value than its default, or than that in `base`."""

    value: Any
    changes: str  # what differs then, of what `observe` sees; the weights too, unless all of it is `HARMLESS`
    base: dict[str, Any] = dataclasses.field(default_factory=dict)  # under which the setting has something to do

    @property
    def is_harmless(self) -> bool:
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
VALUED = {"advantage_estimator": "gae", "num_iterations": 2}
FULL = {"lora": False, "learning_rate": 1e-3}
RECOMPUTED = FULL | {"gradient_checkpointing": None, "activation_checkpointing": False}
VIDEO = {"name": "wan", "rewards": "video"}
PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# the network drifts with the size of its batch, which is another one in the rollout
DRIFTING = PARTS | {"drift": True, "max_ratio_error": None, "rollout_batch_size": 4, "epsilon": 1e-7}
DRIFTING |= {"steps_per_generation": 4}

SETTINGS = {
    "num_generations": Turned(4, "prompts@1 advantages@1"),
    "num_inference_steps": Turned(4, "steps@1 samples@1"),
    "eval_pipeline_kwargs": Turned({"height": 32}, "evaluation", EVALUATED),
    "guidance_scale": Turned(1.0, "samples@1 path@1 passes gradient@1 evaluation", EVALUATED),
    "height": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "width": Turned(32, "sizes samples@1 evaluation", EVALUATED),
    "num_frames": Turned(9, "frames samples@1", VIDEO),
    "fps": Turned(8.0, "fps", VIDEO),
    "pipeline_kwargs": Turned(
        {"max_sequence_length": 32, "negative_prompt": "grey"}, "samples@1 path@1 gradient@1 evaluation", EVALUATED
    ),
    "rollout_batch_size": Turned(1, "passes"),
    "samples_per_latent": Turned("group", "initial_seeds@1 samples@1"),
    "offload_trajectories": Turned(True, "kept_on"),
    "sde_type": Turned("cps", "samples@1 path@1 gradient@1"),
    "noise_level": Turned(0.2, "samples@1 path@1 gradient@1"),
    "trained_steps": Turned([1, 2], "steps@1 gradient@1"),
    "num_trained_steps": Turned(1, "steps@1 gradient@1"),
    "noisy_steps": Turned("trained", "samples@1", {"trained_steps": [0, 1]}),
    "step_interval": Turned(1, "steps@2 gradient@2", SLIDING),
    "epsilon": Turned(10.0, "gradient@2 clip_ratio/low_mean@2", AGAIN),
    "epsilon_high": Turned(10.0, "gradient@2 clip_ratio/high_mean@2", AGAIN),
    "step_weight": Turned("velocity", "gradient@1"),
    "old_log_prob": Turned("replay", "gradient@1 gradient@2 ratio/mean@1", DRIFTING),
    "max_ratio_error": Turned(1e-06, "error", DRIFTING),
    "value_clip": Turned(0.001, "value/loss@2", VALUED),
    "value_learning_rate": Turned(0.1, "value/loss@2", VALUED),
    "offload_ref_model": Turned(True, "moved", FULL | {"beta": 0.1}),
    "train_component": Turned("transformer_2", "trained", VIDEO | {"name": "wan_experts", "trained_steps": [1, 2]}),
    "shuffle_dataset": Turned(False, "prompts@1 samples@1"),
    "per_device_train_batch_size": Turned(2, "made@1 passes"),
    "gradient_accumulation_steps": Turned(4, "gradient@1 weights@1", PARTS | {"steps_per_generation": 4}),
    "activation_checkpointing": Turned(True, "block_calls_with_gradient", RECOMPUTED),
    "bf16": Turned(True, "precision mixed"),
    "activation_checkpointing_kwargs": Turned(
        {"use_reentrant": True}, "block_calls_with_gradient", FULL | {"gradient_checkpointing": True}
    ),
    "data_seed": Turned(7, "prompts@1 samples@1"),
    "optim": Turned("sgd", "weights@1"),
    "per_device_eval_batch_size": Turned(1, "passes", EVALUATED),
    "save_only_model": Turned(True, "files", {"save_strategy": "steps", "save_steps": 1}),
    "seed": Turned(5, "prompts@1 seeds@1 initial_seeds@1 samples@1"),
    "torch_compile": Turned(True, "compiled"),
    "max_grad_norm": Turned(1e-09, "gradient@1"),
}


# What is observed

HARMLESS = {"passes", "evaluation", "files", "moved", "kept_on", "compiled", "fps", "block_calls_with_gradient"}


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
    """Train the tiny pipeline and return what was seen by name; what belongs to an update has its number."""
    settings = COMMON | settings
    seen: dict[str, Any] = {"passes": [], "moved": 0, "kept_on": set(), "precision": set()}
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
        key = f"samples@{trainer_state.global_step + 1}" if prompts[0] in PROMPTS else "evaluation"
        frames = [sample if isinstance(sample, list) else [sample] for sample in completions]
        seen.setdefault(key, []).extend(np.stack([np.asarray(frame) for frame in sample]) for sample in frames)
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
    beside = {n: e for n, e in SETTINGS.items() if e.is_harmless and e.base == entry.base}
    changes = [entry.changes for entry in beside.values()]
    assert len(changes) == len(set(changes))  # or one could change what another one is for
    return {n: e.value for n, e in beside.items()} if entry.is_harmless else {name: entry.value}


@pytest.mark.parametrize("name", SETTINGS)
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


def test_every_setting_is_turned_somewhere():
    """A new field needs a line in the table above, or a test elsewhere that gives it a value."""
    texts = "".join(path.read_text() for path in HERE.rglob("test_*.py"))
    others = own_fields().keys() - script_fields().keys() - SETTINGS.keys()
    assert SETTINGS.keys() <= list_fields(DiffusionGRPOConfig).keys()
    assert [name for name in others if not re.search(rf'\b{name}=|"{name}"|--{name}\b', texts)] == []


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
