"""The plan is what happens: its bytes are those that a run really allocates, its counts those of the run."""

import gc
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from command_line import refusal
from planned_runs import EXAMPLES, STAND_INS, write_run
from tiny_pipelines import build
from tiny_runs import brightness  # noqa: F401  named by its dotted path below
from transformers import TrainerCallback

from benchmarks.gpu_cases import write_settings
from benchmarks.gpu_sizes import choose_settings
from benchmarks.real_sizes import write_model
from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.arguments import LaunchArguments
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.planning.batches import count_evaluations
from diffusion_grpo.planning.measure import CallSizes
from diffusion_grpo.planning.plan import make_planned_config, plan, read_run
from diffusion_grpo.planning.sharding import Sharding
from diffusion_grpo.policy.stochastic_steps import StochasticScheduler
from diffusion_grpo.training.memory import weigh_run


def size(tensors):
    """Bytes of tensors, each once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


class Allocated(TrainerCallback):
    """What lies in memory right before the optimizer's step, and after it."""

    def __init__(self):
        self.trainer = None
        self.bytes: dict[str, int] = {}
        self.weighed: dict[str, int] = {}  # what the message about a lack of memory says

    def weigh(self):
        trainer = self.trainer
        return weigh_run(trainer.model, trainer.pipe, trainer.optimizer, trainer.loader)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = list(self.trainer.model.parameters())
        self.bytes["parameters"] = size([*parameters, *self.trainer.model.buffers()])
        self.bytes["gradients"] = size(p.grad for p in parameters if p.grad is not None)
        self.weighed = self.weigh()

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        self.weighed["optimizer"] = self.weigh()["optimizer"]
        states = trainer.optimizer.state.values()
        self.bytes["optimizer"] = size(x for state in states for x in state.values() if torch.is_tensor(x))
        samples = trainer.loader.buffer.samples
        self.bytes["trajectory"] = size(tensor for sample in samples for tensor in sample.tensors().values())
        parts = [part for part in trainer.pipe.components.values() if isinstance(part, torch.nn.Module)]
        networks = trainer.policy.networks
        self.bytes["frozen parts"] = size(
            x for part in parts if not any(part is n for n in networks) for x in (*part.parameters(), *part.buffers())
        )
        if trainer.learner.reference is not None and trainer.learner.reference.module is not None:
            module = trainer.learner.reference.module
            self.bytes["reference"] = size([*module.parameters(), *module.buffers()])
        if trainer.learner.average is not None:
            self.bytes["moving average"] = size(trainer.learner.average.average.shadow_params)
        if trainer.learner.old_policy is not None:
            self.bytes["old policy"] = size(trainer.learner.old_policy.average.shadow_params)


def allocated(config):
    """A run of one update, the bytes it took by kind, and those that a message about a lack of memory would say."""
    script, lora, args = parse_train_arguments(config, [])
    trainer, seen = build_trainer(script, lora, args), Allocated()
    seen.trainer = trainer
    trainer.add_callback(seen)
    trainer.train()
    return trainer, seen.bytes, seen.weighed


RUNS = [  # in tests of every push
    ("flux", {"bf16": True, "ema_decay": 0.9, "optim": "sgd", "best_of_n": 2, "num_generations": 4}),
    ("glm_image", {"train_component": "vision_language_encoder", "beta": 0.1, "top_p": 0.8}),
]
MORE = [
    ("wan", {"bf16": True, "trained_steps": [0, 1]}),  # keeps some layers in float32 among the bf16 ones
    ("sd3", {"use_peft": False, "bf16": True, "beta": 0.1, "optim": "adafactor"}),
    ("sd3", {"loss_type": "nft", "trained_steps": [1, 3]}),
    ("sd3", {"loss_type": "dppo", "num_iterations": 2}),  # the means of the policy that rolled out
    ("sd3", {"loss_type": "dpo", "use_peft": False}),
    ("sd3", {"loss_type": "draft", "reward_funcs": ["brightness"]}),
    ("glm_image", {}),  # its language model writes tokens that are kept with the steps
]


