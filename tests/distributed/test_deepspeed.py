"""DeepSpeed's ZeRO on two CPU processes: weights really in parts, the same training, and files that one process reads.

What is compared with one process is mostly trained with AdamW where it is a LoRA, and with plain SGD where it is the
whole network: AdamW divides each gradient by its own size, so where a gradient is 0 but for rounding (about 1e-10
here, at weights that cannot matter) the order of a sum decides the sign of a whole step.
"""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import fsdp_run
import numpy as np
import pytest
import ranks_server
import tiny_pipelines
import torch
import zero_run
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import GUIDED, OPTIONAL, SMOOTH, brightness, edited_images, logged, trained_weights, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.distributed import zero
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.zero import DeepSpeedBackend
from diffusion_grpo.policy.rollout import DenoisingPolicy, rollout, sample_seed
from diffusion_grpo.weights import files as hub

BASE = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "num_generations": 4, "max_steps": 2}
BASE |= {"num_inference_steps": 3}
FULL = BASE | {"lora": False, "optim": "sgd", "learning_rate": 0.1}
SAVED = {"save_strategy": "steps", "save_steps": 1}
EMA = {"ema_decay": 0.9, "ema_update_interval": 1}
LORA = BASE | SAVED | EMA | {"beta": 0.05, "gradient_checkpointing": True}
LORA |= {"validation_prompts": ["a house", "a ship"], "validation_steps": 2}
EXPERTS = {"name": "wan_experts", "num_inference_steps": 6}
# Each update trains one step, and so one expert; Adam's momentum would move the other
TURNS = BASE | EXPERTS | {"trained_steps": [0, 4], "num_trained_steps": 1, "max_steps": 3}
GUARDED = {"sde_type": "precise", "step_weight": "guard", "trained_steps": [0, 2], "num_trained_steps": 1}
GUARDED |= {"step_selection": "sliding", "step_interval": 1, "noisy_steps": "trained"}
# the gradients of one step are so small that AdamW makes 1.5e-6 of their rounding
GUARDED |= {"optim": "sgd", "learning_rate": 1.0}
VALUES = BASE | {"advantage_estimator": "gae", "num_generations": 1}


