"""`diffusion-grpo plan`: show the batches and the memory of a run before anything is loaded."""

import argparse
import json
from typing import TYPE_CHECKING

from ..config.files import check_model_name
from .inputs import call_or_refuse

if TYPE_CHECKING:
    from rich.table import Table

    from ..config.arguments import LaunchArguments
    from ..planning.memory import Memory
    from ..planning.plan import Plan

LABELS = {
    "processes": "processes",
    "prompts_per_rollout": "prompts per rollout",
    "samples_per_prompt": "samples per prompt",
    "samples_per_rollout": "samples per rollout",
    "trained_per_prompt": "samples per prompt trained on",
    "samples_per_process": "samples generated per process",
    "pipeline_calls": "pipeline calls per process and rollout",
    "micro_batch": "samples per micro-batch",
    "micro_batches_per_update": "micro-batches per update and process",
    "updates_per_rollout": "updates per rollout",
    "samples_per_update": "samples per update",
    "trained_steps": "trained steps per sample",
    "trained_tokens": "trained tokens per sample",
    "num_inference_steps": "denoising steps per sample",
    "rollouts_per_epoch": "rollouts per epoch",
    "updates_per_epoch": "updates per epoch",
    "updates": "updates of the whole run",
}
MIB = 2**20


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `plan`. The settings of `train` are read separately."""
    command.add_argument("config", help="YAML file of settings, as for train")
    command.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    question = command.add_mutually_exclusive_group()
    question.add_argument(
        "--device-memory",
        "--device_memory",  # as settings are written
        metavar="SIZE",
        help="show whether the run fits into this much memory, e.g. 24GiB",
    )
    question.add_argument(
        "--fit",
        metavar="SIZE",
        help="print the cheapest settings with which the run fits into this much memory, as YAML",
    )
    command.usage = "diffusion-grpo plan config.yaml [--key value ...] [--device-memory 24GiB | --fit 24GiB] [--json]"
    command.epilog = (
        "Any setting of train can be given as --key value, e.g. --model FOLDER, --accelerate_config or\n"
        "--num_processes. No weights are loaded. The configuration files of a Hub id are downloaded if needed."
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit code."""
    from ..config.arguments import LaunchArguments
    from ..config.parse import make_script_arguments, read_values
    from ..distributed.launch import read_settings

    values, overrides = call_or_refuse(read_values, arguments.config, arguments.overrides), arguments.overrides
    launch = call_or_refuse(make_script_arguments, values, LaunchArguments)
    call_or_refuse(read_settings, launch)
    call_or_refuse(check_model_name, str(values["model"]))

    if arguments.fit is not None:
        return print_fit(arguments, overrides, launch)
    from ..planning.plan import plan

    size = call_or_refuse(parse_size, arguments.device_memory) if arguments.device_memory is not None else None
    made = call_or_refuse(plan, arguments.config, overrides, launch)
    if arguments.json:
        print(json.dumps(made.to_dict(), indent=2))
        return 0
    from rich.console import Console

    console = Console()
    for table in make_tables(made):
        console.print(table)
    for note in [*describe_memory(made, size), *made.notes]:
        console.print(note, highlight=False, soft_wrap=True)
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 24GiB, 80GB or 500MiB."""
    from accelerate.utils.modeling import convert_file_size_to_int

    try:
        return convert_file_size_to_int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a memory size; write, for example, 24GiB or 80GB.") from error


def describe_memory(made: "Plan", size: int | None) -> list[str]:
    """Describe in sentences whether the run fits, and how much memory the processes of one machine take together."""
    from ..planning.fit import count_usable
    from ..training.memory import format_size

    if not made.memory:
        return []
    found = []
    if size is not None:
        usable, most = count_usable(size), made.total.accelerator
        verdict = "fits into" if most <= usable else "does not fit into"
        found.append(
            f"At most {format_size(most)} {verdict} the {format_size(usable)} of {format_size(size)} that CUDA, "
            "kernels and fragmentation leave." + ("" if most <= usable else " Add --fit to see what to change.")
        )
    if made.processes_per_machine > 1:
        found.append(
            f"The {made.processes_per_machine} processes of a machine take {format_size(made.cpu_per_machine)} of CPU "
            "memory at most."
        )
    return found


def print_fit(arguments: argparse.Namespace, overrides: list[str], launch: "LaunchArguments") -> int:
    """Print the settings that make the run fit; return 1 if there are none."""
    from ..planning.fit import fit
    from ..training.memory import format_size

    size = call_or_refuse(parse_size, arguments.fit)
    found = call_or_refuse(fit, arguments.config, overrides, size, launch)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0 if found.fits else 1
    where = f"the {format_size(found.usable)} of {format_size(size)} that CUDA, kernels and fragmentation leave"
    before, after = format_size(found.before.accelerator), format_size(found.after.accelerator)
    if not found.choices:
        print(f"# At most {before}: {'it fits' if found.fits else 'no setting tried here makes it fit'} into {where}.")
    elif found.fits:
        print(f"# At most {after} instead of {before}: with these settings it fits into {where}.")
    else:
        print(f"# No setting tried here makes it fit into {where}. The smallest found is {after} instead of {before}:")
    print(found.to_yaml(), end="\n" if found.choices else "")
    for note in found.notes:
        print(f"# {note}")
    return 0 if found.fits else 1


def make_tables(made: "Plan") -> "list[Table]":
    """Make the tables of batches, network evaluations and, if known, memory."""
    from rich.table import Table

    batches = Table(title="Batches", show_header=False)
    for name, label in LABELS.items():
        value = getattr(made.batches, name)
        if name == ("trained_steps" if made.batches.trained_tokens else "trained_tokens"):
            continue
        batches.add_row(label, "unknown" if value is None else f"{value:,}")
    evaluations = Table("for", "forward passes", title="Network evaluations per sample")
    for name, count in made.evaluations.items():
        evaluations.add_row(name, f"{count:g}")
    if not made.memory:
        return [batches, evaluations]
    model = made.model
    title = f"{model['pipeline']}, {model['network']}: {model['trained']:,} of {model['weights']:,} weights trained"
    memory = Table("MiB per process", "accelerator", "CPU", "from", "while", title=f"{title}; {made.sharding.name}")
    for item in made.memory:
        memory.add_row(item.name, *_format_sizes(item), item.basis, item.phase or "always")
    memory.add_section()
    memory.add_row(made.total.name, *_format_sizes(made.total), "", made.total.phase or "always")
    memory.caption = (
        "Not included: the reward models, what the optimizer's step and kernels allocate for themselves, and "
        "fragmentation."
    )
    return [batches, evaluations, memory]


def _format_sizes(item: "Memory") -> list[str]:
    return [f"{size / MIB:,.2f}" if size else "" for size in (item.accelerator, item.cpu)]
