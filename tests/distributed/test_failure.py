"""Where one of several processes fails, all end with its error and soon; a checkpoint is left to go on from."""

import re
import signal
import types

import pytest
import rank_runs
import ranks_server
import torch
from safetensors.torch import load_file

from diffusion_grpo.distributed import collectives as gathering
from diffusion_grpo.distributed import failure

SMALL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "num_inference_steps": 3,
    "max_steps": 3,
    "ddp_timeout": 15,
}
LIMIT = 60  # seconds within which the others must end, on a busy machine


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("reward", "RewardError: .*'fragile' raised ValueError: the scorer is out"),
        pytest.param("loss", "NonFiniteError", marks=pytest.mark.distributed),
        pytest.param("ratio", "RatioError: .*The first ratio after a rollout", marks=pytest.mark.distributed),
    ],
)
def test_an_error_of_one_process_is_that_of_all(tmp_path, where, words):
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", SMALL, where)
    assert ended.codes == [1, 1] and ended.seconds < LIMIT
    assert all(re.search(words, log) for log in ended.logs), [log[-1500:] for log in ended.logs]
    assert "Process 1 of 2 failed" in ended.logs[0] and "Process 1 of 2" not in ended.logs[1]
    if where == "reward":  # what was trained until then is kept
        assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").is_file()


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["fsdp2", "zero3"])
def test_a_reward_that_fails_within_an_evaluation_ends_all_with_a_checkpoint(tmp_path, mode):
    """In the first of two parts, after which the other process would sample again."""
    settings = SMALL | {"mode": mode, "ddp_timeout": 600, "held_out": [str(number) for number in range(16)]}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", settings, "evaluation", limit=120)
    assert ended.codes == [1, 1] and ended.seconds < LIMIT
    assert all(re.search("RewardError: .*'fragile' raised ValueError: the scorer is out", log) for log in ended.logs)
    assert "Process 1 of 2 failed" in ended.logs[0] and "Process 1 of 2" not in ended.logs[1]
    assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").is_file()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "where", "failed", "words"),
    [
        ("fsdp2", "rows", 1, "cannot read 17.png"),  # before a collective of the rollout, to which it does not come
        ("ddp", "disk", 0, "[Errno 28] No space left on device"),  # at the start
    ],
)
def test_what_one_process_cannot_read_or_write_ends_all(tmp_path, mode, where, failed, words):
    settings = SMALL | {"mode": mode, "ddp_timeout": 600}
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", settings, where, limit=120)
    assert ended.codes == [1, 1] and ended.seconds < LIMIT
    assert f"Process {failed} of 2 failed with OSError: {words}" in ended.logs[1 - failed]


@pytest.mark.distributed
def test_an_error_that_was_caught_is_over(tmp_path):
    ended = ranks_server.succeed(tmp_path, 2, rank_runs.catch, tmp_path / "run", SMALL)
    assert all("went on" in log for log in ended.logs)


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["lingering", "bug"])
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_an_error_in_the_update_ends_all_before_the_time_out(tmp_path, mode, where):
    """Whether the collective breaks in which the others wait, or does not, as with NCCL."""
    settings = SMALL | {"ddp_timeout": 600, "mode": mode}
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", settings, where, limit=150)
    assert ended.codes == [1, 1] and ended.seconds < 100
    assert "ZeroDivisionError: a loss of one's own" in ended.logs[1]
    assert "Process 1 of 2 failed with ZeroDivisionError: a loss of one's own" in ended.logs[0]
    assert ("this process ends too" in ended.logs[0]) or where == "bug"


SAVED = SMALL | {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 8, "max_steps": 4}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The weights that two processes end with where none is killed, in a mode; each trained once."""
    found = {}

    def weights(mode):
        if mode not in found:
            folder = tmp_path_factory.mktemp("unbroken")
            ranks_server.succeed(folder, 2, rank_runs.train, folder / "run", SAVED | {"mode": mode})
            found[mode] = load_file(folder / "run" / "weights.safetensors")
        return found[mode]

    return weights


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        pytest.param(mode, moment, marks=() if (mode, moment) == ("ddp", "reward") else pytest.mark.distributed)
        for mode in ("ddp", "zero3", "zero3-layered", "fsdp2")
        for moment in ("reward", "rollout", "update", "checkpoint")
    ],
)
def test_a_killed_process_ends_the_others_soon_and_the_run_resumes_exactly(tmp_path, unbroken, mode, moment):
    settings = SAVED | {"mode": mode}
    calls = {"rollout": 4, "update": 7, "checkpoint": 2, "reward": 0}[moment]
    run = tmp_path / "run"
    ended = ranks_server.run(tmp_path, 2, rank_runs.die, run, settings, moment, calls)
    assert -signal.SIGKILL in ended.codes and 1 in ended.codes and ended.seconds < LIMIT, ended.logs
    (last,) = [log for code, log in zip(ended.codes, ended.logs, strict=True) if code == 1]
    assert re.search("RankError|RuntimeError|DistBackendError|DistNetworkError", last)
    if moment == "reward":  # before the first checkpoint
        return
    assert list(run.glob("checkpoint-*"))
    ranks_server.succeed(tmp_path / "again", 2, rank_runs.train, run, settings, "brightness", True)
    one, other = load_file(run / "weights.safetensors"), unbroken(mode)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_process_waits_for_nobody():
    alone = failure.ProcessGroupMonitor(types.SimpleNamespace(num_processes=1), (KeyError,))
    with pytest.raises(KeyError), alone.barrier_after("x"):
        raise KeyError("x")
    with pytest.raises(ValueError, match="y"):
        alone.agree(ValueError("y"))
    with pytest.raises(KeyError), alone.propagate_errors():
        raise KeyError("z")
    alone.agree(None)
    measured = {"a": [1.0, 2.0], "b": [1.0, 3.0], "c": [], "d": [4.0, 2.0]}
    assert gathering.gather_means(alone.processes, measured, ("b",), ("d",)) == {"a": 1.5, "b": 3.0, "d": 2.0}
