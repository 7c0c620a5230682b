"""Many processes from one command: what is told to the launcher, what is refused first, and that they really run."""

import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from command_line import refusal
from safetensors.torch import load_file
from tiny_runs import difference
from torch.distributed.elastic.multiprocessing.api import SignalException

from diffusion_grpo import cli
from diffusion_grpo.config import parse
from diffusion_grpo.config.arguments import LAUNCH_VARIABLE, LaunchArguments
from diffusion_grpo.config.parse import make_script_arguments, parse_train_arguments, read_values
from diffusion_grpo.distributed import launch

NAMES = ["fsdp2", "multi_gpu", "multi_node", "single_gpu", "zero1", "zero2", "zero3", "zero3_offload"]
SETTINGS = {
    "model": "tiny",
    "dataset": "tiny",
    "reward_funcs": ["brightness"],
    "use_peft": True,
    "lora_r": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "num_inference_steps": 3,
    "guidance_scale": 1.0,
    "height": 32,
    "width": 32,
    "pipeline_kwargs": {"max_sequence_length": 1},
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "bf16": False,
}


def write(folder, **settings):
    """A YAML file of a run on the embedded model."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | settings))
    return str(path)


def command(*words, **kwargs):
    """The command, as a user starts it, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-m", "diffusion_grpo.cli", *map(str, words)]
    return subprocess.Popen(words, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True, **kwargs)


def finished(process):
    """What a command wrote, where it ended well."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out[-4000:]
    return out


def test_accelerate_reads_each_configuration():
    assert launch.list_accelerate_configs() == NAMES
    kinds = {"fsdp2": "FSDP", "single_gpu": "NO", "multi_gpu": "MULTI_GPU", "multi_node": "MULTI_GPU"}
    for name in NAMES:
        assert name in LaunchArguments.__dataclass_fields__["accelerate_config"].metadata["help"]
        config = load_config_from_file(str(launch.find_accelerate_config(name)))
        assert config.distributed_type == kinds.get(name, "DEEPSPEED")
        assert config.mixed_precision is None  # bf16 and fp16 are the training's own settings
        if name.startswith("zero"):
            assert config.deepspeed_config["zero_stage"] == int(name[4])
            assert (config.deepspeed_config["offload_param_device"] == "cpu") == name.endswith("offload")


def test_a_configuration_is_a_name_or_a_file(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    settings = launch.make_launch_settings(LaunchArguments(accelerate_config=str(own)))
    assert (settings["config_file"], settings["num_processes"]) == (str(own), 3)
    assert launch.make_launch_settings(LaunchArguments(str(own), num_processes=2))["num_processes"] == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"accelerate_config": "zero33"}, "the nearest is zero3, and there are fsdp2, multi_gpu,"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes=3 counts those of all machines"),
        ({"accelerate_config": "single_gpu", "num_processes": 2}, "single_gpu starts one process, not 2"),
        ({"num_processes": 4, "num_machines": 2}, "add --main_process_ip and --main_process_port"),
        (
            {"num_machines": 2, "machine_rank": 2, "main_process_ip": "a", "main_process_port": 1},
            "machine_rank=2 must be 0 to 1",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(given, expected):
    with pytest.raises(ValueError, match=expected):
        launch.make_launch_settings(LaunchArguments(**given))


def test_deepspeed_that_is_not_installed_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match="zero2 needs DeepSpeed"):
        launch.make_launch_settings(LaunchArguments("zero2"))


def test_as_many_processes_as_accelerators_by_default(monkeypatch):
    monkeypatch.setattr(launch, "count_accelerators", lambda: 8)
    assert launch.make_launch_settings(LaunchArguments("zero3"))["num_processes"] == 8
    meeting = {"main_process_ip": "node0", "main_process_port": 29500}
    assert launch.make_launch_settings(LaunchArguments("multi_node", **meeting))["num_processes"] == 16


def test_the_file_names_processes_too_and_the_command_wins(tmp_path, capsys):
    config = write(tmp_path, accelerate_config="zero3", num_processes=8, output_dir="run", num_generations=2)
    launched = make_script_arguments(read_values(config, ["--num_processes=2"]), LaunchArguments)
    assert (launched.accelerate_config, launched.num_processes) == ("zero3", 2)
    script, _, _ = parse_train_arguments(config, [])  # they are no settings of the training itself
    assert script.model == "tiny"
    for words in ("--num_processes 0", "--num_procesess 2"):
        assert "num_processes" in refusal(capsys, "train", config, *words.split())


@pytest.mark.parametrize("variable", ["LOCAL_RANK", LAUNCH_VARIABLE])  # of a single process only the second is set
def test_a_process_that_a_launcher_started_starts_no_others(tmp_path, monkeypatch, variable):
    def reach(values):
        raise ValueError("reached")

    monkeypatch.setenv(variable, "{}")
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: pytest.fail("launched again"))
    monkeypatch.setattr(parse, "make_settings", reach)
    assert cli.main(["train", write(tmp_path, num_processes=2, output_dir="run")]) == 2


@pytest.fixture
def told(monkeypatch):
    """What accelerate's launcher is told."""
    told = {}

    def note(args: Namespace) -> None:
        told.update(vars(args), environment=os.environ.get("ACCELERATE_USE_CPU"))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", note)
    return told


