"""Several processes as a launcher starts them, forked from a server that has imported everything already.

A launcher's own processes each take seconds to import what they need; these do not, so that many runs fit into a test
session. Nobody watches over them: where one dies the others are on their own, as on a cluster whose launcher is slow.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rank_runs"])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child(rank, processes, port, output, function, args):
    """Run `function` in the environment that torchrun gives; output goes into a file."""
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in known.items()} if processes > 1 else {})
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    if "ON_STAND_IN_DEVICE" in os.environ:
        import stand_in_processes

        stand_in_processes.register(processes)
    function(*args)
    sys.stdout.flush()


class Ended:
    """How processes ended: exit `codes` (-9 if killed), their `logs`, `seconds` from the first end to the last."""

    def __init__(self, codes, logs, seconds):
        self.codes, self.logs, self.seconds = codes, logs, seconds


def start_server():
    """Start the server: Python 3.11 looks for modules to preload in PYTHONPATH alone, without a warning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def start(folder, processes, function, *args):
    start_server()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port, outputs = free_port(), [folder / f"output-{rank}.txt" for rank in range(processes)]
    own = [
        SERVER.Process(target=child, args=(rank, processes, port, outputs[rank], function, args))
        for rank in range(processes)
    ]
    for process in own:
        process.start()
    return own, outputs


def run(folder, processes, function, *args, limit=240):
    """Run `function(*args)` on several processes; after `limit` seconds those left are killed, with exit code -15."""
    own, outputs = start(folder, processes, function, *args)
    deadline, first = time.monotonic() + limit, None
    while any(process.is_alive() for process in own) and time.monotonic() < deadline:
        time.sleep(0.05)
        if first is None and not all(process.is_alive() for process in own):
            first = time.monotonic()
    seconds = time.monotonic() - (first or deadline)
    for process in own:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        process.join(10)
    return Ended([process.exitcode for process in own], [path.read_text() for path in outputs], seconds)


def succeed(folder, processes, function, *args, limit=240):
    ended = run(folder, processes, function, *args, limit=limit)
    assert ended.codes == [0] * processes, f"{ended.codes}\n" + "\n".join(log[-3000:] for log in ended.logs)
    return ended
