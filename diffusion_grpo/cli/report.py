"""`diffusion-grpo report`: rewrite report.html and summary.json of a run."""

import argparse
from pathlib import Path

from .inputs import call_or_refuse


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    command.add_argument("run_dir", help="output folder of a run")
    command.add_argument(
        "--experiment", help="JSON file of an earlier experiment to show next to the run (docs/metrics.md)"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Rewrite report.html and summary.json from a run's files, and return the exit code."""
    from ..report.page import write_report, write_summary

    run_dir = Path(arguments.run_dir)
    call_or_refuse(write_summary, run_dir)
    print(call_or_refuse(write_report, run_dir, experiment=arguments.experiment))
    return 0
