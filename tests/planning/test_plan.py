"""The plan is what happens: its bytes are those that a training really allocates, its counts those of the run."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny_pipelines import build
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, cli
from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.arguments import LaunchArguments
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.distributed.sharding import Sharding
from diffusion_grpo.planning.batches import Batches
from diffusion_grpo.planning.plan import count_evaluations, count_optimizer_bytes, make_planned_config, plan
from diffusion_grpo.planning.weightless import KeptStorages, identify_storage
from tests.cli.test_cli import refusal

SETTINGS = {
    "reward_funcs": ["brightness"],
    "use_peft": True,
    "lora_r": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_inference_steps": 4,
    "max_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
}


def write(folder, name, **settings):
    """A tiny pipeline in a folder, and a YAML file of a training of it."""
    pipe, inputs = build(name)
    pipe.save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("a red cat\na blue dog\na tree\n")
    sizes = {key: inputs.pop(key) for key in ("height", "width", "num_frames", "guidance_scale") if key in inputs}
    inputs.pop("prompt")
    where = {"model": str(folder / "model"), "dataset": str(folder / "prompts.txt"), "output_dir": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | where | sizes | {"pipeline_kwargs": inputs} | settings))
    return str(path)


EXAMPLES = Path(__file__).parents[2] / "examples"
STAND_INS = {  # tiny pipelines of the classes that the examples train
    "flux": "flux",
    "flux_kontext": "flux_kontext",
    "glm_image_ar": "glm_image",
    "glm_image_dit": "glm_image",
    "glm_image_edit": "glm_image_edit",
    "hunyuan_video": "hunyuan_video",
    "qwen_image": "qwen_image",
    "sd15": "sd15",
    "sd35_geneval": "sd3",
    "sd35_ocr": "sd3",
    "sd35_ocr_fast": "sd3",
    "sdxl": "sdxl",
    "sdxl_inpaint": "sdxl_inpaint",
    "stable_audio": "stable_audio",
    "wan21_gae": "wan",
    "wan21_ocr": "wan",
    "wan22_a14b": "wan_experts",
    "wan22_image_to_video": "wan_image",
    "wan22_ti2v_5b": "wan_ti2v",
}


def size(tensors):
    """Bytes of tensors, each once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


class Allocated(TrainerCallback):
    """What lies in memory right before the optimizer's step, and after it."""

    def __init__(self):
        self.trainer = None
        self.bytes: dict[str, int] = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = list(self.trainer.model.parameters())
        self.bytes["parameters"] = size(parameters)
        self.bytes["gradients"] = size(p.grad for p in parameters if p.grad is not None)

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        states = trainer.optimizer.state.values()
        self.bytes["optimizer"] = size(x for state in states for x in state.values() if torch.is_tensor(x))
        samples = trainer.feed.buffer.samples
        self.bytes["trajectory"] = size(tensor for sample in samples for tensor in sample.tensors().values())
        parts = [part for part in trainer.pipe.components.values() if isinstance(part, torch.nn.Module)]
        networks = trainer.policy.networks
        self.bytes["frozen parts"] = size(
            x for part in parts if not any(part is n for n in networks) for x in part.parameters()
        )
        if trainer.reference is not None and trainer.reference.module is not None:
            self.bytes["reference"] = size(trainer.reference.module.parameters())
        if trainer.average is not None:
            self.bytes["moving average"] = size(trainer.average.average.shadow_params)
        if trainer.old_policy is not None:
            self.bytes["old policy"] = size(trainer.old_policy.average.shadow_params)