@pytest.mark.parametrize("use_cpu", [False, True])
def test_each_machine_gets_its_own_place(use_cpu, told, monkeypatch):
    monkeypatch.setattr(launch, "count_accelerators", lambda: 2)
    meeting = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node0", "main_process_port": 29500}
    settings = launch.make_launch_settings(LaunchArguments("multi_node", **meeting))
    assert launch.launch(settings, ["train", "config.yaml", "--beta", "0.1"], use_cpu) == 0
    assert {name: told[name] for name in meeting} == meeting
    assert (told["num_processes"], told["multi_gpu"]) == (4, use_cpu)
    assert told["environment"] == ("true" if use_cpu else None)
    assert (told["training_script"], told["training_script_args"][:1]) == ("diffusion_grpo.cli", ["train"])


@pytest.mark.parametrize(("use_cpu", "added"), [(False, ["--use_cpu", "true"]), (True, [])])
def test_engines_learn_of_the_cpu_from_the_settings(use_cpu, added, told, monkeypatch):
    """accelerate's ACCELERATE_USE_CPU would turn DeepSpeed off, and without either there is one process."""
    monkeypatch.setattr(launch, "count_accelerators", lambda: 0)
    for name in ("zero2", "fsdp2"):
        settings = launch.make_launch_settings(LaunchArguments(name, num_processes=2))
        assert launch.launch(settings, ["train", "config.yaml"], use_cpu) == 0
        assert told["training_script_args"] == ["train", "config.yaml", *added]
    monkeypatch.setattr(launch, "count_accelerators", lambda: 2)
    assert launch.launch(settings, ["train", "config.yaml"]) == 0
    assert told["training_script_args"] == ["train", "config.yaml"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_ended_the_processes_is_an_exit_code(sent, code, monkeypatch):
    """torch's launcher has ended them by then; it raised through the command, with its traceback and code 1."""

    def stop(args: Namespace) -> None:
        raise SignalException(f"Process 7 got signal: {sent}", sigval=sent)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", stop)
    settings = launch.make_launch_settings(LaunchArguments(num_processes=2))
    assert launch.launch(settings, ["train", "config.yaml"], use_cpu=True) == code


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "trace"), [(None, "rng_state_1.pth"), ("fsdp2", "optimizer"), ("zero2", "global_step2")]
)
def test_two_processes_of_the_command_train_what_one_trains(tmp_path, mode, trace):
    # Both updates are of one rollout: in a second one weights that differ by 1e-8 may round a pixel to another level.
    # And Adam's epsilon is above the rounding of gradients that are nearly 0, which it would make whole steps of.
    smooth = {"steps_per_generation": 2, "epsilon": 0.2, "adam_epsilon": 1e-4}
    config = write(tmp_path, num_processes=2, **smooth)  # as on a CPU, where `accelerate launch` starts one
    saved = ["--accelerate_config", mode or "null", "--save_strategy", "steps", "--save_steps", "2"]
    out = finished(command("train", config, "--output_dir", tmp_path / "two", *saved))
    assert (tmp_path / "two" / "checkpoint-2" / trace).exists()  # what only this mode leaves
    assert out.count("Weights:") == 1  # only the first process speaks of the run
    assert "FutureWarning" not in out  # of arguments that other libraries pass to each other
    assert sorted(path.name for path in (tmp_path / "two" / "samples").glob("step-000000*.parquet")) == [
        "step-000000-rank0.parquet",
        "step-000000-rank1.parquet",
    ]
    # null over the file's: no launcher
    words = ["--num_processes", "null", "--gradient_accumulation_steps", "2", "--steps_per_generation", "4"]
    words += ["--output_dir", str(tmp_path / "one")]
    assert cli.main(["train", config, *words]) == 0
    one, two = (load_file(tmp_path / run / "pytorch_lora_weights.safetensors") for run in ("one", "two"))
    assert difference(one, two) < 1e-6
    assert all(tensor.abs().max() > 1e-5 for name, tensor in one.items() if "lora_B" in name)  # which start at 0


def test_an_error_in_a_process_is_the_commands_error(tmp_path):
    config = write(tmp_path, output_dir=str(tmp_path / "run"), reward_funcs={"color": {"wieght": 1}}, num_processes=2)
    process = command("train", config)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "'wieght'" in out
    assert "failed first, with exit code 2" in out and "Traceback" not in out


@pytest.mark.distributed
def test_torchrun_on_a_cpu_starts_processes_of_one_run(tmp_path):
    """No setting says CPU: without a group each of them would train by itself in one folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    script = Path(__file__).parents[1] / "cpu_run.py"
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(tmp_path)]
    subprocess.run([sys.executable, "-m", *words], env=environment, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 True", "1": "2 True"}


@pytest.mark.distributed
def test_two_machines_meet(tmp_path):
    config = write(tmp_path, output_dir=str(tmp_path / "run"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--accelerate_config", "multi_node", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    machines = [
        command("train", config, *meeting, "--main_process_port", port, "--machine_rank", rank) for rank in (0, 1)
    ]
    outs = [finished(machine) for machine in machines]
    assert ["Weights:" in out for out in outs] == [True, False]
    assert len(list((tmp_path / "run" / "samples").glob("step-000000-rank*.parquet"))) == 2
