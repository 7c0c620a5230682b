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
from tiny_runs import (
    GUIDED,
    OPTIONAL,
    SMOOTH,
    are_equal,
    brightness,
    edited_images,
    logged,
    trained_weights,
    trainer_for,
)
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

PERMUTED = BASE | {"num_inference_steps": 4, "num_trained_steps": 2, "step_selection": "sample"}
ONE_STEP = {"num_inference_steps": 5, "trained_steps": [1, 4], "num_trained_steps": 1, "noisy_steps": "trained"}
BRANCHED = BASE | ONE_STEP | {"samples_per_latent": 2}
LAYERED = BASE | {"num_iterations": 2, "steps_per_generation": 8, "importance_sampling_level": "sequence"}
LAYERED |= {"kl_reward": 0.1, "validation_prompts": ["a", "b", "c"], "validation_steps": 2}
LAYERED |= {"eval_strategy": "steps", "eval_steps": 2, "ds3_gather_for_generation": False}
SYNCED = FULL | SAVED | EMA | {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1}
BEST = BASE | SAVED | EMA | {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
BEST |= {"metric_for_best_model": "reward", "greater_is_better": False, "max_steps": 3}
BEST |= {"optim": "sgd", "learning_rate": 10.0}  # the lowest reward is that of the second of three
GUARDED = {"sde_type": "precise", "step_weight": "guard", "trained_steps": [0, 2], "num_trained_steps": 1}
GUARDED |= {"step_selection": "sliding", "step_interval": 1, "noisy_steps": "trained"}
# the gradients of one step are so small that AdamW makes 1.5e-6 of their rounding
GUARDED |= {"optim": "sgd", "learning_rate": 1.0}
DPPO = {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-9}, "step_weight": "velocity"}
# several updates per rollout, whose old means are replayed before the first
SEVERAL = {"num_iterations": 2, "steps_per_generation": 8, "beta": 0.05} | SAVED
# one process makes more calls of the pipeline or the network than the other
ROWS = BASE | {"beta": 0.05, "validation_prompts": ["a", "b", "c"], "validation_steps": 2}
MODULAR = {"name": "modular_flux2", "guidance_scale": 4.0}
RUNS = {  # what is trained, and the stages of ZeRO that train it
    "lora": (BASE, "1 2"),
    "full": (FULL | {"gradient_checkpointing": True}, "1 2 3"),
    "permuted": (PERMUTED, "2 3 3-layered"),
    "layered": (LAYERED, "3"),
    "branches": (BRANCHED, "1 2 3"),
    "branches-per-prompt": (BRANCHED | {"step_selection": "prompt"}, "3 3-layered"),
    "per-prompt": (BASE | ONE_STEP | {"step_selection": "prompt"}, "1 2 3"),
    "synced": (SYNCED, "0 2 3"),
    "experts": (BASE | EXPERTS, "0 1 2 3"),
    "experts-full": (FULL | EXPERTS, "3"),
    "turns": (TURNS | SAVED, "0 1 2 3 2-offload"),
    "turns-per-prompt": (TURNS | {"step_selection": "prompt", "noisy_steps": "trained"}, "1"),
    "auto": (BASE | {"learning_rate": None}, "2-offload 3-offload"),
    "best": (BEST, "3"),
    "values": (BASE | {"advantage_estimator": "gae", "num_generations": 1}, "3"),
    "guarded": (BASE | GUARDED, "1 2 3"),
    "noise": (BASE | {"step_weight": "noise", "sde_type": "wan_sde"}, "1 2 3"),
    "dppo": (BASE | SEVERAL | DPPO, "1 2 3"),
    "dppo-full": (FULL | SEVERAL | DPPO, "1 2 3"),
    "grpo_guard": (BASE | SEVERAL | {"loss_type": "grpo_guard"}, "1 2 3"),
    "grpo_guard-full": (FULL | SEVERAL | {"loss_type": "grpo_guard"}, "1 2 3"),
    "optional": (ROWS | OPTIONAL, "1 2 3 3-layered"),
    "edited_images": (ROWS, "1 2 3 3-layered"),
    "guided": (ROWS | GUIDED, "1 2 3 3-layered"),
    "modular": (BASE | MODULAR, "1 2 3 3-layered"),
    "modular-full": (FULL | MODULAR | SAVED | EMA, "3"),
}
# torch's AdamW in place of DeepSpeed's own, which is compiled for minutes on its first use
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
AUTO = {"optimizer": {"type": "AdamW", "params": AUTO}, "zero_force_ds_cpu_optimizer": False}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
MORE = {
    "turns2-offload": {"zero": OFFLOAD, "more": {"zero_force_ds_cpu_optimizer": False}},
    "auto2-offload": {"zero": OFFLOAD, "more": AUTO},
    "auto3-offload": {"zero": OFFLOAD | {"offload_param": {"device": "cpu"}}, "more": AUTO},
}
TOGETHER = {
    f"{alone}{stage}": (alone, int(stage[0])) for alone, (_, stages) in RUNS.items() for stage in stages.split()
}
HALF = {f"half-{kind}{stage}": (kind, stage) for kind in ("lora", "full") for stage in (1, 2, 3)}
RESUMED = [name for name in TOGETHER if name in ("synced2", "synced3", "turns1", "turns3", "modular-full3")]
RESUMED += [name for name in TOGETHER if name.startswith(("dppo", "grpo_guard")) and name.endswith("3")]