@pytest.mark.parametrize(("name", "settings"), RUNS + [pytest.param(*run, marks=pytest.mark.slow) for run in MORE])
def test_planned_bytes_are_the_allocated_ones(name, settings, tmp_path):
    config = write_run(tmp_path, name, **settings)
    made = plan(config, [])
    planned = {item.name: item.accelerator for item in made.memory if not item.phase}
    trainer, real, weighed = allocated(config)
    assert weighed == {kind: real[kind] for kind in weighed}
    if "best_of_n" in settings:  # what is recorded of all samples is freed but for the best ones
        real["trajectory"] *= settings["num_generations"] // settings["best_of_n"]
    assert planned == real
    assert made.model["weights"] == sum(p.numel() for p in trainer.model.parameters())


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """The run of a LoRA, and what its plans share."""
    return write_run(tmp_path_factory.mktemp("lora"), "sd3"), {}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The run of full training with a reference, and what its plans share."""
    return write_run(tmp_path_factory.mktemp("full"), "sd3", use_peft=False, beta=0.1), {}


@pytest.fixture(scope="module")
def tables():
    """Bytes of the tables of positions, which each process has whole."""
    return size(build("sd3")[0].transformer.buffers())


def rows(run, *words, mode=None, processes=4):
    """What is planned, by name."""
    config, cache = run
    launch = None if mode is None else LaunchArguments(mode, num_processes=processes)
    return {item.name: item for item in plan(config, list(words), launch, cache).memory}


@pytest.mark.parametrize(
    ("mode", "parameters", "gradients", "optimizer"),
    [("multi_gpu", 1, 1, 1), ("zero1", 1, 1, 4), ("zero2", 1, 4, 4), ("zero3_offload", 4, 4, 4), ("fsdp2", 4, 4, 4)],
)
def test_each_mode_divides_what_it_says(mode, parameters, gradients, optimizer, lora, tables):
    alone, shared = rows(lora), rows(lora, mode=mode)
    masters = alone["gradients"].accelerator  # DeepSpeed's float32 copies
    # it steps one tensor of all weights, so that there is one number of steps
    states = 3 * masters + 4 if mode.startswith("zero") else alone["optimizer"].accelerator
    expected = {
        "parameters": -(-(alone["parameters"].accelerator - tables) // parameters),
        "gradients": -(-alone["gradients"].accelerator // gradients),
        "optimizer": -(-states // optimizer),
    }
    where = "cpu" if mode.endswith("offload") else "accelerator"
    planned = {name: getattr(shared[name], where) for name in expected}
    if where == "accelerator":
        planned["parameters"] -= tables
    else:
        assert shared["parameters"].accelerator == tables > 0
    assert planned == expected
    assert ("gradient buckets" in shared) == (mode == "multi_gpu")
    assert ("gathered block" in shared) == (mode == "fsdp2")
    assert ("gathered blocks" in shared) == (mode == "zero3_offload")
    networks = alone["parameters"].accelerator if parameters == 1 else 0  # those that are sharded stay in files
    assert shared["pipeline as it is loaded"].cpu == alone["frozen parts"].accelerator + networks


@pytest.mark.parametrize(
    ("mode", "setting", "is_default"),
    [("zero3", "ds3_gather_for_generation", True), ("fsdp2", "fsdp_gather_for_generation", False)],
)
def test_networks_that_are_gathered_whole_are_there_while_samples_are_made(mode, setting, is_default, full, tables):
    whole, layers = (rows(full, f"--{setting}", value, mode=mode) for value in ("true", "false"))
    assert rows(full, mode=mode)["denoising"] == (whole if is_default else layers)["denoising"]
    alone = {name: item.accelerator for name, item in rows(full).items()}
    gathered = ("parameters", "reference") if mode == "zero3" else ("parameters",)  # FSDP2 gathers the policy only
    network = sum(alone[name] - layers[name].accelerator for name in gathered)
    assert whole["denoising"].accelerator - layers["denoising"].accelerator == network
    assert whole["activations"] == layers["activations"]  # updates gather block by block
    assert whole["reference"].accelerator == -(-(alone["reference"] - tables) // 4) + tables


def test_deepspeed_casts_weights_of_its_engines_and_no_buffers(full, tables):
    """The reference is in an engine only under ZeRO-3, if it is not offloaded."""
    weights = size(build("sd3")[0].transformer.parameters())  # in float32

    def planned(mode, *words):
        memory = rows(full, "--bf16", "true", *words, mode=mode, processes=2)
        return {name: (item.accelerator, item.cpu) for name, item in memory.items()}

    plain, sharded = planned("zero1"), planned("zero3")
    assert plain["parameters"] == (weights // 2 + tables, 0) and plain["reference"] == (weights + tables, 0)
    assert sharded["parameters"] == sharded["reference"] == (weights // 4 + tables, 0)
    away = planned("zero3", "--offload_ref_model", "true")["reference"]
    assert away == (0, weights + tables)
    # FSDP2 casts nothing, and divides an offloaded reference too
    shares = planned("fsdp2", "--offload_ref_model", "true")
    assert shares["parameters"] == (weights // 2 + tables, 0) and shares["reference"] == (tables, weights // 2)


def test_adafactor_cannot_factor_the_weights_that_deepspeed_makes_flat(full):
    weights = sum(p.numel() for p in build("sd3")[0].transformer.parameters())
    flat, plain = (rows(full, "--optim", "adafactor", mode=mode, processes=1) for mode in ("zero2", "single_gpu"))
    assert flat["optimizer"].accelerator == pytest.approx((4 + 4) * weights, rel=1e-3)  # float32 copies, and one value
    assert plain["optimizer"].accelerator < weights


def test_offloads_move_bytes_to_the_cpu(full):
    """A reference in CPU memory is on the accelerator for its pass."""
    words = ["--offload_frozen", "cpu", "--offload_ref_model", "true", "--offload_trajectories", "true"]
    here, away = (rows(full, "--gradient_checkpointing", "true", *more) for more in ([], words))
    for name in ("frozen parts", "reference", "trajectory"):
        assert (away[name].accelerator, away[name].cpu) == (0, here[name].accelerator) != (0, 0)
    visiting = here["reference"].accelerator + here["denoising"].accelerator
    assert away["activations"].accelerator == visiting > here["activations"].accelerator


# the processor of Qwen-Image-Edit can only be saved beside torchvision
# the tiny networks of the last three cannot make images of the example's size
SAVED = STAND_INS.keys() - {"qwen_image_edit", "flux2_klein", "sana_sprint", "z_image_turbo"}


def allow_large_images(config):
    """Let a tiny network of SD3's class have the table of positions that the real one has."""
    if config.is_file() and "pos_embed_max_size" in (values := json.loads(config.read_text())):
        config.write_text(json.dumps(values | {"pos_embed_max_size": 192}))


