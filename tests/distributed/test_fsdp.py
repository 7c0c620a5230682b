"""FSDP2: each of two processes holds half of every weight, and they train what one trains; never DDP in silence."""

import json
import re
import types

import fsdp_run
import pytest
import ranks_server
import tiny_pipelines
import torch
from accelerate.utils import DistributedType
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from tiny_runs import GUIDED, OPTIONAL, SMOOTH, are_equal, difference, edited_images, trained_weights, trainer_for
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.distributed import fsdp
from diffusion_grpo.distributed.checkpoints import has_shards
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.fsdp import FSDP2Backend, gather_units
from diffusion_grpo.training.preflight import choose_backend

SETTINGS = {
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 3,
    "max_steps": 2,
}
FULL = SETTINGS | {"lora": False, "optim": "sgd", "learning_rate": 1e-2}
SAVED = {"save_strategy": "steps", "save_steps": 1}
AVERAGED = {"ema_decay": 0.9, "ema_update_interval": 1}
EXPERTS = {"name": "wan_experts", "num_inference_steps": 6, "beta": 0.1}
ONE_STEP = {"num_inference_steps": 5, "trained_steps": [1, 4], "num_trained_steps": 1, "noisy_steps": "trained"}
# the means of the policy that rolled out are replayed, and kept beside weighted steps
DPPO = {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-9}, "step_weight": "velocity", "beta": 0.1}
SEVERAL = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 3}
GUARD = SEVERAL | {"loss_type": "grpo_guard", "beta": 0.1}
UNEVEN = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
UNEVEN |= {"validation_prompts": ["one", "two", "three"], "validation_steps": 2}
QUICK = {
    "lora": SETTINGS | SAVED | {"beta": 0.1},
    # of each rank's two samples none makes a group: those span processes
    "full": FULL
    | {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "beta": 0.1}
    | {"eval_strategy": "steps", "eval_steps": 1, **SAVED, **AVERAGED},
}
TRAINED = QUICK | {
    "experts": SETTINGS | EXPERTS | SAVED,
    # the first expert is idle: it has no gradient, and no optimizer state to be saved and read
    "idle": SETTINGS | EXPERTS | SAVED | {"trained_steps": [3, 5], "num_trained_steps": 1, "noisy_steps": "trained"},
    "experts-full": FULL | EXPERTS | SAVED | {"context_parallel_size": 2},
    # all rewards of the second update are equal, so that Adam must not move either expert by its momentum
    "equal": SETTINGS | EXPERTS | {"beta": 0.0, "columns": {"weight": [1.0, 1.0, 0.0, 0.0]}, "shuffle_dataset": False},
    "dppo": SETTINGS | DPPO | SEVERAL | SAVED,
    "dppo-full": FULL | DPPO | SEVERAL,
    "guard": SETTINGS | GUARD | SAVED,
    "guard-full": FULL | GUARD,
    "optional": SETTINGS | OPTIONAL | {"beta": 0.1},
    "edited_images": SETTINGS,
    "values": SETTINGS | {"advantage_estimator": "gae", "num_generations": 1, "beta": 0.1},
    "context": SETTINGS | {"name": "wan", "context_parallel_size": 2, "gradient_checkpointing": True, "beta": 0.1},
    # each sample trains on steps of its own, so processes take different numbers of passes; uneven evaluations
    "permuted": SETTINGS
    | UNEVEN
    | {"num_trained_steps": 2, "step_selection": "sample", "num_inference_steps": 5}
    | {"optim": "sgd", "fsdp_gather_for_generation": True},
    # one process has two shapes in its micro-batch, the other one
    "mixed": SETTINGS
    | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "shuffle_dataset": False, "beta": 0.1}
    | {"columns": {"height": [32, 16, 32, 32], "width": [32, 16, 32, 32]}, "height": None, "width": None},
    # two passes of the network a step, several updates a rollout
    "wan": SETTINGS | SEVERAL | {"name": "wan", "beta": 0.1, "kl_reward": 0.1, "old_log_prob": "replay"},
    # one process takes more shared steps, or more calls, than the other
    "branches": SETTINGS | ONE_STEP | {"step_selection": "prompt", "samples_per_latent": 2},
    "per-prompt": SETTINGS | ONE_STEP | {"step_selection": "prompt"},
    "synced": FULL | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "offload_ref_model": True},
    "offloaded": FULL | SAVED | AVERAGED | {"offload": True},
    "bf16": SETTINGS | {"bf16": True, "beta": 0.1},
    "half": FULL | {"bf16": True, "gradient_checkpointing": True},
    "modular": SETTINGS | {"name": "modular_flux2", "guidance_scale": 4.0},
    "guided": SETTINGS | GUIDED | {"beta": 0.1},
    "weighted": SETTINGS
    | ONE_STEP
    | {"step_weight": "guard", "sde_type": "precise", "step_selection": "sliding", "step_interval": 1}
    | {"optim": "sgd", "learning_rate": 1.0},
    "noise": SETTINGS | {"step_weight": "noise", "sde_type": "wan_sde"},
}
RESUMED = ("lora", "full", "experts", "idle", "experts-full", "dppo", "guard")