def on_two_processes(folder: Path, runs: dict[str, dict]) -> str:
    """Runs runs one after the other on two processes; what they printed."""
    return "\n".join(ranks_server.succeed(folder, 2, zero_run.run_all, folder, runs, limit=600).logs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights that were written to a folder: the policy's, the average's, the reference's."""
    found = {}
    for path in sorted(folder.glob("**/[!r]*.safetensors")):  # not the rest of a rollout
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


def assert_trains_as_one(folder: Path, alone: Path, stage: int, most_error: float = 0.0) -> None:
    """Promises 1 and 3 of a run with ZeRO."""
    one = json.loads((alone / "result-0.json").read_text())
    for report in reports(folder):
        assert report["wrapper"] == ("DeepSpeedEngine" if stage else "DistributedDataParallel")
        assert report["stage"] == stage and report["frozen_whole"]
        errors = report["ratio/max_error"]
        assert len(errors) == len(one["ratio/max_error"]) and max(errors) <= most_error
        assert report["reward"] == pytest.approx(one["reward"], abs=1e-6) and report["reward"][0] == one["reward"][0]
        if stage == 3:  # half of each parameter here, the other half there, but for the odd element
            assert report["empty"] > 20 and report["kept"] > 0
            assert report["all"] <= 2 * report["held"] < report["all"] + 2 * report["empty"]
    assert difference(folder, alone) < 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A LoRA with ZeRO-3, the same resumed in its middle, and one process' run."""
    folder = tmp_path_factory.mktemp("zero")
    again = LORA | {"stage": 3, "resume": "lora3/checkpoint-1"}
    on_two_processes(folder, {"lora3": LORA | {"stage": 3}, "again3": again})
    zero_run.run(folder, "lora", dict(LORA))
    return folder


def test_a_lora_with_zero3_trains_as_one_process_does(runs):
    assert_trains_as_one(runs / "lora3", runs / "lora", stage=3)


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


@pytest.fixture
def make_backend():
    """Returns the backend of a configuration of DeepSpeed."""

    def make(stage=2, half=None, zero_settings=None, **config):
        config = zero.HfTrainerDeepSpeedConfig(
            {"zero_optimization": {"stage": stage, **(zero_settings or {})}, **config}
        )
        return DeepSpeedBackend(half, ContextGroups(), SimpleNamespace(zero_stage=stage, hf_ds_config=config))

    yield make
    zero.hide_deepspeed()


def test_open_sizes_of_buckets_come_from_the_width_of_the_network():
    """As transformers fills them in from a hidden_size, which diffusers' configs lack; a size that is given stays."""
    network = tiny_pipelines.build("sd3", 0)[0].transformer
    width, names = network.inner_dim, ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    for given, bucket in (
        ({"reduce_bucket_size": "auto"}, width**2),
        ({}, width**2),
        ({"reduce_bucket_size": 5e8}, 5e8),
    ):
        config = zero.HfTrainerDeepSpeedConfig(
            {"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto"), **given}}
        )
        zero.fill_sizes(config, network)
        found = [config.get_value(f"zero_optimization.{name}") for name in ("reduce_bucket_size", *names)]
        assert found == [bucket, int(0.9 * width**2), 10 * width]
    zero.hide_deepspeed()