@pytest.fixture
def uncollected():
    """Collect no garbage: weak references to tensors that nothing holds must not decide what can be planned."""
    gc.disable()
    yield
    gc.enable()


# The others are planned only with "make test-all".
PLANNED = ("demo", "sd35_ocr")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=() if file.stem in PLANNED else pytest.mark.slow)
        for file in sorted(EXAMPLES.glob("*.yaml"))
    ],
)
def test_every_example_is_planned_on_a_machine_without_an_accelerator(file, tmp_path, monkeypatch, uncollected):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert not torch.cuda.is_available()
    words = ["--output_dir", str(tmp_path / "run")]
    if file.stem in SAVED:
        build(STAND_INS[file.stem])[0].save_pretrained(tmp_path / "model")
        words += ["--model", str(tmp_path / "model")]
        words += ["--pipeline_kwargs", "{audio_end_in_s: 1.0}"] if file.stem == "stable_audio" else []
        allow_large_images(tmp_path / "model" / "transformer" / "config.json")
    made = plan(str(file), words)
    settings = yaml.safe_load(file.read_text())
    assert made.batches["samples_per_prompt"] == settings["num_generations"]
    if file.stem in SAVED or settings["model"] == "tiny":
        kinds = {"parameters", "gradients", "optimizer", "frozen parts", "trajectory", "activations"}
        assert {item.name for item in made.memory} >= kinds, made.notes
        assert not any("without weights" in note for note in made.notes)
    else:
        assert "is not available here" in made.notes[0]


