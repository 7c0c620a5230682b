"""Where one of several processes fails, all end with its error and soon; a checkpoint is left to go on from."""

import re
import signal
import types

import pytest
import rank_runs
import ranks_server
from safetensors.torch import load_file
from tiny_runs import are_equal

from diffusion_grpo.distributed import failure

SMALL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "num_inference_steps": 3,
    "max_steps": 3,
    "ddp_timeout": 600,
}
LIMIT = 60  # seconds within which the others must end, on a busy machine


SCORER = "RewardError: .*'fragile' raised ValueError: the scorer is out"
EVALUATED = {"held_out": [str(number) for number in range(16)], "per_device_eval_batch_size": 2}
EVALUATED |= {"eval_strategy": "steps", "eval_steps": 1}
OWN_ERROR = "ZeroDivisionError: a loss of one's own"


@pytest.mark.parametrize(
    ("where", "mode", "failed", "words"),
    [
        ("reward", "ddp", 1, SCORER),
        pytest.param("loss", "ddp", 1, "NonFiniteError", marks=pytest.mark.distributed),
        pytest.param(
            "ratio", "ddp", 1, "RatioError: .*The first ratio after a rollout", marks=pytest.mark.distributed
        ),
        # in the first of two parts, after which the other process would sample again
        pytest.param("evaluation", "fsdp2", 1, SCORER, marks=pytest.mark.distributed),
        pytest.param("evaluation", "zero3", 1, SCORER, marks=pytest.mark.distributed),
        # before a collective of the rollout, to which it does not come
        pytest.param("rows", "fsdp2", 1, "OSError: cannot read 17.png", marks=pytest.mark.distributed),
        # at the start
        pytest.param("disk", "ddp", 0, "OSError: .Errno 28. No space left on device", marks=pytest.mark.distributed),
    ],
)
def test_an_error_of_one_process_is_that_of_all(tmp_path, where, mode, failed, words):
    settings = SMALL | {"mode": mode} | (EVALUATED if where == "evaluation" else {})
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", settings, where)
    assert ended.codes == [1, 1] and ended.seconds < LIMIT
    assert all(re.search(words, log) for log in ended.logs), [log[-1500:] for log in ended.logs]
    told = [f"Process {failed} of 2 failed" in log for log in ended.logs]
    assert told == [rank != failed for rank in range(2)]
    if where in ("reward", "evaluation"):  # what was trained until then is kept
        assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").is_file()


@pytest.mark.distributed
def test_an_error_that_was_caught_is_over(tmp_path):
    ended = ranks_server.succeed(tmp_path, 2, rank_runs.catch, tmp_path / "run", SMALL)
    assert all("went on" in log for log in ended.logs)


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["lingering", "bug"])
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_an_error_in_the_update_ends_all_before_the_time_out(tmp_path, mode, where):
    """Whether the collective breaks in which the others wait, or does not, as with NCCL."""
    settings = SMALL | {"mode": mode}
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail, tmp_path / "run", settings, where, limit=150)
    assert ended.codes == [1, 1] and ended.seconds < 100
    assert OWN_ERROR in ended.logs[1] and f"Process 1 of 2 failed with {OWN_ERROR}" in ended.logs[0]
    assert ("this process ends too" in ended.logs[0]) or where == "bug"


SAVED = SMALL | {
    "ddp_timeout": 15,
    "save_strategy": "steps",
    "save_steps": 1,
    "steps_per_generation": 8,
    "max_steps": 4,
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The weights that two processes end with where none is killed, in a mode; each trained once."""
    found = {}

    def weights(mode):
        if mode not in found:
            folder = tmp_path_factory.mktemp("unbroken")
            _, _, found[mode] = rank_runs.trained(folder, 2, SAVED | {"mode": mode})
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
    assert are_equal(load_file(run / "weights.safetensors"), unbroken(mode))


def test_one_process_waits_for_nobody():
    alone = failure.ProcessGroupMonitor(types.SimpleNamespace(num_processes=1), (KeyError,))
    with pytest.raises(KeyError), alone.barrier_after("x"):
        raise KeyError("x")
    with pytest.raises(ValueError, match="y"):
        alone.agree(ValueError("y"))
    with pytest.raises(KeyError), alone.propagate_errors():
        raise KeyError("z")
    alone.agree(None)