def test_autocast_keeps_no_copies_of_the_weights(make_backend):
    backend = make_backend(half=torch.bfloat16)
    backend.accelerator = SimpleNamespace(device=torch.device("cpu"))
    with backend.network_access(torch.nn.Linear(1, 1)).forward_context():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()


def test_a_second_training_is_refused(make_backend):
    backend, model = make_backend(1), torch.nn.Linear(1, 1)
    with backend.wrap_prepare(model):
        pass
    with pytest.raises(ValueError, match="DeepSpeed cannot train again"), backend.wrap_prepare(model):
        pass


@pytest.mark.parametrize(
    ("stage", "own_steps", "config", "message"),
    [
        (2, True, {}, "take turns.*step_selection='rollout'"),
        (3, False, {"zero_settings": OFFLOAD}, "take turns.*leave out offload_optimizer"),
        # DeepSpeed makes it, with the weights of both experts in one group
        (1, False, {"optimizer": {"type": "AdamW"}}, 'are trained together.*leave "optimizer" out'),
    ],
)
def test_experts_that_processes_cannot_share_are_refused(make_backend, stage, own_steps, config, message):
    backend, run = make_backend(stage, **config), {"own_steps": own_steps, "draws_tokens": False}
    with pytest.raises(ValueError, match=f"transformer, transformer_2 {message}"):
        backend.check_run(("transformer", "transformer_2"), processes=2, **run)
    backend.check_run(("transformer",), processes=2, **run)


# Everything else, which takes minutes


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
    alone = {name: settings for name, (settings, _) in RUNS.items()}
    alone["edited_images"] = ROWS | edited_images(folder)
    for name, settings in alone.items():
        zero_run.run(folder, name, dict(settings))
    runs = {}
    for name, (kind, stage) in TOGETHER.items():
        layered = {"ds3_gather_for_generation": False} if name.endswith("layered") else {}
        runs[name] = alone[kind] | {"stage": stage} | layered | MORE.get(name, {})
    runs |= {name: alone[kind] | SAVED | {"stage": stage, "bf16": True} for name, (kind, stage) in HALF.items()}
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
    alone, stage = TOGETHER[name]
    # who trains steps of their own is replayed in other batches than sampled
    assert_trains_as_one(matrix / name, matrix / alone, stage, most_error=1e-6 if alone == "permuted" else 0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*RESUMED, *HALF])
def test_resumed_runs_end_with_the_same_weights(matrix, name):
    """Some of them go on within a rollout."""
    assert difference(matrix / f"{name}-again", matrix / name) == 0.0
    assert difference(matrix / f"{name}-again" / "checkpoint-2", matrix / name / "checkpoint-2") == 0.0


@pytest.mark.distributed
@pytest.mark.parametrize("name", HALF)
def test_half_precision_keeps_the_ratio_and_writes_float32(matrix, name):
    report, (alone, _) = reports(matrix / name)[0], HALF[name]
    assert report["ratio/max_error"] == [0.0] * 2 and report["dtype"] == "torch.bfloat16"
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
    assert [are_equal(kept, step) for step in steps] == [False, True, False]


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
