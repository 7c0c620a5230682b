"""What holds for all tests: nothing is downloaded, and one thread is enough for tiny networks."""

import os
import socket
import threading

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def serve():
    """Starts servers of rewards in threads: `serve(rewards, **options)` gives the url."""
    import uvicorn

    from diffusion_grpo.rewards import load_rewards
    from diffusion_grpo.rewards.serve import create_app

    running = []

    def start(rewards, **options) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(load_rewards(rewards), **options), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread, listener))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, _, _ in running:
        server.should_exit = True
    for _, thread, listener in running:
        thread.join(10)
        listener.close()
