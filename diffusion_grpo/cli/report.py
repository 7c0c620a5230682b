"""`diffusion-grpo report`: a run's folder goes in; report.html and summary.json are written again."""

import argparse
from pathlib import Path

from .inputs import refusing


def add_options(command: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    command.add_argument("run_dir", help="output folder of a run")
    command.add_argument("--experiment", help="JSON of an earlier experiment to show beside the run (docs/metrics.md)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes report.html and summary.json again from a run's files. Returns the exit code."""
    from ..run.report import write_report, write_summary

    run_dir = Path(arguments.run_dir)
    refusing(write_summary, run_dir)
    print(refusing(write_report, run_dir, experiment=arguments.experiment))
    return 0
