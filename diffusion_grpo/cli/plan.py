"""`diffusion-grpo plan`: the settings of a training go in; a table of its batches and its memory leaves."""

import argparse
import json
from typing import TYPE_CHECKING

from ..config.early_checks import check_values
from .inputs import check_model_name, refusing

if TYPE_CHECKING:
    from rich.table import Table

    from ..planning.plan import Plan

LABELS = {
    "processes": "processes",
    "prompts_per_rollout": "prompts a rollout",
    "samples_per_prompt": "samples of each prompt",
    "samples_per_rollout": "samples a rollout",
    "trained_per_prompt": "of each prompt trained on",
    "samples_per_process": "samples a process rolls out",
    "reward_processes": "processes that compute rewards",
    "samples_per_reward_process": "samples each of them scores, at most",
    "pipeline_calls": "pipeline calls for them",
    "micro_batch": "samples in a micro-batch",
    "micro_batches_per_update": "micro-batches an update, of a process",
    "updates_per_rollout": "updates a rollout",
    "samples_per_update": "samples an update trains on",
    "trained_steps": "trained steps of a sample",
    "num_inference_steps": "denoising steps of a sample",
    "rollouts_per_epoch": "rollouts an epoch",
    "updates_per_epoch": "updates an epoch",
}
MIB = 2**20


def add_options(command: argparse.ArgumentParser) -> None:
    """Options of `plan`: those of `train`, and the form of the answer."""
    command.add_argument("config", help="YAML file of settings, as for train")
    command.add_argument("--json", action="store_true", help="print numbers for a program, bytes as bytes")
    command.usage = "diffusion-grpo plan config.yaml [--key value ...] [--json]"
    command.epilog = (
        "Any setting of train can be given as --key value, among them --model FOLDER, --accelerate_config and\n"
        "--num_processes. No weights are loaded; a Hub id's configuration files are fetched if they are not here."
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit code."""
    from ..config.parse import parse_launch_arguments, read_values
    from ..distributed.launch import read_settings

    launch, overrides = refusing(parse_launch_arguments, arguments.config, arguments.overrides)
    told = refusing(read_settings, launch)
    values = refusing(read_values, arguments.config, overrides)
    refusing(check_values, values, told.get("num_processes", told["num_machines"]))
    refusing(check_model_name, str(values["model"]))

    from ..planning.plan import plan

    made = refusing(plan, arguments.config, overrides, launch)
    if arguments.json:
        print(json.dumps(made.to_dict(), indent=2))
        return 0
    from rich.console import Console

    console = Console()
    for table in tables(made):
        console.print(table)
    for note in made.notes:
        console.print(note, highlight=False, soft_wrap=True)
    return 0


def tables(made: "Plan") -> "list[Table]":
    """Batches, evaluations of the network, and memory where it is known."""
    from rich.table import Table

    batches = Table(title="Batches", show_header=False)
    for name, label in LABELS.items():
        value = getattr(made.batches, name)
        batches.add_row(label, "not known" if value is None else f"{value:,}")
    evaluations = Table("for", "forward passes", title="The network, for each sample")
    for name, count in made.evaluations.items():
        evaluations.add_row(name, f"{count:g}")
    if not made.memory:
        return [batches, evaluations]
    model = made.model
    title = f"{model['pipeline']}, {model['network']}: {model['trained']:,} of {model['weights']:,} weights trained"
    memory = Table("MiB a process", "accelerator", "CPU", "from", title=f"{title}; {made.sharding.name}")
    for item in [*made.memory, made.total]:
        sizes = (f"{size / MIB:,.2f}" if size else "" for size in (item.accelerator, item.cpu))
        memory.add_row(item.name, *sizes, item.basis)
    memory.caption = (
        "Not in it: the VAE's own activations, the reward models, what kernels allocate for themselves and "
        "fragmentation."
    )
    return [batches, evaluations, memory]
