"""A network that will be sharded stays in its file until then, and is what it would be if it were loaded at once."""

import copy
import json

import pytest
import rank_runs
import ranks_server
import tiny_pipelines
import torch
from diffusers import SD3Transformer2DModel, TorchAoConfig, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from tiny_runs import are_equal
from torchao.quantization import Int8WeightOnlyConfig

from diffusion_grpo.distributed.late_weights import copy_held, fill, find_dtype, hold, is_waiting, load_held, read_late


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny SD3 and Wan, saved in float32 and in bfloat16; one in several files."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("sd3", "wan"):
        pipe, _ = tiny_pipelines.build(name)
        pipe.save_pretrained(folder / f"{name}-float32")
        pipe.to(torch.bfloat16).save_pretrained(folder / f"{name}-bfloat16", max_shard_size="20KB")
    assert len(list((folder / "wan-bfloat16" / "transformer").glob("*.safetensors"))) > 1
    return folder


def mapped_files(tensor):
    """Return the file that a tensor's memory is mapped from, if any."""
    place = tensor.data_ptr()
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= place < last:
                return line.split()[5:]
    return []


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize(("name", "network"), [("sd3", SD3Transformer2DModel), ("wan", WanTransformer3DModel)])
def test_a_network_in_its_file_is_the_one_that_is_loaded_at_once(folder, name, network, saved, asked):
    """Weights, tables that are saved and tables that are not; what Wan keeps in float32 too."""
    path = folder / f"{name}-{saved}" / "transformer"
    whole = network.from_pretrained(path, torch_dtype=asked)
    with read_late(["transformer"]):
        late = network.from_pretrained(path, torch_dtype=asked)
    for own, parameter in late.named_parameters():
        assert is_waiting(parameter) and parameter.isnan().all()
        assert parameter.untyped_storage().nbytes() <= 4
        assert (parameter.dtype, parameter.shape) == (whole.get_parameter(own).dtype, whole.get_parameter(own).shape)
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in late.state_dict().items())  # shows its values
    assert all(map(is_waiting, late.parameters()))
    fill(late.parameters())
    assert not any(map(is_waiting, late.parameters()))
    assert all(torch.equal(tensor, expected[key]) for key, tensor in late.state_dict().items())
    for own, buffer in whole.named_buffers():
        assert torch.equal(late.get_buffer(own), buffer) and late.get_buffer(own).dtype == buffer.dtype


def test_other_networks_are_loaded_as_always(folder):
    with read_late(["unet"]):
        network = SD3Transformer2DModel.from_pretrained(folder / "sd3-float32" / "transformer")
    assert not any(map(is_waiting, network.parameters()))
    config = TorchAoConfig(Int8WeightOnlyConfig())
    with read_late(["transformer"]):  # quantised as it is loaded
        network = SD3Transformer2DModel.from_pretrained(
            folder / "sd3-float32" / "transformer", quantization_config=config, dtype=torch.float32
        )
    assert not any(map(is_waiting, network.parameters()))
    with read_late(["transformer"]), pytest.raises(OSError, match="config.json"):
        SD3Transformer2DModel.from_pretrained(folder)
    network = SD3Transformer2DModel.from_pretrained(folder / "sd3-float32" / "transformer")
    assert not any(map(is_waiting, network.parameters()))


def test_frozen_weights_of_the_right_dtype_stay_in_the_file_and_trained_ones_are_copied(folder):
    path = folder / "sd3-bfloat16" / "transformer"
    with read_late(["transformer"]):
        network = SD3Transformer2DModel.from_pretrained(path, torch_dtype=torch.bfloat16)
    frozen, trained = list(network.parameters())[:2]
    frozen.requires_grad_(False)
    fill([frozen, trained])
    assert str(path) in mapped_files(frozen)[0] and not any(str(path) in name for name in mapped_files(trained))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2, bias=False)
        self.outer = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        return self.outer(self.inner(x)) * self.table


def make_held(dtype=torch.float32):
    torch.manual_seed(0)
    network = Network()
    return network, hold(copy.deepcopy(network), dtype)


def test_the_first_call_fills_a_network_in():
    network, late = make_held()
    x = torch.ones(1, 2)
    assert torch.equal(late(x), network(x)) and not any(map(is_waiting, late.parameters()))
    assert torch.equal(late(x), network(x))


def test_each_dtype_on_the_way_rounds():
    network, late = make_held(torch.bfloat16)
    hold(late, torch.float32)
    assert late.inner.weight.dtype == torch.float32
    fill(late.parameters())
    assert torch.equal(late.inner.weight, network.inner.weight.to(torch.bfloat16).float())