def on_two_processes(folder: Path, runs: dict[str, dict]) -> str:
    """Runs runs one after the other on two processes; what they printed."""
    return "\n".join(ranks_server.succeed(folder, 2, zero_run.run_all, folder, runs, limit=600).logs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights that were written to a folder: the policy's, the average's, the reference's."""
    found = {}
    for path in sorted(folder.glob("**/*.safetensors")):
        place = path.relative_to(folder)
        if place.parts[0] in ("policy", "reference", "transformer", "transformer_2") or len(place.parts) == 1:
            found |= {f"{place}:{name}": tensor for name, tensor in load_file(path).items()}
    return found


def difference(one: Path, other: Path) -> float:
    """The largest between two folders' weights, which must be the same ones, and in float32."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and len(ours) > 4
    assert all(ours[name].dtype == theirs[name].dtype == torch.float32 for name in ours)
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def reports(folder: Path) -> list[dict]:
    """What each of the two processes reported of itself."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


def assert_trains_as_one(folder: Path, alone: Path, stage: int) -> None:
    """Promises 1 and 3 of a run with ZeRO."""
    one = json.loads((alone / "result-0.json").read_text())
    for report in reports(folder):
        assert (report["wrapper"], report["stage"]) == ("DeepSpeedEngine", stage)
        assert report["frozen_whole"]
        assert report["ratio/max_error"] == [0.0] * len(one["ratio/max_error"])
        assert report["reward"] == pytest.approx(one["reward"], abs=1e-6) and report["reward"][0] == one["reward"][0]
        if stage == 3:  # half of each parameter here, the other half there, but for the odd element
            assert report["empty"] > 20 and report["kept"] > 0
            assert report["all"] <= 2 * report["held"] < report["all"] + 2 * report["empty"]
    assert difference(folder, alone) < 1e-6


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """A LoRA with ZeRO-3, the same resumed in its middle, another that trains a sliding window of weighted steps, and
    the whole network with ZeRO-2; and one process' runs."""
    folder = tmp_path_factory.mktemp("zero")
    again = LORA | {"stage": 3, "resume": "lora3/checkpoint-1"}
    full = FULL | {"max_steps": 1}
    together = {"lora3": LORA | {"stage": 3}, "again3": again, "guarded3": BASE | GUARDED | {"stage": 3}}
    is_whole = any(item.path == request.path and "distributed" in item.keywords for item in request.session.items)
    if not is_whole:  # runs of two processes are the slowest tests
        on_two_processes(folder, {name: together[name] for name in ("lora3", "again3")})
        zero_run.run(folder, "lora", dict(LORA))
        return folder
    together |= {"values3": VALUES | {"stage": 3}}
    on_two_processes(folder, together | {"full2": full | {"stage": 2}, "turns2": TURNS | {"stage": 2}})
    alone = {"lora": LORA, "guarded": BASE | GUARDED, "full": full, "turns": TURNS, "values": VALUES}
    for name, settings in alone.items():
        zero_run.run(folder, name, dict(settings))
    return folder


def test_a_lora_with_zero3_trains_as_one_process_does(runs):
    assert_trains_as_one(runs / "lora3", runs / "lora", stage=3)


@pytest.mark.distributed
def test_weighted_steps_in_a_sliding_window_with_zero3_train_as_in_one_process(runs):
    assert_trains_as_one(runs / "guarded3", runs / "guarded", stage=3)


@pytest.mark.distributed
def test_a_value_model_with_zero3_trains_as_in_one_process(runs):
    assert_trains_as_one(runs / "values3", runs / "values", stage=3)


@pytest.mark.distributed
def test_the_whole_network_with_zero2_trains_as_one_process_does(runs):
    assert_trains_as_one(runs / "full2", runs / "full", stage=2)


@pytest.mark.distributed
def test_an_expert_that_an_update_does_not_train_stays_as_it_is(runs):
    assert_trains_as_one(runs / "turns2", runs / "turns", stage=2)


def test_a_resumed_zero3_run_ends_with_the_same_weights(runs):
    assert (runs / "again3" / "checkpoint-2" / "policy").is_dir()
    assert difference(runs / "again3" / "checkpoint-2", runs / "lora3" / "checkpoint-2") == 0.0
    assert difference(runs / "again3", runs / "lora3") == 0.0
    assert difference(runs / "lora3" / "checkpoint-1", runs / "lora3" / "checkpoint-2") > 1e-5


@pytest.mark.distributed
def test_one_process_goes_on_from_a_zero3_checkpoint(runs, tmp_path, caplog):
    found = {}

    class Beginning(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            found.update(trained_weights(trainer))

    trainer = trainer_for(tmp_path, callbacks=[Beginning()], **SMOOTH, **LORA)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(runs / "lora3" / "checkpoint-1"))
    assert "was written by 2 processes with ZeRO-3" in caplog.text and "the optimizer starts afresh" in caplog.text
    saved = load_file(runs / "lora3" / "checkpoint-1" / "policy" / "adapter_model.safetensors")
    assert all(torch.equal(value, saved[name.replace(".default", "")]) for name, value in found.items())
    assert len(found) == len(saved)
    assert logged(trainer, "ratio/max_error") == [0.0] * 2 and trainer.state.global_step == 2


@pytest.mark.distributed
def test_one_process_draws_what_zero3_drew(runs):
    """The average, as it was used under ZeRO-3, from its file in a plain pipeline: the same image."""
    pipe, inputs = tiny_pipelines.build("sd3", 0)
    hub.load_weights(pipe, runs / "lora3")
    args = inputs | {"prompt": ["a ship"]}
    seeds = [sample_seed(42, "evaluation", 1)]
    images, _ = rollout(DenoisingPolicy(pipe), args, seeds=seeds, num_inference_steps=3, noise_level=0.0)
    written = Image.open(runs / "lora3" / "validation" / "step-000002" / "0001.png")
    # of 255 levels; the order of sums may move what lies between two
    assert np.abs(np.asarray(images[0], dtype=int) - np.asarray(written, dtype=int)).max() <= 1


# Settings, without processes


def test_open_bucket_sizes_come_from_the_width_of_the_network():
    """As transformers fills them in from a hidden_size, which diffusers' configs lack."""
    pipe, _ = tiny_pipelines.build("sd3", 0)
    width = pipe.transformer.inner_dim
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = zero.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}})
    zero.fill_sizes(config, pipe.transformer)
    assert [config.get_value(f"zero_optimization.{name}") for name in names] == [
        width * width,
        int(0.9 * width * width),
        10 * width,
    ]
    zero.hide_deepspeed()


