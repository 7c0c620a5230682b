"""`diffusion-grpo rewards`: list rewards, or serve them to `RemoteReward`."""

import argparse
import sys

from ..sampling import settings as sample_settings


def add_options(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="{list,serve}")
    for name, purpose, add, run in (
        ("list", "list the built-in rewards, one per line", None, run_list),
        ("serve", "answer scoring requests of RemoteReward over HTTP until stopped", add_serve, run_serve),
    ):
        action = actions.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if add is not None:
            add(action)
        action.set_defaults(run=run)


def add_serve(serve: argparse.ArgumentParser) -> None:
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
    from ..rewards.loading import CATALOGUE

    width = max(map(len, CATALOGUE))
    for name, (reward, measures, values, needs) in CATALOGUE.items():
        model = getattr(reward, "model", "")
        needed = [need for need in (needs, model if "/" in model else "") if need]
        print(f"{name:<{width}}  {measures}; [{values}]{'; needs ' * bool(needed)}{', '.join(needed)}")
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted, and return the exit code."""
    import os
    import socket

    named = sample_settings.read_rewards(arguments.rewards)
    from ..rewards import check_needs, load_rewards

    rewards = load_rewards(named)
    check_needs(rewards)
    token = os.environ.get(arguments.token_env) if arguments.token_env else None
    if arguments.token_env and not token:
        raise ValueError(f"--token_env names {arguments.token_env}, but no such environment variable is set.")
    if not 0 <= arguments.port <= 65535:
        raise ValueError(f"--port must lie between 0 and 65535, got {arguments.port}.")
    try:
        import uvicorn

        from ..rewards.server.serve import Server, create_app
    except ImportError as error:
        raise ValueError('A server needs fastapi and uvicorn; pip install "diffusion-grpo[rewards]".') from error
    app = create_app(rewards, token, arguments.max_waiting, arguments.max_megabytes * 2**20)
    listener = socket.create_server((arguments.host, arguments.port))
    if token is None and not arguments.host.startswith("127.") and arguments.host not in ("localhost", "::1"):
        print(
            "warning: other machines can reach this server, and it does not require a token; set --token_env",
            file=sys.stderr,
        )
    address = f"http://{arguments.host}:{listener.getsockname()[1]}"
    print(f"serving {', '.join(reward.name for reward in rewards)} on {address}", flush=True)
    Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0
