"""What holds for all tests: nothing is downloaded, one thread is enough for tiny networks, and plots are not drawn."""

import gc
import os
import socket
import threading
import types
from functools import cache, partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork

import accelerate.utils.memory
import pytest
import torch

from diffusion_grpo.report import plots

torch.set_num_threads(1)

# A report's dozen plots take longer than the training of a tiny network. The page is written everywhere; its plots are
# drawn where a test is marked `plots`.
DRAWN = {name: getattr(plots, name) for name in ("draw_curve", "draw_series", "draw_times", "save_curve")}
for _name in DRAWN:
    setattr(plots, _name, lambda *args, **kwargs: "data:,")


@pytest.fixture(autouse=True)
def _drawn_where_marked(request, monkeypatch):
    if request.node.get_closest_marker("plots"):
        for name, function in DRAWN.items():
            monkeypatch.setattr(plots, name, function)


# Each training begins by looking through all objects for garbage, which takes a tenth of a second.
accelerate.utils.memory.gc = types.SimpleNamespace(collect=lambda: gc.collect(1))


def pytest_collection_finish():
    """What was imported stays: no need to look through it for garbage."""
    gc.collect()
    gc.freeze()


# Several workers

# What takes longest begins first, or one worker would still be at it when the other has nothing left.
FIRST = "deepspeed every_setting fsdp resume launch failure processes stand_in_device".split()


def pytest_collection_modifyitems(items):
    names = [f"test_{name}" for name in FIRST]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """What the fixtures of a file share is made once, by one worker; other tests go to whoever is free.

    As `--dist loadgroup` would, which groups nothing under pytest 9.2 (pytest-xdist's issue 1386).
    """
    if config.getvalue("dist") != "load":  # somebody asked for another one
        return None
    from xdist.scheduler import LoadScopeScheduling

    class FilesThatShare(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if _shares(Path(config.rootpath, file)) else nodeid

    config.option.loadscopereorder = False  # the order is that of `FIRST`
    return FilesThatShare(config, log)


@cache
def _shares(file):
    """Whether tests of a file share what a fixture makes."""
    return 'scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture
def config_file(tmp_path):
    """Writes the YAML file of a run with some keys changed, and returns its path."""
    from command_line import write_config

    return partial(write_config, tmp_path)


@pytest.fixture
def serve():
    """Starts servers of rewards in threads: `serve(rewards, **options)` gives the url."""
    import uvicorn

    from diffusion_grpo.rewards import load_rewards
    from diffusion_grpo.rewards.server.serve import create_app

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
