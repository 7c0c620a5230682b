"""`diffusion-grpo report`: rewrite report.html and summary.json of a run."""

import argparse


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", help="output folder of a run")
    command.add_argument(
        "--experiment", help="JSON file of an earlier experiment to show next to the run (docs/metrics.md)"
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Rewrite report.html and summary.json from a run's files, and return the exit code."""
    from ..report.page import write_report, write_summary

    write_summary(arguments.run_dir)
    print(write_report(arguments.run_dir, experiment=arguments.experiment))
    return 0
