"""The event loop of async rewards: one for the process, whoever asks for it."""

import asyncio
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diffusion_grpo.rewards.event_loop import run_in_loop


async def find_place() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread()


def test_all_threads_share_a_loop_in_a_thread_of_its_own():
    with ThreadPoolExecutor(4) as pool:
        places = [future.result(10) for future in pool.map(lambda _: run_in_loop(find_place()), range(8))]
    places.append(run_in_loop(find_place()).result(10))
    assert len(set(places)) == 1
    assert places[0][1].daemon and places[0][1] is not threading.current_thread()


def test_it_works_where_a_loop_runs_already():
    """As in a notebook."""

    async def cell():
        return run_in_loop(find_place()).result(10)[0], asyncio.get_running_loop()

    inner, outer = asyncio.run(cell())
    assert inner is not outer


def test_no_gradients_are_kept_and_a_failure_leaves_the_loop_alone():
    async def fail():
        assert not torch.is_grad_enabled()
        raise ConnectionError("gone")

    before = run_in_loop(find_place()).result(10)
    with pytest.raises(ConnectionError, match="gone"):
        run_in_loop(fail()).result(10)
    assert run_in_loop(find_place()).result(10) == before
    assert torch.is_grad_enabled()


def _answer_in_child(answers) -> None:
    answers.put(run_in_loop(asyncio.sleep(0, "child")).result(10))


def test_a_forked_process_gets_a_loop_of_its_own():
    """The thread of the parent's loop does not exist there."""
    run_in_loop(find_place()).result(10)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer_in_child, args=(answers,))
    child.start()
    child.join(30)
    is_alive = child.is_alive()
    child.kill()
    assert not is_alive and child.exitcode == 0 and answers.get() == "child"
