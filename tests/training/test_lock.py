"""One run at a time writes into a folder; what a killed one leaves is not in the way."""

import os
import signal
import time

import pytest
import ranks_server
from tiny_runs import finished_run, trainer_for

from diffusion_grpo.report.record import ResumeError
from diffusion_grpo.training.checkpoints import lock_folder


def hold(folder, entered, leave):
    with lock_folder(folder):
        entered.set()
        leave.wait(60)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder."""
    ranks_server.start_server()
    entered, leave = ranks_server.SERVER.Event(), ranks_server.SERVER.Event()
    process = ranks_server.SERVER.Process(target=hold, args=(tmp_path, entered, leave))
    process.start()
    assert entered.wait(60)
    yield process
    process.kill()
    process.join(60)


def test_a_second_run_is_refused(tmp_path, other):
    (tmp_path / "tmp-checkpoint-1").mkdir()  # the other one is writing it
    with pytest.raises(ResumeError, match="is being written by another run"):
        trainer_for(tmp_path).train()
    assert (tmp_path / "tmp-checkpoint-1").is_dir() and not (tmp_path / "run.json").exists()


def test_a_run_holds_its_folder_until_it_ends(tmp_path):
    seen = []

    def half(images, **columns):
        with pytest.raises(ResumeError), lock_folder(tmp_path):
            pass
        seen.append(len(images))
        return [0.5] * len(images)

    finished_run(tmp_path, rewards=half, max_steps=1)
    assert seen
    with lock_folder(tmp_path):
        pass


def fork_and_die(folder):
    with lock_folder(folder):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_of_a_killed_run_does_not_hold_its_folder(tmp_path):
    """Workers of a data loader live on for a moment."""
    ranks_server.start_server()
    process = ranks_server.SERVER.Process(target=fork_and_die, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with lock_folder(tmp_path):
        pass