def test_a_bucket_that_is_left_out_follows_the_network_too():
    """DeepSpeed's default of 5e8 numbers would be allocated for any LoRA; a size that is given stays."""
    pipe, _ = tiny_pipelines.build("sd3", 0)
    for given, expected in ({}, pipe.transformer.inner_dim**2), ({"reduce_bucket_size": 5e8}, 5e8):
        config = zero.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2, **given}})
        zero.fill_sizes(config, pipe.transformer)
        assert config.get_value("zero_optimization.reduce_bucket_size") == expected
    zero.hide_deepspeed()


def test_autocast_keeps_no_copies_of_the_weights():
    config = zero.HfTrainerDeepSpeedConfig({"bf16": {"enabled": True}})
    backend = DeepSpeedBackend(torch.bfloat16, ContextGroups(), SimpleNamespace(zero_stage=2, hf_ds_config=config))
    backend._accelerator = SimpleNamespace(device=torch.device("cpu"))
    with backend.network_access(torch.nn.Linear(1, 1)).forward_context():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    zero.hide_deepspeed()


def test_a_second_training_is_refused():
    plugin = SimpleNamespace(zero_stage=1, hf_ds_config=zero.HfTrainerDeepSpeedConfig({}))
    backend, model = DeepSpeedBackend(None, ContextGroups(), plugin), torch.nn.Linear(1, 1)
    with backend.wrap_prepare(model):
        pass
    with pytest.raises(ValueError, match="DeepSpeed cannot train again"), backend.wrap_prepare(model):
        pass
    zero.hide_deepspeed()


@pytest.mark.parametrize(
    ("stage", "own_steps", "offload", "message"),
    [
        (2, True, None, "step_selection='rollout'"),
        (3, False, {"device": "cpu"}, "leave out offload_optimizer"),
    ],
)
def test_experts_that_processes_cannot_share_are_refused(stage, own_steps, offload, message):
    settings = {"stage": stage, "offload_optimizer": offload}
    config = zero.HfTrainerDeepSpeedConfig({"zero_optimization": settings})
    plugin = SimpleNamespace(zero_stage=stage, hf_ds_config=config)
    backend = DeepSpeedBackend(None, ContextGroups(), plugin)
    run = {"processes": 2, "own_steps": own_steps, "draws_tokens": False}
    with pytest.raises(ValueError, match=f"transformer, transformer_2 take turns.*{message}"):
        backend.check_run(("transformer", "transformer_2"), **run)
    backend.check_run(("transformer",), **run)
    zero.hide_deepspeed()


@pytest.mark.parametrize("processes", [1, 2])
def test_an_optimizer_of_the_deepspeed_configuration_is_refused_for_two_experts(processes):
    """DeepSpeed makes it, with the weights of both experts in one group."""
    config = zero.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}})
    backend = DeepSpeedBackend(None, ContextGroups(), SimpleNamespace(zero_stage=1, hf_ds_config=config))
    run = {"own_steps": False, "draws_tokens": False}
    with pytest.raises(ValueError, match='transformer, transformer_2 are trained together.*leave "optimizer" out'):
        backend.check_run(("transformer", "transformer_2"), processes=processes, **run)
    zero.hide_deepspeed()


# Everything else, which takes minutes

