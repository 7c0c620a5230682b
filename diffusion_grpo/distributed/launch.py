"""Read and check the settings of a launch, start one command in many processes, and wait for them.

`accelerate launch`'s own functions do the work, before anything that training needs is imported. A configuration file
of accelerate describes how processes share a run: one of `accelerate_configs/` by name, or the user's own.
"""

import difflib
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..config.arguments import LaunchArguments
from ..config.files import read_text

CONFIGS = resources.files("diffusion_grpo.distributed").joinpath("accelerate_configs")


def list_accelerate_configs() -> list[str]:
    return sorted(Path(file.name).stem for file in CONFIGS.iterdir() if file.name.endswith(".yaml"))


def find_accelerate_config(name: str) -> Path:
    if Path(name).is_file():
        return Path(name)
    names = list_accelerate_configs()
    if name in names:
        return Path(str(CONFIGS.joinpath(f"{name}.yaml")))
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"accelerate_config: {name} is neither a file nor a configuration of this package; the nearest is {nearest}, "
        f"and there are {', '.join(names)}."
    )


def make_launch_settings(arguments: LaunchArguments) -> dict[str, Any]:
    """Return the settings of `accelerate launch` on this machine."""
    settings = read_settings(arguments)
    if "num_processes" not in settings:
        settings["num_processes"] = settings["num_machines"] * max(1, count_accelerators())
    check_processes(settings)
    _check_machine(settings)
    return settings


def read_settings(arguments: LaunchArguments) -> dict[str, Any]:
    """Read accelerate's configuration file, overridden by the settings of the command line or the YAML file."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    has_many = max(given.get("num_processes", 0), given.get("num_machines", 0)) > 1
    path = find_accelerate_config(given.pop("accelerate_config", "multi_gpu" if has_many else "single_gpu"))
    settings = yaml.safe_load(read_text(path))
    if not isinstance(settings, dict) or "distributed_type" not in settings:
        raise ValueError(f"accelerate_config: {path} has no distributed_type; make one with `accelerate config`.")
    return {"num_machines": 1, **settings, **given, "config_file": str(path)}


def count_accelerators() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def check_processes(settings: dict[str, Any]) -> None:
    """Refuse a number of processes that does not fit the machines or the kind of distribution."""
    name, processes, machines = (settings[key] for key in ("config_file", "num_processes", "num_machines"))
    if processes < 1 or machines < 1 or processes % machines:
        raise ValueError(
            f"num_processes={processes} counts those of all machines; make it a multiple of num_machines={machines}."
        )
    if processes > 1 and settings["distributed_type"] == "NO" and not settings.get("use_cpu"):
        raise ValueError(f"{Path(name).stem} starts one process, not {processes}; use multi_gpu, zero3 or another.")


def _check_machine(settings: dict[str, Any]) -> None:
    name, machines = settings["config_file"], settings["num_machines"]
    if settings["distributed_type"] == "DEEPSPEED":
        from accelerate.utils import is_deepspeed_available

        if not is_deepspeed_available():
            raise ValueError(
                f"{Path(name).stem} needs DeepSpeed, which is not installed; pip install 'diffusion-grpo[deepspeed]'."
            )
    if machines > 1:
        missing = [key for key in ("main_process_ip", "main_process_port") if settings.get(key) is None]
        if missing:
            raise ValueError(
                f"{machines} machines need the address of the first one: add "
                f"{' and '.join('--' + key for key in missing)}, with the same value on each machine, and "
                "--machine_rank, with a different value on each."
            )
        if not 0 <= settings.get("machine_rank", 0) < machines:
            raise ValueError(
                f"machine_rank={settings['machine_rank']} must be 0 to {machines - 1}, and differ between machines."
            )


def launch(
    settings: dict[str, Any], words: list[str], use_cpu: bool = False, variables: dict[str, str] | None = None
) -> int:
    """Run `diffusion-grpo` with `words` in each process, also on CPUs, and wait for all of them."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    names = ("config_file", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
    given = {name: settings[name] for name in names if settings.get(name) is not None}
    given.setdefault("main_process_port", 0)  # any free port
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    on_cpu, is_plain = use_cpu or not count_accelerators(), settings["distributed_type"] not in ("DEEPSPEED", "FSDP")
    if on_cpu and is_plain and settings["num_processes"] > 1:
        options.append("--multi_gpu")  # torch's launcher; `--cpu` would start a single process
    if on_cpu and not is_plain and not use_cpu:  # else accelerate's variable, set below, would turn DeepSpeed off
        words = [*words, "--use_cpu", "true"]
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        share = (os.cpu_count() or 1) * settings["num_machines"] // settings["num_processes"]
        options += ["--num_cpu_threads_per_process", str(max(1, share))]
    arguments = launch_command_parser().parse_args([*options, "--module", "diffusion_grpo.cli", *words])
    try:
        with patch_environment(**({"accelerate_use_cpu": "true"} if on_cpu and is_plain else {}), **(variables or {})):
            launch_command(arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        print(f"process {rank} failed first, with exit code {first.exitcode}; see its messages above", file=sys.stderr)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # a shell's code for signals
    except SignalException as stopped:  # the processes have ended, and the first has said how to resume
        return 128 + stopped.sigval
    except subprocess.CalledProcessError as failure:
        return failure.returncode
    return 0
