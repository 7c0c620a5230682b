"""`diffusion-grpo rewards`: names of rewards go in; a server that answers `RemoteReward` runs until it is stopped."""

import argparse
import sys

from .. import sample_settings
from .inputs import Refusal, refusing


def add_options(command: argparse.ArgumentParser) -> None:
    """Options of `rewards serve`."""
    actions = command.add_subparsers(dest="action", required=True, metavar="{serve}")
    purpose = "answer scoring requests of RemoteReward over HTTP, until stopped"
    serve = actions.add_parser("serve", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    serve.add_argument("rewards", nargs="+", help="names, dotted paths, or one YAML mapping with options")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s, this machine")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    serve.add_argument("--token_env", help="environment variable with the token that requests must carry")
    serve.add_argument("--max_waiting", type=int, default=16, help="requests in the queue; default: %(default)s")
    serve.add_argument("--max_megabytes", type=int, default=256, help="of one request; default: %(default)s")
    serve.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted. Returns the exit code."""
    import os
    import socket

    from ..rewards import load_rewards

    rewards = refusing(load_rewards, refusing(sample_settings.read_rewards, arguments.rewards))
    token = os.environ.get(arguments.token_env) if arguments.token_env else None
    if arguments.token_env and not token:
        raise Refusal(f"--token_env names {arguments.token_env}, but no such environment variable is set.")
    if arguments.max_waiting < 1 or arguments.max_megabytes < 1:
        raise Refusal("--max_waiting and --max_megabytes must be at least 1.")
    try:
        import uvicorn

        from ..rewards.serve import create_app
    except ImportError as error:
        raise Refusal('A server needs fastapi and uvicorn; pip install "diffusion-grpo[rewards]".') from error
    app = create_app(rewards, token, arguments.max_waiting, arguments.max_megabytes * 2**20)
    listener = refusing(socket.create_server, (arguments.host, arguments.port))
    if token is None and not arguments.host.startswith("127.") and arguments.host not in ("localhost", "::1"):
        print("warning: other machines can reach this server, and it asks for no token (--token_env)", file=sys.stderr)
    address = f"http://{arguments.host}:{listener.getsockname()[1]}"
    print(f"serving {', '.join(reward.name for reward in rewards)} on {address}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0
