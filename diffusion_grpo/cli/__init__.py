"""
The command `diffusion-grpo`: words of a command line go in, an exit code comes out.

A module of its own so that the library never reads arguments or prints; what a command takes and does is in
`commands/`. Nothing heavy is imported before it is needed, so `--help` answers at once; and everything that can be
refused is refused, as one line `error: ...` with exit code 2, before a model is loaded.
"""

import argparse
import os
import sys

from .. import __version__
from . import check, plan, report, rewards, sample, train
from .inputs import Refusal


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0; 1 where a check fails (a pipeline does not train, a score is not the
    published one); 2 where input is refused; 130 after Ctrl-C."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.append("")  # rewards and losses named by dotted path may lie in the working directory
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown and arguments.command not in ("sample", "plan"):  # which take settings of a training too
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides = [*overrides, *unknown]
    try:
        return arguments.run(arguments)
    except Refusal as refusal:
        if arguments.traceback:
            raise
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # of several processes the first says it
            print(f"\n{interrupt or 'Interrupted.'}", file=sys.stderr)
        return 130


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """`train config.yaml --beta 0.1` -> what argparse reads, and the overrides that follow."""
    if "train" not in words[:2]:
        return words, []
    start = words.index("train") + 1
    if words[start:] and not words[start].startswith("-"):
        start += 1
    own = ("-h", "--help", "--list-settings")
    rest = words[start:]
    return words[:start] + [word for word in rest if word in own], [word for word in rest if word not in own]


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="diffusion-grpo", description="Post-train any diffusers pipeline with GRPO on any reward."
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an input was refused")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,plan,check,sample,report,rewards}")
    for command, name, purpose in (
        (train, "train", "train from a YAML file"),
        (plan, "plan", "tell what a training will ask for, in samples, updates and memory, before anything is loaded"),
        (check, "check", "tell in seconds whether a pipeline can be trained, and how exactly it replays"),
        (sample, "sample", "make pictures, videos or sound and score them, without training"),
        (report, "report", "write report.html and summary.json of a run again"),
        (rewards, "rewards", "list rewards, verify their weights, serve them to trainings elsewhere"),
    ):
        description = f"{purpose[0].upper()}{purpose[1:]}."
        formatter = argparse.RawDescriptionHelpFormatter
        command.add_options(
            commands.add_parser(name, help=purpose, description=description, formatter_class=formatter)
        )
    return parser
