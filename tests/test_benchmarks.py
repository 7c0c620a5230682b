"""The benchmarks run and read what they measure; no time is asserted."""

import json
import sys
from pathlib import Path

import pytest
import ranks_server

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import distributed
import gpu


def test_time_in_several_collectives_at_once_counts_once():
    assert distributed.covered([(0, 2), (1, 3), (10, 11), (1, 2)]) == 4
    assert distributed.covered([]) == 0


def test_two_processes_are_timed_and_their_collectives_seen(tmp_path):
    ranks_server.succeed(tmp_path, 2, distributed.work, tmp_path, "DDP", True, 8, 1)
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["wrapper"] == "DistributedDataParallel"
    assert 0 < found["share"] < 1
    # the parts are means over both processes, which do not begin and end a step together
    assert 0 < found["rollout"] + found["update"] < 1.2 * found["step"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "wrapper"), [("DDP", "DistributedDataParallel"), ("ZeRO-3", "DeepSpeedEngine"), ("FSDP2", "FSDP")]
)
def test_each_mode_is_what_it_is_called(mode, wrapper):
    found = distributed.measured(mode, is_lora=True, samples=8, rounds=1)
    assert found["wrapper"].startswith(wrapper) and 0 < found["share"] < 1


def test_ratios_are_those_to_one_process_and_to_ddp():
    step = {"rollout": 1.0, "update": 1.0, "share": 0.25}
    found = {"one process": step | {"step": 4.0}, "DDP": step | {"step": 2.0}, "ZeRO-3": step | {"step": 5.0}}
    assert [distributed.row("LoRA", mode, found).split(" | ")[5:] for mode in found] == [
        ["1.00", "", " |"],
        ["0.50", "", "25% |"],
        ["1.25", "2.50", "25% |"],
    ]


@pytest.mark.parametrize("training", gpu.TRAININGS)
def test_each_run_for_a_gpu_runs_small_on_a_cpu(training):
    options = gpu.parse(["--tiny", "--rounds=1", "--samples=2", "--micro_batch=2", "--steps=2", "--size=32"])
    name, weights, kind, *measured = gpu.measure(training, options).strip("| ").split(" | ")
    assert name in gpu.SMALL and kind.startswith("LoRA" if training.endswith("lora") else "all")
    assert float(weights.removesuffix(" M")) < 100
    assert [float(value.split()[0]) > 0 for value in measured] == [True] * 4


def test_networks_of_full_size_are_not_started_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.parse(["sd35-lora"])
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "tokens"), [("SD3.5-M", 77 + 256), ("FLUX.1-dev", 512)])
def test_networks_read_as_much_text_as_the_published_ones(name, tokens):
    pipe = gpu.pipeline(name, True, "cpu")
    texts = {"prompt": "a ship", "prompt_2": None, "num_images_per_prompt": 1}
    texts |= {"prompt_3": None, "do_classifier_free_guidance": False} if name == "SD3.5-M" else {}
    assert pipe.encode_prompt(**texts)[0].shape == (1, tokens, 4096)
