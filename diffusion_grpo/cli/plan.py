"""`diffusion-grpo plan`: show the batches and the memory of a run before anything is loaded."""

import argparse
import json
from typing import TYPE_CHECKING

from ..config.files import check_model_name

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning.fit import Fit
    from ..planning.memory import Memory
    from ..planning.plan import Plan

LABELS = {  # of counts that their names do not explain
    "trained_per_prompt": "samples per prompt trained on",
    "samples_per_process": "samples generated per process",
    "pipeline_calls": "pipeline calls per process and rollout",
    "micro_batch": "samples per micro-batch",
    "micro_batches_per_update": "micro-batches per update and process",
    "trained_steps": "trained steps per sample",
    "trained_tokens": "trained tokens per sample",
    "num_inference_steps": "denoising steps per sample",
    "updates": "updates of the whole run",
}


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
    """Print the plan, or the settings that make the run fit; return 1 if there are none."""
    from ..config.arguments import LaunchArguments
    from ..config.parse import make_script_arguments, read_values
    from ..distributed.launch import read_settings

    config, overrides = arguments.config, arguments.overrides
    values = read_values(config, overrides)
    launch = make_script_arguments(values, LaunchArguments)
    read_settings(launch)
    check_model_name(str(values["model"]))
    # these import torch
    from accelerate.utils.modeling import convert_file_size_to_int
    from diffusers.utils.logging import disable_progress_bar

    from ..planning.fit import fit
    from ..planning.plan import plan

    disable_progress_bar()
    text = arguments.device_memory if arguments.fit is None else arguments.fit
    size = None if text is None else convert_file_size_to_int(text)
    if arguments.fit is not None:
        result = fit(config, overrides, size, launch)
        print(json.dumps(result.to_dict(), indent=2) if arguments.json else describe_fit(result))
        return 0 if result.fits else 1
    made = plan(config, overrides, launch)
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


def describe_usable(size: int) -> str:
    """Describe how much of an accelerator a plan may use."""
    from ..planning.fit import count_usable
    from ..training.memory import format_size

    usable = format_size(count_usable(size))
    return f"the {usable} of {format_size(size)} that CUDA, kernels and fragmentation leave"


def describe_memory(made: "Plan", size: int | None) -> list[str]:
    """Describe in sentences whether the run fits, and how much memory the processes of one machine take together."""
    from ..planning.fit import count_usable
    from ..training.memory import format_size

    sentences = []
    if made.memory and size is not None:
        fits = made.total.accelerator <= count_usable(size)
        verdict = f"{'fits' if fits else 'does not fit'} into {describe_usable(size)}"
        advice = "" if fits else " Add --fit to see what to change."
        sentences.append(f"At most {format_size(made.total.accelerator)} {verdict}.{advice}")
    if made.memory and made.processes_per_machine > 1:
        sentences.append(
            f"The {made.processes_per_machine} processes of a machine take {format_size(made.cpu_per_machine)} of CPU "
            "memory at most."
        )
    return sentences


def describe_fit(result: "Fit") -> str:
    """Return the settings that make a run fit as YAML, with comments."""
    from ..training.memory import format_size

    where = describe_usable(result.size)
    before, after = (format_size(total.accelerator) for total in (result.before, result.after))
    if not result.choices:
        line = f"At most {before}: {'it fits' if result.fits else 'no setting tried here makes it fit'} into {where}."
    elif result.fits:
        line = f"At most {after} instead of {before}: with these settings it fits into {where}."
    else:
        line = f"No setting tried here makes it fit into {where}. The smallest found is {after} instead of {before}:"
    settings = [result.to_yaml()] if result.choices else []
    return "\n".join([f"# {line}", *settings, *(f"# {note}" for note in result.notes)])


def make_tables(made: "Plan") -> "list[Table]":
    """Make the tables of batches, network evaluations and, if known, memory."""
    from rich.table import Table

    batches = Table(title="Batches", show_header=False)
    left_out = "trained_steps" if made.batches["trained_tokens"] else "trained_tokens"
    for name, value in made.batches.items():
        if name not in (left_out, "prompts"):
            label = LABELS.get(name, name.replace("_", " "))
            batches.add_row(label, "unknown" if value is None else f"{value:,}")
    evaluations = Table("for", "forward passes", title="Network evaluations per sample")
    for name, count in made.evaluations.items():
        evaluations.add_row(name, f"{count:g}")
    if not made.memory:
        return [batches, evaluations]
    model = made.model
    title = f"{model['pipeline']}, {model['network']}: {model['trained']:,} of {model['weights']:,} weights trained"
    memory = Table("MiB per process", "accelerator", "CPU", "while", title=f"{title}; {made.sharding.name}")
    for item in made.memory:
        memory.add_row(*_format_row(item))
    memory.add_section()
    memory.add_row(*_format_row(made.total))
    memory.caption = (
        "Not included: the reward models, what the optimizer's step and kernels allocate for themselves, and "
        "fragmentation."
    )
    return [batches, evaluations, memory]


def _format_row(item: "Memory") -> list[str]:
    sizes = [f"{size / 2**20:,.2f}" if size else "" for size in (item.accelerator, item.cpu)]
    return [item.name, *sizes, item.phase or "always"]
