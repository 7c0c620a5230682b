"""The command line `diffusion-grpo`: parse the arguments, run one command, return an exit code.

Each command is a module in this package. Heavy libraries are imported only when a command needs them, so `--help`
answers at once. Invalid input is refused before a model is loaded, with one line `error: ...` and exit code 2.
"""

import argparse
import os
import sys

from .. import __version__
from ..quiet import replace_unprintable
from . import check, plan, report, rewards, sample, train
from .errors import Refusal, is_explained, print_failure


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    replace_unprintable()
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.append("")  # dotted paths may name rewards and losses in the working directory
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown and arguments.command not in ("sample", "plan"):  # these two also accept the settings of `train`
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides = [*overrides, *unknown]
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not is_output_closed():
            raise
        return 1
    except Exception as error:
        kinds = Refusal if arguments.command == "train" else (Refusal, ValueError, OSError, ImportError)
        if arguments.traceback or not (isinstance(error, kinds) or is_explained(error)):
            raise
        if not isinstance(error, kinds):
            print_failure(error)
            return 1
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of a machine refuse the same
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # only the first process prints it
            print(f"\n{str(interrupt) or 'Interrupted.'}", file=sys.stderr)
        return 130


def is_output_closed() -> bool:
    """Return whether nobody reads the output any more, as after `| head`. If so, discard the rest of it."""
    try:
        print(flush=True)  # writes too: a flush alone may find nothing to write
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `train` into those that argparse reads and the overrides, e.g. `--beta 0.1`."""
    command = next((word for word in words if not word.startswith("-")), None)
    for place, word in enumerate(words) if command in ("train", "plan") else ():
        if word.partition("=")[0] == "--config":  # as for TRL's scripts
            file, end = ([word[9:]], place + 1) if "=" in word else (words[place + 1 : place + 2], place + 2)
            words = words[:place] + words[end:]
            start = words.index(command) + 1
            words = words[:start] + file + words[start:]
            break
    if command != "train":
        return words, []
    start = words.index("train") + 1
    if words[start:] and not words[start].startswith("-"):
        start += 1
    flags = ("-h", "--help", "--list-settings")
    rest = words[start:]
    return words[:start] + [word for word in rest if word in flags], [word for word in rest if word not in flags]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. Each command sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="diffusion-grpo", description="Post-train any diffusers pipeline with GRPO on any reward."
    )
    traceback_help = "show where in the code an input was refused or a run failed"
    parser.add_argument("--traceback", action="store_true", help=traceback_help)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,plan,check,sample,report,rewards}")
    for command, name, purpose in (
        (train, "train", "train from a YAML file"),
        (plan, "plan", "show how many samples, updates and bytes a run will need, without loading anything"),
        (check, "check", "check whether a pipeline can be trained, and how exactly it replays"),
        (sample, "sample", "generate images, videos or sound and score them, without training"),
        (report, "report", "rewrite report.html and summary.json of a run"),
        (rewards, "rewards", "list rewards, or serve them to other machines"),
    ):
        description = f"{purpose[0].upper()}{purpose[1:]}."
        formatter = argparse.RawDescriptionHelpFormatter
        command.add_options(
            commands.add_parser(name, help=purpose, description=description, formatter_class=formatter)
        )
    return parser
