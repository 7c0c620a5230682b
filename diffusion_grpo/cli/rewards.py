"""`diffusion-grpo rewards`: list rewards, compare them with published scores, or serve them to `RemoteReward`."""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sampling import settings as sample_settings
from .inputs import Refusal, call_or_refuse

if TYPE_CHECKING:
    from ..rewards.verify import Line


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `rewards list`, `rewards verify` and `rewards serve`."""
    actions = command.add_subparsers(dest="action", required=True, metavar="{list,verify,serve}")
    for name, purpose, add, run in (
        ("list", "list the built-in rewards, one per line", None, run_list),
        ("verify", "compare a reward's scores of known images with published ones", add_verify, run_verify),
        ("serve", "answer scoring requests of RemoteReward over HTTP until stopped", add_serve, run_serve),
    ):
        action = actions.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if add is not None:
            add(action)
        action.set_defaults(run=run)


def add_verify(verify: argparse.ArgumentParser) -> None:
    """Add the options of `rewards verify`."""
    verify.description += (
        " Exit code 0: they agree; 1: they differ; 2: nothing was compared because scores or images are missing."
    )
    verify.add_argument("reward", help="name of a built-in reward, or one YAML mapping with its options")
    verify.add_argument("--model", help="Hub id or folder of the weights; default: the reward's")
    verify.add_argument("--image", nargs="+", default=[], help="files of the images that have published scores")
    verify.add_argument("--target", nargs="+", default=[], help="files of the images to compare them with")


def add_serve(serve: argparse.ArgumentParser) -> None:
    """Add the options of `rewards serve`."""
    serve.add_argument("rewards", nargs="+", help="names, dotted paths, or one YAML mapping with options")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s, this machine")
    serve.add_argument(
        "--port", type=int, default=8000, help="port to listen on, 0 for any free one; default: %(default)s"
    )
    serve.add_argument("--token_env", help="environment variable that contains the token which requests must send")
    serve.add_argument(
        "--max_waiting",
        type=int,
        default=16,
        help="maximum number of requests that wait or are being scored; default: %(default)s",
    )
    serve.add_argument(
        "--max_megabytes", type=int, default=256, help="maximum size of a request; default: %(default)s"
    )


def run_list(arguments: argparse.Namespace) -> int:
    """Print what each built-in reward measures, its range and what it needs. Return the exit code."""
    from ..rewards import REWARDS
    from ..rewards.catalogue import entry

    entries = {name: entry(name, reward) for name, reward in REWARDS.items()}
    width = max(map(len, entries))
    for name, (measures, values, needs) in entries.items():
        parts = [measures, f"[{values}]" if values else "", f"needs {needs}" if needs else ""]
        print(f"{name:<{width}}  {'; '.join(part for part in parts if part)}")
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Print scores next to the published ones, then scores of images drawn here. Return the exit code."""
    name, options = _read_reward(arguments.reward)
    from ..rewards import REWARDS
    from ..rewards.verify import PUBLISHED, compare, score_drawings

    if arguments.model is not None:
        options["model"] = arguments.model
    images, targets = ([Path(path) for path in paths] for paths in (arguments.image, arguments.target))
    compared = _score_or_refuse(compare, name, options, images, targets)
    for line in compared:
        verdict = "agrees" if line.agrees else "DIFFERS"
        print(f"{line.image:<14} {_format_number(line.value):>10}  published {line.published:.4f}  {verdict}")
    if name not in PUBLISHED:
        print(f"No score of a known image has been published for {name}; nothing was compared.")
    elif not compared:
        files = "\n  ".join((*PUBLISHED[name].files, *PUBLISHED[name].targets))
        print(
            "Nothing was compared: download these files and pass them, in this order, as --image (and --target):\n  "
            f"{files}"
        )
    if name in PUBLISHED:
        weights = ", ".join(f"{key}: {value}" for key, value in PUBLISHED[name].options.items())
        print(f"Published at {PUBLISHED[name].source}{f', with {weights}' if weights else ''}")
        for key in sorted(PUBLISHED[name].options.keys() - options.keys()) if compared else ():
            default = inspect.signature(REWARDS[name]).parameters[key].default
            print(f"These are not the reward's default weights: {key}: {default} was not compared.")
    same = PUBLISHED[name].options if compared else {}  # use the weights that have just been downloaded
    drawn = _score_or_refuse(score_drawings, name, {**same, **options})
    print(f"Images drawn here{', scored by the same weights' if compared else ''}:")
    for line in drawn:
        print(f"{line.image:<14} {_format_number(line.value):>10}  {line.prompt}")
    return 2 if not compared else int(not all(line.agrees for line in compared))


def _read_reward(written: str) -> tuple[str, dict]:
    """Read the name and the options of one built-in reward."""
    from ..rewards import REWARDS

    given = call_or_refuse(sample_settings.read_rewards, [written])
    pairs = list(given.items()) if isinstance(given, dict) else [(written, {})]
    if len(pairs) != 1 or pairs[0][0] not in REWARDS or not isinstance(pairs[0][1], dict):
        raise Refusal(
            f"{written!r} is not the name of a single built-in reward; `diffusion-grpo rewards list` shows the names."
        )
    return pairs[0][0], dict(pairs[0][1])


def _score_or_refuse(function: Callable, *arguments: Any) -> list["Line"]:
    """Call a function that scores images, and turn failures of a reward into a `Refusal` too."""
    from ..rewards import RewardError

    try:
        return call_or_refuse(function, *arguments)
    except RewardError as error:
        raise Refusal(" ".join(str(error).split())) from error


def _format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted, and return the exit code."""
    import os
    import socket

    named = call_or_refuse(sample_settings.read_rewards, arguments.rewards)
    from ..rewards import check_needs, load_rewards

    rewards = call_or_refuse(load_rewards, named)
    call_or_refuse(check_needs, rewards)
    token = os.environ.get(arguments.token_env) if arguments.token_env else None
    if arguments.token_env and not token:
        raise Refusal(f"--token_env names {arguments.token_env}, but no such environment variable is set.")
    if arguments.max_waiting < 1 or arguments.max_megabytes < 1:
        raise Refusal("--max_waiting and --max_megabytes must be at least 1.")
    if not 0 <= arguments.port <= 65535:
        raise Refusal(f"--port must lie between 0 and 65535, got {arguments.port}.")
    try:
        import uvicorn

        from ..rewards.server.serve import Server, create_app
    except ImportError as error:
        raise Refusal('A server needs fastapi and uvicorn; pip install "diffusion-grpo[rewards]".') from error
    app = create_app(rewards, token, arguments.max_waiting, arguments.max_megabytes * 2**20)
    listener = call_or_refuse(socket.create_server, (arguments.host, arguments.port))
    if token is None and not arguments.host.startswith("127.") and arguments.host not in ("localhost", "::1"):
        print(
            "warning: other machines can reach this server, and it does not require a token; set --token_env",
            file=sys.stderr,
        )
    address = f"http://{arguments.host}:{listener.getsockname()[1]}"
    print(f"serving {', '.join(reward.name for reward in rewards)} on {address}", flush=True)
    Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0