CARDS = {  # examples for a card of 24 GB: the sizes that they are planned at
    "flux": "FLUX.1-dev",
    "qwen_image": "Qwen-Image",
    "sd35_large": "SD3.5-L",
    "sdxl": "SDXL",
    "wan21": "Wan2.1-1.3B",
    "wan22_ti2v": "Wan2.2-TI2V-5B",
}


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("24gb/*.yaml")), ids=lambda file: file.stem)
def test_examples_for_one_card_take_what_they_say(file, tmp_path, monkeypatch):
    """At real sizes: at most 22 GiB, and as much as the first lines of the file say."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_model(CARDS[file.stem], tmp_path / "model")
    made = plan(str(file), ["--output_dir", str(tmp_path / "run"), "--model", str(folder)])
    said = re.search(r"# Planned: at most ([\d.]+) GiB", file.read_text()).group(1)
    assert f"{made.total.accelerator / 2**30:.1f}" == said
    assert float(said) <= 22 and not made.notes
    phases = {item.phase for item in made.memory}
    assert phases >= {"preparing", "denoising", "decoding", "update"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("FLUX.1-dev, LoRA, bf16", "flux-bf16"),
        ("FLUX.1-dev, LoRA, nf4", "flux-nf4"),
        ("SD3.5-M, LoRA, guidance 4.5", "sd35m-lora"),
        ("SD3.5-M, all weights, guidance 4.5", "sd35m-full"),
        ("SDXL at 1024 px, LoRA, guidance 5.0", "sdxl"),
    ],
)
def test_a_plan_is_within_a_tenth_of_what_an_h100_took(row, name, tmp_path):
    page = (EXAMPLES.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    cells = next(line for line in page.splitlines() if line.startswith(f"| {row} |")).strip("| ").split(" | ")
    settings = choose_settings(name, tmp_path, is_tiny=False) | {"use_cpu": False}
    made = plan(str(write_settings(settings, tmp_path)), [])
    assert made.total.accelerator / 2**30 == pytest.approx(float(cells[-2]), rel=0.1)


@pytest.mark.parametrize(("words", "bf16"), [("--fp16 true", False), ("--bf16 false", False), ("", True)])
def test_the_precision_is_that_of_the_target(words, bf16):
    args = parse_train_arguments(str(EXAMPLES / "demo.yaml"), words.split(), make_planned_config(2))[2]
    assert (args.bf16, args.fp16, args.use_cpu) == (bf16, "fp16" in words, False)


def test_what_this_machine_has_does_not_count(monkeypatch):
    config = str(EXAMPLES / "sd35_ocr.yaml")
    monkeypatch.setattr("diffusion_grpo.distributed.launch.count_accelerators", lambda: 8)
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    for processes, told in ((None, "add --num_processes N"), (2, "is not available here")):
        made = plan(config, [], LaunchArguments("zero3", num_processes=processes))
        assert made.batches["processes"] == (processes or 1) and told in made.notes[0]


def test_the_plan_refuses_what_the_trainer_refuses(tmp_path, capsys):
    config = write_run(tmp_path, "sd3")
    capsys.readouterr()
    assert "does not divide" in refusal(capsys, "plan", config, "--num_generations", "3")
    assert "there is no folder" in refusal(capsys, "plan", config, "--model", "./nothing")
    fsdp2 = ("plan", config, "--accelerate_config", "fsdp2", "--num_processes", "8")
    assert "cannot step FSDP2's sharded tensors" in refusal(capsys, *fsdp2, "--optim", "adamw_bnb_8bit")
    assert "cannot shard bitsandbytes_8bit's weights" in refusal(capsys, *fsdp2, "--load_in_8bit", "true")


def test_passes_on_renoised_samples_are_counted(tmp_path):
    """Guidance counts twice in the rollout and is off in the update: 4 steps, then 2 of the 3 that can be trained."""
    made = plan(write_run(tmp_path, "sd3", loss_type="nft", trained_steps=[1, 3], beta=0.1), [])
    assert made.evaluations == {
        "in one step": 2,
        "rollout": 8,
        "update, with gradient": 2,
        "reference in the update": 2,
        "old policy": 2,
        "change of the predictions": 4,
    }
    sizes = {"num_generations": 4, "num_inference_steps": 4, "num_iterations": 2, "use_cpu": True}
    twice = count_evaluations(DiffusionGRPOConfig(str(tmp_path), loss_type="dpo", **sizes))
    assert twice["reference in the update"] == twice["update, with gradient"] == 6
    assert not {"errors before the first update", "old policy"} & twice.keys()
    twice = count_evaluations(DiffusionGRPOConfig(str(tmp_path), loss_type="awm", **sizes))
    assert twice["errors before the first update"] == 3
    for settings, passes in (({"num_trained_steps": 2}, 2), ({"trained_steps": "all"}, (4 + 3 + 2 + 1) / 4)):
        args = DiffusionGRPOConfig(str(tmp_path), loss_type="draft", beta=0.1, **sizes, **settings)
        found = count_evaluations(args)  # through all steps from the one at which the gradient ends
        assert found["update, with gradient"] == found["reference in the update"] == 2 * passes


def test_passes_of_a_language_model_are_counted_in_tokens(tmp_path):
    """One pass for each token, then one that scores them all; each update, and its reference, scores them again."""
    settings = {"train_component": "vision_language_encoder", "beta": 0.1, "num_iterations": 2, "max_steps": 2}
    config = write_run(tmp_path, "glm_image", **settings)
    made = plan(config, [])
    script, lora, args = parse_train_arguments(config, [])
    trainer, passes = build_trainer(script, lora, args), {True: 0, False: 0}

    def count(*_):
        passes[torch.is_grad_enabled()] += 1

    trainer.policy.network.lm_head.register_forward_pre_hook(count)
    trainer.train()
    batches, evaluations = made.batches, made.evaluations
    assert batches["trained_tokens"] == trainer.loader.buffer.samples[0].ids.shape[1] > 1
    assert evaluations["rollout, one per token"] == batches["trained_tokens"]
    assert batches["updates_per_rollout"] == trainer.state.global_step == 2
    micro_batches = batches["pipeline_calls"]  # of one pass over the rollout
    assert passes[True] == micro_batches * evaluations["update, with gradient"]
    rest = ("rollout, one per token", "scores of the rollout's tokens", "reference in the update")
    rest += ("change of the predictions",)
    assert passes[False] == micro_batches * sum(evaluations[name] for name in rest)


@pytest.mark.parametrize(("order", "size"), [("rollout", 2), ("sliding", 2), ("rollout", None)])
def test_calls_that_branches_share_are_counted_once_for_all_of_them(order, size, tmp_path):
    """On average over all places of the window; the last of them is trained on."""
    given = {"num_generations": 24, "samples_per_latent": 6, "num_inference_steps": 10, "trained_steps": [2, 8]}
    given |= {"num_trained_steps": size, "step_selection": order, "noisy_steps": "trained"}
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=24, **given)
    starts = [2] if size is None else [2, 3, 4, 5, 6]
    expected = sum((24 // 6 * (start + 1) + 24 * (9 - start)) / 24 for start in starts) / len(starts)
    found = count_evaluations(args)
    assert found["rollout"] == pytest.approx(expected)
    assert found["update, with gradient"] == pytest.approx(args.trained_count - 5 / 6)


NOISY = {"noisy_steps": "all"}


@pytest.mark.parametrize(
    ("settings", "trained", "rows"),
    [
        ({"trained_steps": [0, 1], "noisy_steps": "trained"}, 1 / 8, 3),
        ({"trained_steps": [0, 2], "per_device_train_batch_size": 4}, 1 + 1 / 4, 4),
        ({"trained_steps": [1, 3]} | NOISY, 2, 24),  # all steps draw noise, and the first is not trained
        ({"trained_steps": [0, 2], "num_trained_steps": 1} | NOISY, (1 / 8 + 1) / 2, 24),  # in half of the rollouts
        ({"trained_steps": [0, 1], "best_of_n": 2, "steps_per_generation": 6}, 1 / 2, 12),
        ({"trained_steps": [0, 1], "advantage_estimator": "gae"}, 1, 24),
    ],
)
def test_samples_of_one_latent_are_counted_once_in_their_first_call(settings, trained, rows, tmp_path):
    """In the update at most the trained samples of a micro-batch share it."""
    given = {"num_generations": 8, "num_inference_steps": 4, "samples_per_latent": "group", "beta": 0.1}
    given |= {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 6}
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, **given | settings)
    found = count_evaluations(args)
    is_shared = settings.get("advantage_estimator") != "gae"
    assert found["rollout"] == pytest.approx(1 / 8 + 3 if is_shared else 4)
    assert found["update, with gradient"] == found["reference in the update"] == pytest.approx(trained)
    assert CallSizes.of(args) == CallSizes(args.per_device_train_batch_size, args.per_device_train_batch_size, rows)


def test_calls_that_a_pipeline_cannot_share_are_not_counted_as_shared(tmp_path, monkeypatch):
    """As those of Cosmos, whose scheduler gets more than the prediction."""
    config = write_run(tmp_path, "flux", trained_steps=[1, 2])
    before = plan(config, [])
    monkeypatch.setattr(StochasticScheduler, "gets_more_of_network", property(lambda scheduler: True))
    after = plan(config, [])
    assert (before.evaluations["rollout"], after.evaluations["rollout"]) == (3, 3.5)  # two samples of one latent
    update = "update, with gradient"
    assert (before.evaluations[update], after.evaluations[update]) == (0.5, 1)
    activations = [item.accelerator for made in (before, after) for item in made.memory if item.name == "activations"]
    assert 1.8 < activations[1] / activations[0] < 2.2


@pytest.mark.parametrize("where", ["settings", "launcher"])
def test_deepspeeds_own_file_is_planned_without_starting_deepspeed(where, tmp_path, monkeypatch):
    """Which would look for MPI, and tell transformers that models are to be sharded."""
    monkeypatch.setattr("accelerate.utils.DeepSpeedPlugin.__post_init__", lambda self: pytest.fail("it was started"))
    own = str(tmp_path / "own.json")
    Path(own).write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    words, launch = ["--output_dir", str(tmp_path / "run")], LaunchArguments(num_processes=2)
    if where == "settings":
        words += ["--deepspeed", own]
    else:
        launch.accelerate_config = str(tmp_path / "launcher.yaml")
        config = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": own}}
        Path(launch.accelerate_config).write_text(yaml.safe_dump(config))
    (_, _, args), settings, notes = read_run(str(EXAMPLES / "demo.yaml"), words, launch)
    found = Sharding.of(settings)
    assert (found.name, found.processes, found.offload_parameters) == ("zero3", 2, True)
    assert args.world_size == 2 and not notes
    assert (found.live_weights, found.bucket) == (10**9, 0)


@pytest.mark.parametrize(("stage", "buckets"), [(2, 2), (3, 1)])
def test_what_deepspeeds_file_keeps_gathered_and_its_buckets_are_planned(stage, buckets, lora, tmp_path):
    zero = {"stage": stage, "stage3_max_live_parameters": 1e3, "reduce_bucket_size": 10**6, "overlap_comm": True}
    (tmp_path / "own.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    config, cache = lora
    words = ["--deepspeed", str(tmp_path / "own.json"), "--bf16", "true"]
    memory = {item.name: item for item in plan(config, words, LaunchArguments(num_processes=4), cache).memory}
    assert memory["gradient bucket"].accelerator == buckets * 2 * 10**6  # with `overlap_comm`, one is filled meanwhile
    assert stage == 2 or memory["gathered blocks"].accelerator == 2 * 1000
    assert stage == 2 or memory["gathered blocks"].phase == memory["activations"].phase  # rollouts gather all