def test_a_copy_holds_back_what_the_model_does_and_is_its_own():
    network, late = make_held()
    twin = copy_held(late)
    assert all(map(is_waiting, twin.parameters()))
    fill(late.parameters())
    with torch.no_grad():
        late.inner.weight.zero_()
    x = torch.ones(1, 2)
    assert torch.equal(twin(x), network(x))  # its hooks are its own too


def test_files_that_are_loaded_take_the_place_of_the_first():
    network, late = make_held()
    other = {name: tensor + 1 for name, tensor in network.state_dict().items()}
    load_held(late, other)
    assert all(map(is_waiting, late.parameters())) and torch.equal(late.table, other["table"])
    fill(late.parameters())
    assert all(torch.equal(tensor, other[name]) for name, tensor in late.state_dict().items())
    load_held(late, network.state_dict())  # nothing waits: as torch does it
    assert all(torch.equal(tensor, late.state_dict()[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("wrong", [{"more": torch.ones(1)}, {"inner.weight": torch.ones(3, 3)}, {}], ids=str)
def test_files_of_another_network_are_refused(wrong):
    network, late = make_held()
    tensors = network.state_dict() | wrong
    if not wrong:
        del tensors["inner.weight"]
    with pytest.raises(RuntimeError, match="inner.weight|more"):
        load_held(late, tensors)


def test_the_dtype_of_files(tmp_path):
    half, full = {"a": torch.ones(2, dtype=torch.bfloat16)}, {"b": torch.ones(2), "n": torch.ones(2).int()}
    mixed = half | {"c": torch.ones(2, dtype=torch.float16)}
    double = {"d": torch.ones(2, dtype=torch.float64), "mask": torch.ones(2, dtype=torch.bool)}
    for tensors, expected in (
        (half, torch.bfloat16),
        (half | full, torch.float32),
        (mixed, torch.float32),
        (double, None),
    ):
        paths = [tmp_path / f"{name}.safetensors" for name in tensors]
        for path, (name, tensor) in zip(paths, tensors.items(), strict=True):
            save_file({name: tensor}, path)
        assert find_dtype(tensors, []) is find_dtype(None, paths) is expected
    assert find_dtype({}, []) is find_dtype(None, [tmp_path / "old.bin"]) is None


# Runs

SHORT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_inference_steps": 3, "max_steps": 2}
SHORT |= {"bf16": True, "beta": 0.1, "save_strategy": "steps", "save_steps": 1, "optim": "sgd"}
CASES = {  # each from files in the dtype that has to be converted
    "full": ("sd3-bfloat16", SHORT | {"lora": False, "learning_rate": 1e-2}),
    "lora": ("sd3-float32", SHORT | {"lora": True}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_two_processes_hold_a_network_in_its_file_until_it_is_sharded(folder, tmp_path, mode, case):
    """Nothing of it is materialised on either before that, also of the reference and on resuming; bit for bit."""
    saved, settings = CASES[case]
    settings = settings | {"mode": mode, "model": str(folder / saved)}
    resumed = {"resumed": settings | {"late": True, "resume": "late", "save_strategy": "no"}} if case == "full" else {}
    runs = {"late": settings | {"late": True}, "early": settings | {"late": False}} | resumed
    ranks_server.succeed(tmp_path, 2, rank_runs.train_from_files, tmp_path, runs)
    early = load_file(tmp_path / "early" / "weights.safetensors")
    for name in runs:
        assert are_equal(load_file(tmp_path / name / "weights.safetensors"), early)
    pipe, _ = tiny_pipelines.build("sd3")
    count, size = len(list(pipe.transformer.parameters())), sum(p.numel() * 2 for p in pipe.transformer.parameters())
    for rank in range(2):
        reports = {name: json.loads((tmp_path / name / f"result-{rank}.json").read_text()) for name in runs}
        for name in {"late", "resumed"} & set(runs):
            assert [model["waiting"] for model in reports[name]["before"]] == [count] * (2 if case == "full" else 1)
            assert all(model["bytes"] < 0.2 * size for model in reports[name]["before"])
            assert reports[name]["after"]["waiting"] == 0
        assert all(model["waiting"] == 0 and model["bytes"] >= size for model in reports["early"]["before"])
    assert {entry["ratio/max_error"] for entry in reports["late"]["log"] if "ratio/max_error" in entry} == {0.0}