def allocated(config):
    """A training of one update, and the bytes it took by kind."""
    script, lora, args = parse_train_arguments(config, [])
    trainer, seen = build_trainer(script, lora, args), Allocated()
    seen.trainer = trainer
    trainer.add_callback(seen)
    trainer.train()
    return trainer, seen.bytes


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sd3", {}),
        ("flux", {"bf16": True, "ema_decay": 0.9, "optim": "sgd", "best_of_n": 2, "num_generations": 4}),
        ("wan", {"bf16": True, "timestep_fraction": 0.5}),  # keeps some layers in float32 among the bf16 ones
        ("sd3", {"use_peft": False, "bf16": True, "beta": 0.1, "optim": "adafactor"}),
        ("sd3", {"loss_type": "nft", "timestep_fraction": 0.67}),
        ("sd3", {"loss_type": "dpo", "use_peft": False}),
    ],
)
def test_planned_bytes_are_the_allocated_ones(name, settings, tmp_path):
    config = write(tmp_path, name, **settings)
    planned = {item.name: item.accelerator for item in plan(config, []).memory}
    trainer, real = allocated(config)
    if "best_of_n" in settings:  # what is recorded of all samples is freed but for the best ones
        real["trajectory"] *= settings["num_generations"] // settings["best_of_n"]
    planned.pop("activations")
    assert planned == real
    weights = sum(p.numel() for p in trainer.model.parameters())
    assert plan(config, []).model["weights"] == weights


def test_passes_on_renoised_samples_are_counted(tmp_path):
    """Guidance counts twice in the rollout and is off in the update: 4 steps, then 2 of the 3 that can be trained."""
    made = plan(write(tmp_path, "sd3", loss_type="nft", timestep_fraction=0.67, beta=0.1), [])
    assert made.evaluations == {
        "in one step": 2,
        "rollout": 8,
        "update, with gradient": 2,
        "reference in the update": 2,
        "old policy": 2,
    }
    twice = plan(write(tmp_path, "sd3", loss_type="dpo", num_iterations=2), [])
    assert twice.evaluations["reference in the update"] == twice.evaluations["update, with gradient"] == 6
    assert twice.evaluations["errors before the first update"] == 3 and "old policy" not in twice.evaluations


@pytest.mark.parametrize(("name", "evaluations"), [("sd3", 2), ("wan", 2)])
def test_evaluations_and_activations_are_those_of_the_real_network(name, evaluations, tmp_path):
    config = write(tmp_path, name)
    made = plan(config, [])
    assert made.evaluations["in one step"] == evaluations  # in one call or in two
    script, lora, args = parse_train_arguments(config, [])
    trainer = build_trainer(script, lora, args)
    network, kept = trainer.policy.network, []
    real = network.forward

    def watched(*positional, **named):
        if not torch.is_grad_enabled():
            return real(*positional, **named)
        if not kept:
            kept.append(KeptStorages({identify_storage(x) for x in [*network.parameters(), *network.buffers()]}))
        with kept[0]:
            return real(*positional, **named)

    network.forward = watched
    inputs = trainer.inputs([{"prompt": "a photo of a cat"}] * 2)
    from diffusion_grpo.policy.rollout import replay, rollout

    _, trajectory = rollout(trainer.policy, inputs, seeds=[1, 2], num_inference_steps=4, steps=[[0]] * 2)
    replay(trainer.policy, inputs, trajectory, 0)
    planned = next(item.accelerator for item in made.memory if item.name == "activations")
    assert planned == pytest.approx(kept[0].bytes, rel=0.01)