def marked(cases):
    """The names of the cases, with those marked that run only where all do."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.distributed) for name in cases]


def results(folder, processes, cases):
    """What runs say of themselves, and their weights, by name: here, or with FSDP2 in two processes."""
    names = list(cases)
    if processes == 1:
        for name in names:
            fsdp_run.run(folder / name, dict(cases[name]))
    else:  # in a start for a few: what one start leaves in memory adds up
        for start in (names[i : i + 8] for i in range(0, len(names), 8)):
            own = {name: cases[name] for name in start}
            ranks_server.succeed(folder, processes, fsdp_run.run_all, folder, own, limit=600)
    return {
        name: (
            json.loads((folder / name / "result.json").read_text()),
            load_file(folder / name / "weights.safetensors"),
        )
        for name in names
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def cases(request, folder):
    """All of them only where tests ask for all: runs of two processes are the slowest tests."""
    items = [item for item in request.session.items if item.path == request.path]
    is_whole = any(item.get_closest_marker("distributed") for item in items)  # a folder's name is a keyword too
    return TRAINED | {"edited_images": SETTINGS | edited_images(folder / "images")} if is_whole else QUICK


@pytest.fixture(scope="module")
def together(folder, cases):
    return results(folder / "two", 2, cases)


@pytest.fixture(scope="module")
def alone(folder, cases):
    return results(folder / "one", 1, cases)


@pytest.mark.parametrize("case", marked(TRAINED))
def test_two_processes_train_what_one_trains(alone, together, case):
    """Each holds half of every weight, of frozen ones too: not DDP, which is what accelerate makes of FSDP on CPUs."""
    (one, weights), (two, shared) = alone[case], together[case]
    assert two["sharded"] == two["parameters"] and 0.45 < two["share"] < 0.55
    assert one["ratio"] == two["ratio"]
    assert two["ratio"] == 0.0 or case == "permuted"  # whose replays have other batches than its rollout
    assert one["rewards"][0] == two["rewards"][0]
    if case == "half":  # gradients of all weights are rounded in another order
        assert difference(weights, shared) < 1e-4
        return
    assert len(one["eval_rewards"]) == {"full": 2, "permuted": 1}.get(case, 0)
    for name in ("rewards", "eval_rewards"):
        assert one[name] == pytest.approx(two[name], abs=1e-6)
    assert one["kl"] == pytest.approx(two["kl"], rel=1e-3) and all(kl > 0 for kl in one["kl"][-1:])
    assert difference(weights, shared) < 1e-6


@pytest.mark.parametrize(
    ("case", "units"),
    [
        ("lora", {"JointTransformerBlock", "SD3Transformer2DModel"}),
        pytest.param("experts", {"WanTransformerBlock", "WanTransformer3DModel"}, marks=pytest.mark.distributed),
    ],
)
def test_blocks_and_networks_are_units(together, case, units):
    report, _ = together[case]
    assert {f"FSDP{unit}" for unit in units} <= set(report["units"])
    assert report["wrapper"].startswith("FSDP") or case == "experts"  # each is wrapped by itself


def test_what_is_saved_is_loaded_by_plain_diffusers(folder, together):
    pipe, _ = tiny_pipelines.build("sd3")
    pipe.load_lora_weights(folder / "two" / "lora" / "checkpoint-2")
    trained = {name: tensor for name, tensor in pipe.transformer.state_dict().items() if "lora_" in name}
    expected = together["lora"][1]
    assert len(trained) == len(expected)
    for name, tensor in trained.items():
        name = f"base_model.model.{name.replace('.default_0.', '.default.')}"
        assert torch.equal(tensor, expected[name])

    pipe = DiffusionPipeline.from_pretrained(folder / "two" / "full")
    assert type(pipe.transformer).__name__ == "SD3Transformer2DModel"
    state = pipe.transformer.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in together["full"][1].items())
    config = json.loads(
        (folder / "two" / "full" / "checkpoint-1" / "policy" / "transformer" / "config.json").read_text()
    )
    assert config["_class_name"] == "SD3Transformer2DModel"


@pytest.mark.distributed
def test_the_loras_of_two_experts_are_loaded_by_plain_diffusers(folder, together):
    pipe, _ = tiny_pipelines.build("wan_experts")
    point = folder / "two" / "experts" / "checkpoint-2"
    pipe.load_lora_weights(point)
    pipe.load_lora_weights(point / "transformer_2", load_into_transformer_2=True)
    for name in ("transformer", "transformer_2"):
        state = getattr(pipe, name).state_dict()
        trained = {re.sub(r"default_\d", "default", key): value for key, value in state.items() if "lora_" in key}
        prefix = f"{name}.base_model.model."
        expected = {key.removeprefix(prefix): value for key, value in together["experts"][1].items() if prefix in key}
        assert are_equal(expected, trained) and len(trained) > 0
        assert any(value.any() for key, value in expected.items() if "lora_B" in key)


@pytest.mark.parametrize("case", ["lora", pytest.param("full", marks=pytest.mark.distributed)])
def test_one_process_goes_on_where_two_with_shards_were(folder, tmp_path, alone, together, case):
    """Optimizer state included: AdamW without it would take another step."""
    point = folder / "two" / case / "checkpoint-1"
    assert has_shards(point)
    settings = {name: value for name, value in QUICK[case].items() if name not in SAVED}
    trainer = trainer_for(tmp_path, **SMOOTH, **settings)
    trainer.train(resume_from_checkpoint=str(point))
    assert difference(trained_weights(trainer), alone[case][1]) < 1e-6
    if case == "lora":
        mine = [state["exp_avg_sq"] for state in trainer.optimizer.state_dict()["state"].values()]
        path = folder / "one" / case / "checkpoint-2" / "optimizer.pt"
        theirs = [state["exp_avg_sq"] for state in torch.load(path, weights_only=True)["state"].values()]
        assert all(torch.allclose(*pair, rtol=1e-3, atol=1e-12) for pair in zip(mine, theirs, strict=True))


@pytest.mark.distributed
def test_two_processes_resume_their_own_checkpoint_bit_for_bit_and_that_of_one_process(folder, alone, together):
    """Also within a rollout, whose means come from the checkpoint; and with an expert that has not been trained."""
    points = {
        f"{case}-{origin}": TRAINED[case] | {"resume": str(folder / origin / case / "checkpoint-1")}
        for case in RESUMED
        for origin in (("one", "two") if case in ("lora", "full", "experts") else ("two",))
    }
    resumed = results(folder / "resumed", 2, points)
    for case in RESUMED:
        (report, weights), (expected, shared) = resumed[f"{case}-two"], together[case]
        assert difference(weights, shared) == 0.0 and report["kl"] == expected["kl"][-len(report["kl"]) :]
        assert f"{case}-one" not in resumed or difference(resumed[f"{case}-one"][1], alone[case][1]) < 1e-6
    for case in ("dppo", "guard"):
        assert "means.0" in load_file(folder / "two" / case / "checkpoint-1" / "rollout-rank0.safetensors")
    files = (folder / "two" / "idle" / "checkpoint-1" / "optimizer").glob("*.safetensors")
    assert all(name.startswith("transformer_2.") for file in files for name in load_file(file))


@pytest.mark.distributed
def test_two_groups_of_two_processes_train_what_one_trains(folder):
    cases = {"groups": SETTINGS | {"name": "wan", "context_parallel_size": 2, "beta": 0.1}}
    (single, weights), (double, shared) = (results(folder / f"groups{n}", n, cases)["groups"] for n in (1, 4))
    assert double["sharded"] == double["parameters"] and 0.2 < double["share"] < 0.3
    assert single["ratio"] == double["ratio"] == 0.0 and difference(weights, shared) < 1e-6


# Refusals


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "gradient_checkpointing=True"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_a_model_is_loaded(monkeypatch, tmp_path, environment, match):
    """As a launcher asks for it."""
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        choose_backend(DiffusionGRPOConfig(str(tmp_path), use_cpu=True, report_to="none"))


def test_settings_ask_as_a_launcher_does(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert not isinstance(choose_backend(DiffusionGRPOConfig(str(tmp_path), use_cpu=True)), FSDP2Backend)
    args = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, fsdp=True, fsdp_config={"version": 1})
    with pytest.raises(ValueError, match="fsdp_config={'version': 2}"):
        choose_backend(args)


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "2")
    return FSDP2Backend(None, ContextGroups(), {}, keeps_gathered=False)


def test_accelerate_may_not_train_in_another_way(backend):
    accelerator = types.SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, is_fsdp2=False, state=None)
    with pytest.raises(ValueError, match="accelerate would train with MULTI_GPU"):
        backend.bind(accelerator, torch.nn.Module(), [])


@pytest.mark.parametrize(
    ("run", "match"),
    [
        ({"own_steps": True}, "transformer, transformer_2 take turns.*step_selection='rollout'"),
        ({"draws_tokens": True}, "FSDP does not train.*token by token"),
    ],
)
def test_runs_that_sharded_weights_cannot_make_are_refused(backend, run, match):
    plain = {"processes": 2, "own_steps": False, "draws_tokens": False}
    with pytest.raises(ValueError, match=match):
        backend.check_run(("transformer", "transformer_2"), **plain | run)
    backend.check_run(("transformer", "transformer_2"), **plain)
    backend.check_run(("transformer",), **plain | {"own_steps": True})


def test_units_are_the_blocks_that_a_network_repeats():
    pipe, _ = tiny_pipelines.build("sd3")
    assert fsdp.find_repeated_blocks(pipe.transformer) == ["JointTransformerBlock"]
    assert fsdp.find_repeated_blocks(pipe.transformer, ["Attention"]) == ["Attention"]
    with pytest.raises(ValueError, match="has no Atention; it is made of .*Attention"):
        fsdp.find_repeated_blocks(pipe.transformer, ["Atention"])
    with pytest.raises(
        ValueError, match="Sequential does not declare its repeated.*fsdp_transformer_layer_cls_to_wrap"
    ):
        fsdp.find_repeated_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_each_of_several_networks_names_its_units():
    class Block(torch.nn.Linear):
        pass

    class Other(Block):
        pass

    networks = [torch.nn.Sequential(Block(2, 2)), torch.nn.Sequential(Other(2, 2))]
    for network in networks:
        network._repeated_blocks = ["Block", "Other"]
    plugin = types.SimpleNamespace(transformer_cls_names_to_wrap=None, cpu_offload=None)
    fsdp.configure_plugin(plugin, networks)
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Sequential", "Other"]


@pytest.fixture
def group_of_one():
    """A process group that this process has to itself."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.distributed
def test_after_a_rollout_an_update_gathers_as_before(group_of_one, is_kept):
    """Blocks are gathered again for the backward pass; what is outside of them stays from the forward pass on."""
    plugin = types.SimpleNamespace(reshard_after_forward=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)

    def gathered():
        return [not isinstance(layer.weight, DTensor) for layer in model]

    with gather_units(model, types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), is_kept):
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert gathered() == [is_kept, True]
    assert gathered() == [False, False]
    output = model(torch.ones(2, 4))
    assert gathered() == [False, True]
    output.sum().backward()
    assert gathered() == [False, False]