PERMUTED = BASE | {"num_inference_steps": 4, "num_trained_steps": 2, "step_selection": "sample"}
BRANCHED = BASE | {"num_inference_steps": 5, "trained_steps": [1, 4], "num_trained_steps": 1, "samples_per_latent": 2}
BRANCHED |= {"step_selection": "prompt", "noisy_steps": "trained"}
LAYERED = BASE | {"num_iterations": 2, "steps_per_generation": 8, "importance_sampling_level": "sequence"}
LAYERED |= {"kl_reward": 0.1, "validation_prompts": ["a", "b", "c"], "validation_steps": 2}
LAYERED |= {"eval_strategy": "steps", "eval_steps": 2, "ds3_gather_for_generation": False}
SYNCED = FULL | SAVED | EMA | {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
BEST = BASE | SAVED | EMA | {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
BEST |= {"metric_for_best_model": "reward", "greater_is_better": False, "max_steps": 3}
BEST |= {"optim": "sgd", "learning_rate": 10.0}  # the lowest reward is that of the second of three
# torch's AdamW in place of DeepSpeed's own, which is compiled for minutes on its first use
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
AUTO = {"optimizer": {"type": "AdamW", "params": AUTO}} | TORCH_ADAM
ALONE = {
    "lora": BASE,
    "full": FULL | {"gradient_checkpointing": True},
    "permuted": PERMUTED,
    "layered": LAYERED,
    "branches": BRANCHED,
    "synced": SYNCED,
    "experts": BASE | EXPERTS,
    "experts-full": FULL | EXPERTS,
    "turns": TURNS | SAVED,
    "turns-per-prompt": TURNS | {"step_selection": "prompt", "noisy_steps": "trained"},
    "auto": BASE | {"learning_rate": None},
    "best": BEST,
}
# name: what one process does, ZeRO's stage, further settings
TOGETHER = {
    "lora1": ("lora", 1, {}),
    "lora2": ("lora", 2, {}),
    "full1": ("full", 1, {}),
    "full3": ("full", 3, {}),
    "permuted2": ("permuted", 2, {}),
    "permuted3": ("permuted", 3, {}),
    "permuted3-layered": ("permuted", 3, {"ds3_gather_for_generation": False}),
    "layered3": ("layered", 3, {}),
    "branches3": ("branches", 3, {}),
    "branches3-layered": ("branches", 3, {"ds3_gather_for_generation": False}),
    "synced0": ("synced", 0, {}),
    "synced2": ("synced", 2, {}),
    "synced3": ("synced", 3, {}),
    "experts0": ("experts", 0, {}),
    "experts1": ("experts", 1, {}),
    "experts2": ("experts", 2, {}),
    "experts3": ("experts", 3, {}),
    "experts-full3": ("experts-full", 3, {}),
    "turns0": ("turns", 0, {}),
    "turns1": ("turns", 1, {}),
    "turns2": ("turns", 2, {}),
    "turns3": ("turns", 3, {}),
    "turns-offload2": ("turns", 2, {"zero": {"offload_optimizer": {"device": "cpu"}}, "more": TORCH_ADAM}),
    "turns-per-prompt1": ("turns-per-prompt", 1, {}),
    "offload2": ("auto", 2, {"zero": {"offload_optimizer": OFFLOAD["offload_optimizer"]}, "more": AUTO}),
    "offload3": ("auto", 3, {"zero": OFFLOAD, "more": AUTO}),
    "best3": ("best", 3, {}),
}
HALF = {
    "half-lora1": (BASE | SAVED | {"gradient_checkpointing": True}, 1),
    "half-lora2": (BASE | SAVED, 2),
    "half-lora3": (BASE | SAVED, 3),
    "half-full1": (FULL | SAVED, 1),
    "half-full2": (FULL | SAVED, 2),
    "half-full3": (FULL | SAVED, 3),
}
RESUMED = ("synced2", "synced3", "turns1", "turns3")


@pytest.mark.distributed
@pytest.mark.parametrize("rows", ["optional", "edited_images", "guided"])
def test_rows_may_differ_in_how_often_they_pass_the_network(tmp_path, rows):
    """An optional column, two sizes, guidance: one process makes more calls of pipeline or network than the other."""
    own = {"optional": OPTIONAL, "edited_images": edited_images(tmp_path), "guided": GUIDED}[rows]
    own = BASE | own | {"beta": 0.05, "validation_prompts": ["a", "b", "c"], "validation_steps": 2}
    stages = {"zero1": {"stage": 1}, "zero2": {"stage": 2}, "zero3": {"stage": 3}}
    stages["layered3"] = {"stage": 3, "ds3_gather_for_generation": False}
    zero_run.run(tmp_path, "alone", dict(own))
    on_two_processes(tmp_path, {name: own | stage for name, stage in stages.items()})
    for name, stage in stages.items():
        assert_trains_as_one(tmp_path / name, tmp_path / "alone", stage["stage"])


DPPO = {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-9}, "step_weight": "velocity"}
# several updates per rollout, whose old means are replayed before the first
SEVERAL = {"num_iterations": 2, "steps_per_generation": 8, "beta": 0.05} | SAVED
ONE_STEP = {"num_inference_steps": 5, "trained_steps": [1, 4], "num_trained_steps": 1, "noisy_steps": "trained"}
ALGORITHMS = {
    "dppo": BASE | SEVERAL | DPPO,
    "grpo_guard": BASE | SEVERAL | {"loss_type": "grpo_guard"},
    "dppo, full": FULL | SEVERAL | DPPO,
    "grpo_guard, full": FULL | SEVERAL | {"loss_type": "grpo_guard"},
    "guard's weight, precise, sliding": BASE | GUARDED,
    "noise, wan_sde": BASE | {"step_weight": "noise", "sde_type": "wan_sde"},
    "per_prompt": BASE | ONE_STEP | {"step_selection": "prompt"},
    "branches": BASE | ONE_STEP | {"samples_per_latent": 2},
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_stage_trains_recorded_steps_as_one_process_does(tmp_path, name):
    """And goes on within a rollout bit for bit, where a rollout serves several updates."""
    own = ALGORITHMS[name]
    zero_run.run(tmp_path, "alone", dict(own))
    runs = {f"zero{stage}": own | {"stage": stage} for stage in (1, 2, 3)}
    if "save_steps" in own:
        runs["again"] = own | {"stage": 3, "resume": "zero3/checkpoint-1"}
    on_two_processes(tmp_path, runs)
    found = {run: difference(tmp_path / run, tmp_path / "alone") for run in runs}
    print(f"largest differences: {found}")
    for stage in (1, 2, 3):
        assert_trains_as_one(tmp_path / f"zero{stage}", tmp_path / "alone", stage)
    if "again" in runs:
        assert (tmp_path / "zero3" / "checkpoint-1" / "rollout-rank0.safetensors").is_file()
        assert difference(tmp_path / "again", tmp_path / "zero3") == 0.0
        assert min(reports(tmp_path / "again")[0]["grad_norm"]) > 0


@pytest.mark.distributed
def test_parts_that_full_training_leaves_frozen_are_written_whole(tmp_path):
    """Two parts of GLM-Image's language model are never trained, and ZeRO-3 shards them with the rest."""
    writer = "vision_language_encoder"
    own = {
        "name": "glm_image",
        "lora": False,
        "train_component": writer,
        "rewards": brightness,
        "reward_weights": None,
    }
    own |= {"num_inference_steps": 2, "num_generations": 2, "per_device_train_batch_size": 2, "optim": "sgd"}
    own |= {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "stage": 3, "beta": 0.05, "sync_ref_model": True}
    own |= SAVED | {"ref_model_sync_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
    own |= {"eval_strategy": "steps", "eval_steps": 1}
    again = own | {"max_steps": 2, "resume": "first/checkpoint-1"}
    on_two_processes(tmp_path, {"first": own | {"max_steps": 1}, "again": again})
    before = tiny_pipelines.build("glm_image", 0)[0].vision_language_encoder.state_dict()
    for place in ("first/checkpoint-1", "first/checkpoint-1/reference", "first", "again/checkpoint-2", "again"):
        saved = load_file(tmp_path / place / writer / "model.safetensors")
        frozen = {name for name in saved if name.startswith(("model.visual.", "model.vqmodel."))}
        assert len(frozen) > 8 and all(torch.equal(saved[name], before[name]) for name in frozen), place
        assert all(saved[name].shape == before[name].shape for name in saved), place
        assert any(not torch.equal(saved[name], before[name]) for name in saved), place


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """All of them, in a start for a few: what one start leaves in memory adds up.

    Stages do not share one: DeepSpeed is not undone in a process, and ZeRO-3 leaves a linear layer of its own there,
    whose gradients differ in their last bit.
    """
    folder = tmp_path_factory.mktemp("matrix")
    for name, settings in ALONE.items():
        zero_run.run(folder, name, dict(settings))
    runs = {name: ALONE[alone] | {"stage": stage} | more for name, (alone, stage, more) in TOGETHER.items()}
    runs |= {name: settings | {"stage": stage, "bf16": True} for name, (settings, stage) in HALF.items()}
    runs |= {f"{name}-again": runs[name] | {"resume": f"{name}/checkpoint-1"} for name in (*RESUMED, *HALF)}
    runs["one-to-two"] = SYNCED | {"stage": 3, "resume": "synced/checkpoint-1"}
    runs["ddp-to-zero3"] = SYNCED | {"stage": 3, "resume": "synced0/checkpoint-1"}
    runs["zero3-to-zero2"] = SYNCED | {"stage": 2, "resume": "synced3/checkpoint-1"}
    stages = [[name for name in runs if runs[name]["stage"] == stage] for stage in (0, 1, 3, 2)]
    starts = [names[i : i + 7] for names in stages for i in range(0, len(names), 7)]
    printed = [on_two_processes(folder, {name: runs[name] for name in names}) for names in starts]
    sharded = {"zero3-to-fsdp2": SYNCED | {"resume": str(folder / "synced3" / "checkpoint-1")}}
    ranks_server.succeed(folder / "fsdp", 2, fsdp_run.run_all, folder, sharded)
    (folder / "printed.txt").write_text("\n".join(printed))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("name", TOGETHER)
def test_zero_trains_what_one_process_trains(matrix, name):
    alone, stage, _ = TOGETHER[name]
    one = json.loads((matrix / alone / "result-0.json").read_text())
    for report in reports(matrix / name):
        assert report["stage"] == stage and report["wrapper"] != one["wrapper"] and report["frozen_whole"]
        errors = report["ratio/max_error"]  # who trains steps of their own is replayed in other batches than sampled
        assert len(errors) == len(one["ratio/max_error"]) and max(errors) <= (1e-6 if alone == "permuted" else 0.0)
        assert report["reward"] == pytest.approx(one["reward"], abs=1e-6)
        assert stage < 3 or report["all"] <= 2 * report["held"] < report["all"] + 2 * report["empty"]
    assert difference(matrix / name, matrix / alone) < 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*RESUMED, *HALF])
def test_resumed_runs_end_with_the_same_weights(matrix, name):
    assert difference(matrix / f"{name}-again", matrix / name) == 0.0
    assert difference(matrix / f"{name}-again" / "checkpoint-2", matrix / name / "checkpoint-2") == 0.0


@pytest.mark.distributed
@pytest.mark.parametrize("name", HALF)
def test_half_precision_keeps_the_ratio_and_writes_float32(matrix, name):
    report = reports(matrix / name)[0]
    assert report["ratio/max_error"] == [0.0] * 2 and report["dtype"] == "torch.bfloat16"
    alone = "full" if "full" in name else "lora"
    assert 0 < difference(matrix / name, matrix / alone) < 0.01  # which asks for float32
    if alone == "full":
        saved = load_file(matrix / name / "transformer" / "diffusion_pytorch_model.safetensors")
        assert any((tensor.bfloat16().float() != tensor).any() for tensor in saved.values())
        DiffusionPipeline.from_pretrained(matrix / name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["best", "best3"])
def test_the_best_weights_are_those_of_neither_end(matrix, name):
    """Or what is restored could not be told from what is there anyway."""
    kept = load_file(matrix / name / "adapter_model.safetensors")
    steps = [load_file(matrix / name / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (1, 2, 3)]
    assert [all(torch.equal(kept[key], step[key]) for key in kept) for step in steps] == [False, True, False]


@pytest.mark.distributed
def test_two_processes_go_on_from_one(matrix):
    """SGD keeps nothing between updates, so nothing is lost: weights, average and reference end where one's do."""
    assert difference(matrix / "one-to-two", matrix / "synced") < 1e-6
    assert "was written by one process with whole weights" in (matrix / "printed.txt").read_text()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp-to-zero3", "zero3-to-zero2", "zero3-to-fsdp2"])
def test_a_run_goes_on_in_another_mode(matrix, name):
    """With SGD, which keeps nothing; weights, average and reference are those of the unbroken run."""
    assert difference(matrix / name / "checkpoint-2", matrix / "synced" / "checkpoint-2") < 1e-6