@pytest.mark.parametrize(("order", "size"), [("random", 2), ("sliding", 2), ("random", None)])
def test_steps_that_branches_share_are_counted_once_for_all_of_them(order, size, tmp_path):
    """On average over all places of the window."""
    given = {"num_generations": 24, "branches": 6, "num_inference_steps": 10, "sde_window": [2, 8]}
    given |= {"sde_window_size": size, "sde_window_order": order, "deterministic_outside_window": True}
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=24, **given)
    starts = [2] if size is None else [2, 3, 4, 5, 6]
    expected = sum((24 // 6 * start + 24 * (10 - start)) / 24 for start in starts) / len(starts)
    assert count_evaluations(args, Batches.of(args, None), None)["rollout"] == pytest.approx(expected)


def test_checkpointing_keeps_less(tmp_path):
    config = write(tmp_path, "sd3")
    network = tmp_path / "model" / "transformer" / "config.json"
    network.write_text(json.dumps(json.loads(network.read_text()) | {"num_layers": 6}))  # there are no weights to fit

    def activations(*words):
        return next(item.accelerator for item in plan(config, list(words)).memory if item.name == "activations")

    every = activations("--gradient_checkpointing", "true")
    half = activations("--gradient_checkpointing", "true", "--selective_checkpointing", "0.5")
    assert every < half < activations()


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_batches_are_the_trainers(processes, tmp_path):
    config = write(tmp_path, "sd3", num_generations=4, steps_per_generation=4, num_iterations=3, rollout_batch_size=1)
    _, _, args = parse_train_arguments(config, [], make_planned_config(processes))
    batches = Batches.of(args, prompts=100)
    assert batches.samples_per_rollout == 2 * processes * 4 == batches.prompts_per_rollout * 4
    assert batches.samples_per_process * processes == batches.samples_per_rollout
    assert batches.pipeline_calls == 8
    assert (batches.updates_per_rollout, batches.samples_per_update) == (6, 4 * processes)
    assert batches.rollouts_per_epoch == -(-100 // (2 * processes))
    if processes == 1:  # as the dataloader counts them
        script, lora, args = parse_train_arguments(config, [])
        trainer = build_trainer(script, lora, args)
        slots = len(trainer.get_train_dataloader())  # one a micro-batch
        counted = Batches.of(args, prompts=3)
        assert counted.updates_per_epoch == slots // args.gradient_accumulation_steps


def test_some_processes_score_for_all(tmp_path):
    config = write(tmp_path, "sd3", num_generations=4, steps_per_generation=4)
    for wanted, processes, each in ((None, 8, 8), (1, 1, 64), (2, 2, 32), (3, 3, 24)):
        words = [] if wanted is None else ["--reward_processes", str(wanted)]
        made = plan(config, words, LaunchArguments("multi_gpu", num_processes=8)).batches
        assert (made.reward_processes, made.samples_per_reward_process) == (processes, each)
    with pytest.raises(ValueError, match="reward_processes=9 is more than the 8 processes"):
        plan(config, ["--reward_processes", "9"], LaunchArguments("multi_gpu", num_processes=8))


def test_each_mode_divides_what_it_says(tmp_path):
    config = write(tmp_path, "sd3")
    alone = {item.name: item for item in plan(config, []).memory}
    for mode, parameters, gradients, optimizer in (
        ("multi_gpu", 1, 1, 1),
        ("zero1", 1, 1, 4),
        ("zero2", 1, 4, 4),
        ("zero3_offload", 4, 4, 4),
        ("fsdp2", 4, 4, 4),
    ):
        shared = {item.name: item for item in plan(config, [], LaunchArguments(mode, num_processes=4)).memory}
        masters = alone["gradients"].accelerator if mode.startswith("zero") else 0  # DeepSpeed's float32 copies
        expected = {
            "parameters": -(-alone["parameters"].accelerator // parameters),
            "gradients": -(-alone["gradients"].accelerator // gradients),
            "optimizer": -(-(alone["optimizer"].accelerator + masters) // optimizer),
        }
        where = "cpu" if mode.endswith("offload") else "accelerator"
        assert {name: getattr(shared[name], where) for name in expected} == expected
        assert ("gradient buckets" in shared) == (mode == "multi_gpu")
        assert ("gathered block" in shared) == (parameters > 1)


def test_offloads_move_bytes_to_the_cpu(tmp_path):
    config = write(tmp_path, "sd3", use_peft=False, beta=0.1)
    words = ["--offload_frozen", "cpu", "--offload_ref_model", "true", "--offload_trajectories", "true"]
    here, away = ({item.name: item for item in plan(config, given).memory} for given in ([], words))
    for name in ("frozen parts", "reference", "trajectory"):
        assert (away[name].accelerator, away[name].cpu) == (0, here[name].accelerator) != (0, 0)


def test_eight_bit_states_are_a_byte_a_value_and_a_scale_a_block():
    _, _, args = parse_train_arguments(None, "--model a/b --dataset x --reward_funcs y --optim adamw_8bit".split())
    large, small = torch.nn.Parameter(torch.empty(64, 100)), torch.nn.Parameter(torch.empty(10))
    assert count_optimizer_bytes([large, small], args) == 2 * (6400 + 4 * 25) + 2 * 4 * 10


def test_a_distribution_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="MEGATRON_LM is not planned"):
        Sharding.of({"distributed_type": "MEGATRON_LM", "num_processes": 2})


def test_the_command_prints_tables_and_json(tmp_path, capsys):
    config = write(tmp_path, "sd3", num_processes=4, accelerate_config="fsdp2")
    assert cli.main(["plan", config, "--num_generations", "8"]) == 0
    out = capsys.readouterr().out
    assert "samples per rollout" in out and "fsdp2" in out and "trajectory" in out
    assert cli.main(["plan", config, "--json", "--accelerate_config", "zero2"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["batches"]["processes"] == 4 and made["sharding"]["name"] == "zero2"
    assert made["total"]["accelerator"] == sum(item["accelerator"] for item in made["memory"])


def test_no_weights_are_needed(tmp_path, capsys):
    config = write(tmp_path, "sd3")
    for file in (tmp_path / "model").rglob("*.safetensors"):
        file.unlink()
    assert [item.name for item in plan(config, []).memory][:3] == ["parameters", "gradients", "optimizer"]


def test_a_model_that_is_not_here_leaves_the_batches(capsys):
    words = ["plan", "examples/sd35_ocr.yaml", "--num_processes", "8"]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "prompts per rollout │ 48" in out
    assert "stable-diffusion-3.5-medium is not here" in out and "--model FOLDER" in out


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_is_planned_on_a_machine_without_an_accelerator(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert not torch.cuda.is_available()
    words = ["--output_dir", str(tmp_path / "run")]
    if file.stem in STAND_INS:
        build(STAND_INS[file.stem])[0].save_pretrained(tmp_path / "model")
        words += ["--model", str(tmp_path / "model")]
    made = plan(str(file), words)
    settings = yaml.safe_load(file.read_text())
    assert made.batches.samples_per_prompt == settings["num_generations"]
    if file.stem in STAND_INS or settings["model"] == "tiny":
        assert {item.name for item in made.memory} >= {"parameters", "gradients", "optimizer", "frozen parts"}
    else:
        assert "is not here" in made.notes[0]


@pytest.mark.parametrize(
    ("words", "bf16"), [("--bf16 true --tf32 true", True), ("--fp16 true", False), ("--bf16 false", False), ("", True)]
)
def test_the_precision_is_that_of_the_target(words, bf16):
    args = parse_train_arguments(str(EXAMPLES / "demo.yaml"), words.split(), make_planned_config(2))[2]
    assert (args.bf16, args.fp16, args.tf32) == (bf16, "fp16" in words, True if "tf32" in words else None)
    assert not args.use_cpu
    with pytest.raises(ValueError, match="At most one of fp16 and bf16"):
        parse_train_arguments(
            str(EXAMPLES / "demo.yaml"), ["--bf16", "true", "--fp16", "true"], make_planned_config(2)
        )


def test_what_this_machine_has_does_not_count(monkeypatch):
    config = str(EXAMPLES / "sd35_ocr.yaml")
    monkeypatch.setattr("diffusion_grpo.distributed.launch.count_accelerators", lambda: 8)
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    made = plan(config, [], LaunchArguments("zero3"))
    assert made.batches.processes == 1 and "add --num_processes N" in made.notes[0]
    assert plan(config, [], LaunchArguments("zero3", num_processes=2)).batches.processes == 2
    assert "num_processes" not in plan(config, []).notes[0]


def test_the_plan_refuses_what_the_training_refuses(tmp_path, capsys):
    config = write(tmp_path, "sd3")
    capsys.readouterr()
    assert "does not divide" in refusal(capsys, "plan", config, "--num_generations", "3")
    assert "`num_generations`" in refusal(capsys, "plan", config, "--num_generation", "4")
    assert "there is no file" in refusal(capsys, "plan", "nothing.yaml")
    assert "there is no folder" in refusal(capsys, "plan", config, "--model", "./nothing")
    assert "nearest is zero3" in refusal(capsys, "plan", config, "--accelerate_config", "zero4")
